"""Kernels compiled before their launch: asked for first, begun in turns, loaded by who compiled them."""

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Event
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from triton import knobs

from kernels.compile_ahead import CompileQueue, compiling

CPU = torch.device("cpu")
NO_EXECUTOR = cast(Executor, None)  # where nothing may begin


class Compiled:
    """Stands for a compiled kernel."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def _init_handles(self) -> None:
        self._log.append(f"load {self.name}")


def begun_in_turns(*, begins_at_once: bool) -> list[str]:
    """What one thread did with four variants of a long kernel and two of a short one, and when."""
    log = list[str]()
    hold = Event()

    def ask(source: str, name: str) -> Any:
        def compile_kernel() -> Compiled:
            log.append(f"compile {name}")
            return Compiled(name, log)

        queue.source = source
        return queue.submit(compile_kernel)

    with ThreadPoolExecutor(1) as executor:
        queue = CompileQueue(executor, CPU, begins_at_once=begins_at_once)
        executor.submit(hold.wait)
        names = [("short", "b1"), *(("long source", f"a{number}") for number in range(1, 5)), ("short", "b2")]
        futures = [ask(*name) for name in names]
        log.append("asked")
        if begins_at_once:
            hold.set()
            executor.submit(int).result()  # without compile_all
            assert all(future.done() for future in futures)
        hold.set()
        queue.compile_all()
    assert [future.result().name for future in futures] == [name for _, name in names]
    return log


@pytest.mark.parametrize("begins_at_once", [False, True])
def test_variants_take_turns_and_are_loaded_where_they_were_compiled(begins_at_once: bool) -> None:
    order = ("a1", "a2", "a3", "b1", "b2", "a4")
    steps = [f"{what} {name}" for name in order for what in ("compile", "load")]
    assert begun_in_turns(begins_at_once=begins_at_once) == ["asked", *steps]


def test_nothing_begins_before_all_is_known() -> None:
    """Threads that compile would leave no time to ask."""
    begun: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        queue = CompileQueue(executor, CPU)
        queue.submit(lambda: begun.append("compile"))
        executor.submit(int).result()
        assert begun == []
        queue.fail(KeyError("asked wrongly"))


def test_a_group_is_there_before_later_ones_begin() -> None:
    """One thread: who waits for the first group goes on while the second is compiled; what is asked for then
    begins at once.
    """
    log, hold = list[str](), Event()

    def compile_slowly() -> Compiled:
        hold.wait()
        return Compiled("slow", log)

    with ThreadPoolExecutor(1) as executor:
        queue = CompileQueue(executor, CPU)
        queue.source = "short"
        queue.submit(lambda: Compiled("first", log))
        queue.next_group()
        queue.source = "a long source, which comes first within a group"
        slow = queue.submit(compile_slowly)
        queue.compile_group(0)
        assert log == ["load first"]
        late = queue.submit(lambda: Compiled("late", log))
        assert not slow.done()
        hold.set()
        queue.compile_group(1)
        assert late.result(0).name == "late"
    assert log == ["load first", "load slow", "load late"]


def test_who_waits_for_a_group_hears_that_its_compiler_failed() -> None:
    def fail() -> None:
        raise ValueError("no such tile")

    with ThreadPoolExecutor(1) as executor:
        queue = CompileQueue(executor, CPU)
        queue.submit(fail)
        queue.next_group()
        with pytest.raises(ValueError, match="no such tile"):
            queue.compile_group(0)


def test_a_compiler_that_fails_is_heard_by_who_waits_and_no_other() -> None:
    log = list[str]()

    def fail() -> None:
        raise ValueError("no such tile")

    with ThreadPoolExecutor(2) as executor:
        queue = CompileQueue(executor, CPU)
        broken, sound = queue.submit(fail), queue.submit(lambda: Compiled("a", log))
        queue.compile_all()
    assert isinstance(broken.exception(0), ValueError)
    assert sound.result(0).name == "a"


def test_an_error_while_asking_ends_the_wait_and_restores_what_was_set() -> None:
    """Whoever waits for what was asked before would wait for ever."""
    queue = CompileQueue(NO_EXECUTOR, CPU)
    future = queue.submit(lambda: None)
    queue.fail(KeyError("asked wrongly"))
    assert isinstance(future.exception(0), KeyError)
    before = knobs.compilation.store_binary_only

    def ask_wrongly() -> None:
        with compiling(CPU):
            assert knobs.compilation.store_binary_only
            raise KeyError("asked wrongly")

    with pytest.raises(KeyError, match="asked wrongly"):
        ask_wrongly()
    assert knobs.compilation.store_binary_only == before


def test_an_error_while_a_kernel_is_just_compiled_leaves_that_kernel() -> None:
    """The error is what the start ends with, not that a compiler was quicker."""
    queue, log = CompileQueue(NO_EXECUTOR, CPU), list[str]()
    quick, slow = (queue.submit(lambda: Compiled("a", log)) for _ in range(2))
    quick.done = lambda: False  # when somebody looked
    quick.set_result("compiled")
    queue.fail(KeyError("asked wrongly"))
    assert quick.result(0) == "compiled"
    assert isinstance(slow.exception(0), KeyError)


# Compiles for a GPU that is not there.
PROGRAM = """
import os, pathlib
import torch, triton, triton.language as tl
from kernels.compile_ahead import compiling
from kernels.launcher import launch
from kernels.testing_driver import AbsentGpu

