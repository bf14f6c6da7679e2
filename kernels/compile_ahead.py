"""Compiles kernels before their first launch, several at once: a start need not wait for them one by one.

Knows no kernel: what is launched within `compiling` is compiled on threads instead of run, then loaded with
its launcher, which Triton builds with the C compiler at a signature's first use. Where nothing is compiled,
in Triton's interpreter, launches within it run as ever.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

from kernels.launcher import set_compiling

MAX_THREADS = 12


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Launches only ask for their kernel; the end waits for all of them and raises what the compiler raised.

    Outputs of the launches are left as they are, so nothing may depend on their values. One thread at a time.
    """
    run: Callable[..., Any] = JITFunction.run
    asked: dict[int, Any] = {}

    def ask(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        asked[id(kernel)] = kernel
        return kernel

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as executor:
        with AsyncCompileMode(executor):
            JITFunction.run = ask
            set_compiling(True)
            try:
                yield
            finally:
                JITFunction.run = run
                set_compiling(False)
        for _ in executor.map(_load, asked.values()):
            pass


def _load(kernel: Any) -> None:
    (kernel.result() if isinstance(kernel, FutureKernel) else kernel)._init_handles()
