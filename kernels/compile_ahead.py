"""Compiles kernels before their first launch, several at once: a start need not wait for them one by one.

Knows no kernel: what is launched within `compiling` is compiled instead of run, by processes where some were
begun (kernels.compile_processes), else by threads. These begin when all is known, since compilers leave the
interpreter no time to ask for more. Each kernel is loaded by the thread that compiled it, or had it compiled,
with its launcher, which Triton 3.6 builds with the C compiler. Where nothing is compiled, in Triton's
interpreter, launches within it run as ever.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from threading import Lock
from typing import Any

import torch
from triton import compiler, knobs
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

from kernels.built_modules import load_apart
from kernels.compile_processes import CompileProcesses, take_begun
from kernels.launcher import set_compiling

MAX_THREADS = 16
VARIANTS_AT_A_TIME = 3

log = logging.getLogger(__name__)


class CompileQueue(Executor):
    """Takes what there is to compile and has it compiled, before `compile_all` only if `begins_at_once`.

    A few variants of every kernel, then the next few, long kernels first: one that takes longest is then not
    the last to begin, whichever it is. Each is loaded on the device as soon as it is compiled.
    """

    def __init__(self, executor: Executor, device: torch.device, *, begins_at_once: bool = False) -> None:
        self.source = ""  # of the kernel that is asked for, before it is submitted
        self._executor = executor
        self._device = device
        self._begins_at_once = begins_at_once
        self._variants: Counter[str] = Counter()
        self._futures: list[Future[Any]] = []
        self._lock = Lock()  # of the next
        self._waiting: list[tuple[tuple[int, int, int], Future[Any], Callable[[], Any]]] = []

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """See Executor."""
        future: Future[Any] = Future()
        order = (self._variants[self.source] // VARIANTS_AT_A_TIME, -len(self.source), len(self._futures))
        self._variants[self.source] += 1
        self._futures.append(future)
        with self._lock:
            heappush(self._waiting, (order, future, lambda: task(*arguments, **options)))
        if self._begins_at_once:
            self._executor.submit(self._compile_next)
        return future

    def compile_all(self) -> None:
        """Waits until all are compiled and loaded."""
        for _ in range(0 if self._begins_at_once else len(self._futures)):
            self._executor.submit(self._compile_next)
        wait(self._futures)

    def _compile_next(self) -> None:
        with self._lock:
            _, future, task = heappop(self._waiting)
        _compile_and_load(future, task, self._device)

    def fail(self, error: BaseException) -> None:
        """Nothing more will be compiled: whoever waits gets this error."""
        for future in self._futures:
            with suppress(InvalidStateError):  # compiled already, perhaps this very moment
                future.set_exception(error)


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Launches only ask for their kernel; the end waits for all of them and raises what the compiler raised.

    Outputs of the launches are left as they are, so nothing may depend on their values. One thread at a time.
    """
    load_apart()
    kernels: dict[int, Any] = {}
    with ExitStack() as stack:
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        if (processes := take_begun()) is not None:
            threads = stack.enter_context(processes).count
            stack.enter_context(_compiled_by(processes))
        executor = stack.enter_context(ThreadPoolExecutor(threads, "compile"))
        queue = CompileQueue(executor, device, begins_at_once=processes is not None)
        stack.enter_context(_binaries_alone())
        stack.enter_context(AsyncCompileMode(queue))  # its end tells kernels what was compiled for them
        try:
            with _asking(queue, kernels):
                yield
            queue.compile_all()
        except BaseException as error:  # a signal's SystemExit too: nobody may wait for a kernel for ever
            queue.fail(error)
            raise
    if processes is not None:
        processes.mark_compiled()
    for kernel in kernels.values():  # those that were compiled before, too
        if not isinstance(kernel, FutureKernel):
            kernel._init_handles()


@contextmanager
def _asking(queue: CompileQueue, kernels: dict[int, Any]) -> Iterator[None]:
    run: Callable[..., Any] = JITFunction.run

    def ask(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        queue.source = self.src
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = kernel
        return kernel

    JITFunction.run = ask
    set_compiling(True)
    try:
        yield
    finally:
        JITFunction.run = run
        set_compiling(False)


@contextmanager
def _compiled_by(processes: CompileProcesses) -> Iterator[None]:
    """Kernels are compiled by a process; the thread that waits for it then finds them in the cache."""
    compile_here = compiler.compile
    failures: list[str] = []
    is_on = [True]  # kernels take the function when they are first launched, and keep it

    def compile_there(source: Any, **options: Any) -> Any:
        if is_on and (why := processes.compile(source, options)):
            failures.append(f"{source.name}: {why}")
        return compile_here(source, **options)

    compiler.compile = compile_there
    try:
        yield
    finally:
        compiler.compile = compile_here
        is_on.clear()
        if failures:
            log.warning("event=compiled_here kernels=%d first=%r", len(failures), failures[0])


@contextmanager
def _binaries_alone() -> Iterator[None]:
    """Of what a compiler makes on its way only the end is kept: each start reads all that is there."""
    before = knobs.compilation.store_binary_only
    knobs.compilation.store_binary_only = True
    try:
        yield
    finally:
        knobs.compilation.store_binary_only = before


def _compile_and_load(future: "Future[Any]", compile_kernel: Callable[[], Any], device: torch.device) -> None:
    if future.done():  # the start was broken off
        return
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        kernel = compile_kernel()
        kernel._init_handles()
    except BaseException as error:  # whatever it was, it is raised again where the kernel is needed
        future.set_exception(error)
    else:
        future.set_result(kernel)
