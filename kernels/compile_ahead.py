"""Compiles kernels before their first launch, several at once: a start need not wait for them one by one.

Knows no kernel: what is launched within `asking` is compiled instead of run, by processes where some were
begun (kernels.compile_processes), else by threads. These begin when all is known, since compilers leave the
interpreter no time to ask for more. Kernels come in groups: those of the first can be launched while later
ones are compiled. Each kernel is loaded by the thread that compiled it, or had it compiled, with its
launcher, which Triton 3.6 builds with the C compiler. Where nothing is compiled, in Triton's interpreter,
launches within it run as ever.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from itertools import chain
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
    """Takes what there is to compile and has it compiled, before anybody waits only if `begins_at_once`.

    Group after group; within one a few variants of every kernel, then the next few, long kernels first: one
    that takes longest is then not the last to begin, whichever it is. Each is loaded on the device as soon as
    it is compiled.
    """

    def __init__(self, executor: Executor, device: torch.device, *, begins_at_once: bool = False) -> None:
        self.source = ""  # of the kernel that is asked for, before it is submitted
        self.asked: dict[int, Any] = {}  # kernels by their id, those that were compiled before too
        self._executor = executor
        self._device = device
        self._has_begun = begins_at_once
        self._variants: Counter[str] = Counter()
        self._groups: list[list[Future[Any]]] = [[]]
        self._lock = Lock()  # of the next
        self._waiting: list[tuple[tuple[int, int, int, int], Future[Any], Callable[[], Any]]] = []

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Launches only ask for their kernel: those of the newest group. Outputs of the launches are left as
        they are, so nothing may depend on their values. One thread at a time.
        """
        run: Callable[..., Any] = JITFunction.run

        def ask(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            self.source = kernel.src
            compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
            self.asked[id(compiled)] = compiled
            return compiled

        JITFunction.run = ask
        set_compiling(True)
        try:
            yield
        finally:
            JITFunction.run = run
            set_compiling(False)

    def next_group(self) -> None:
        """What is asked for from now on is compiled behind what was asked for before."""
        self._groups.append([])

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """See Executor."""
        future: Future[Any] = Future()
        turn = self._variants[self.source] // VARIANTS_AT_A_TIME
        count = sum(map(len, self._groups))
        order = (len(self._groups), turn, -len(self.source), count)
        self._variants[self.source] += 1
        self._groups[-1].append(future)
        with self._lock:
            heappush(self._waiting, (order, future, lambda: task(*arguments, **options)))
        if self._has_begun:
            self._executor.submit(self._compile_next)
        return future

    def compile_group(self, number: int) -> None:
        """Waits until those of a group are compiled and loaded; raises what their compiler raised."""
        self._begin()
        for future in self._groups[number]:
            future.result()

    def compile_all(self) -> None:
        """Waits until all are compiled and loaded."""
        self._begin()
        wait([future for group in self._groups for future in group])

    def fail(self, error: BaseException) -> None:
        """Nothing more will be compiled: whoever waits gets this error."""
        for future in chain.from_iterable(self._groups):
            with suppress(InvalidStateError):  # compiled already, perhaps this very moment
                future.set_exception(error)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            for _ in chain.from_iterable(self._groups):
                self._executor.submit(self._compile_next)

    def _compile_next(self) -> None:
        with self._lock:
            _, future, task = heappop(self._waiting)
        _compile_and_load(future, task, self._device)


@contextmanager
def compile_queue(device: torch.device) -> Iterator[CompileQueue]:
    """Takes what is asked for within `asking`; the end waits for all of it and raises what the compiler
    raised. Kernels of a group that is compiled can be launched meanwhile, between two askings.
    """
    load_apart()
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
            yield queue
            queue.compile_all()
        except BaseException as error:  # a signal's SystemExit too: nobody may wait for a kernel for ever
            queue.fail(error)
            raise
    if processes is not None:
        processes.mark_compiled()
    for kernel in queue.asked.values():  # those that were compiled before, too
        if not isinstance(kernel, FutureKernel):
            kernel._init_handles()


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Launches only ask for their kernel, all in one group: see CompileQueue.asking."""
    with compile_queue(device) as queue, queue.asking():
        yield


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
