"""Compiles kernels before their first launch, several at once: a start need not wait for them one by one.

Knows no kernel: what is launched within `compiling` is compiled on threads instead of run. Where nothing is
compiled, in Triton's interpreter, launches within it run as ever.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

MAX_THREADS = 8


@contextmanager
def compiling() -> Iterator[None]:
    """Launches only ask for their kernel; the end waits for all of them and raises what the compiler raised.

    Outputs of the launches are left as they are, so nothing may depend on their values. One thread at a time.
    """
    run: Callable[..., Any] = JITFunction.run

    def ask(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **options)

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "compile") as executor, AsyncCompileMode(executor):
        JITFunction.run = ask
        try:
            yield
        finally:
            JITFunction.run = run