gpu = AbsentGpu()

@triton.jit
def double(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)

def ask(size):
    launch(double, (1,), (torch.zeros(64), 64), (size,), num_warps=1)

with compiling(torch.device("cpu")):
    for size in (32, 64, 32):
        ask(size)
    print("asked", gpu.loaded)
print("compiled", gpu.loaded)
kept = {file.suffix for file in pathlib.Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.*")}
print("kept", sorted(kept & {".ttir", ".ttgir", ".llir", ".ptx", ".cubin"}))
with compiling(torch.device("cpu")):
    ask(64)
print("again", len(gpu.loaded), gpu.launched)
ask(64)
print("launch", len(gpu.loaded), gpu.launched)
"""


GROUPS = (
    PROGRAM[: PROGRAM.index("with compiling")]
    + """
from kernels.compile_ahead import compile_queue
from triton import compiler, knobs
compile_here, done = compiler.compile, []

def note(source, **options):
    kernel = compile_here(source, **options)
    done.append(source.constants[2,])
    return kernel

compiler.compile = note
with compile_queue(torch.device("cpu")) as queue:
    with queue.asking():
        ask(32)
        queue.next_group()
        ask(64)
    queue.compile_group(0)
    ask(32)
    print("launched", gpu.launched, 32 in done)
    ask(128)  # nobody asked for it: who launches it waits
    print("launched", gpu.launched)
print("all", sorted(done), len(gpu.loaded))
ask(64)
print("no more", len(done), gpu.launched)
"""
)


def test_launches_within_it_compile_and_load_once_and_launch_nothing(
    run_on_absent_gpu: Callable[[str], list[str]],
) -> None:
    """The real compiler of Triton for a GPU's target, without the GPU."""
    assert run_on_absent_gpu(PROGRAM) == [
        "asked []",
        "compiled ['double', 'double']",
        "kept ['.cubin']",
        "again 2 []",
        "launch 2 ['double']",
    ]


def test_kernels_of_a_group_are_launched_while_others_are_compiled(
    run_on_absent_gpu: Callable[[str], list[str]],
) -> None:
    assert run_on_absent_gpu(GROUPS) == [
        "launched ['double'] True",
        "launched ['double', 'double']",
        "all [32, 64, 128] 3",
        "no more 3 ['double', 'double', 'double']",
    ]
