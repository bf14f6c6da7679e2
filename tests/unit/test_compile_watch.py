"""Kernels compiled after the start: a line for each, for a while."""

import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

import torch
from triton import knobs

from kernels.compile_watch import MAX_LINES, CompileWatch
from kernels.triton_backend import TritonBackend
from tests.toy_runners import sizes_for
from worker.execution.cuda_runner import CudaRunner
from worker.model.toy import toy_config, toy_model

LINE = r"event=kernel_compiled_late kernel=(\w+) seconds=(\d+\.\d{3}) cached=(yes|no)( more=untold)?"
# Compiles for a GPU that is not there.
PROGRAM = """
import logging
import torch, triton, triton.language as tl
from kernels.compile_watch import CompileWatch
from kernels.launcher import launch
from kernels.testing_driver import AbsentGpu

logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(levelname)s %(message)s")
AbsentGpu()

@triton.jit
def double(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)

x = torch.zeros(65)

def step(tensor, count):
    launch(double, (1,), (tensor, count), (64,), num_warps=1)

step(x, 64)
watch = CompileWatch()
watch.begin()
step(x, 48)        # the kernel of the start
step(x, 63)        # another: no multiple of 16
double[1,](x[1:], 48, 64, num_warps=1)  # another: not aligned
watch.end()
step(x[1:], 63)    # and another, of which nobody wants to know
"""


@pytest.fixture(autouse=True)
def listener_as_it_was() -> Iterator[None]:
    before = knobs.compilation.listener
    yield
    knobs.compilation.listener = before


def compiled(name: str) -> None:
    """What Triton says of a kernel."""
    knobs.compilation.listener(
        src=SimpleNamespace(name=name),
        metadata={},
        metadata_group={},
        times=SimpleNamespace(total=206_000),
        cache_hit=False,
    )


def test_a_kernel_that_the_start_did_not_have_is_told_with_its_seconds(
    run_on_absent_gpu: Callable[[str], list[str]],
) -> None:
    """Launched by the launcher or by Triton itself; one that is there is not."""
    printed = run_on_absent_gpu(PROGRAM)
    found = [re.fullmatch("WARNING " + LINE, line) for line in printed]
    assert [match and match[1] for match in found] == ["double", "double"], printed
    assert all(match and float(match[2]) > 0 and match[3] == "no" for match in found), printed


def test_a_fault_that_repeats_is_told_so_often_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch()
    watch.begin()
    watch.begin()  # once is enough: each kernel has one line
    with caplog.at_level(logging.WARNING):
        for number in range(MAX_LINES + 20):
            compiled(f"kernel_{number}")
    watch.end()
    matches = [re.fullmatch(LINE, message) for message in caplog.messages]
    assert [match and match[1] for match in matches] == [f"kernel_{i}" for i in range(MAX_LINES)]
    assert {match and match[2] for match in matches} == {"0.206"}
    assert [bool(match and match[4]) for match in matches] == [False] * (MAX_LINES - 1) + [True]


def test_who_listened_before_hears_meanwhile_and_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    knobs.compilation.listener = lambda *, src, **others: heard.append(src.name)
    first, second = CompileWatch(), CompileWatch()
    first.begin()
    second.begin()
    first.end()  # not the one that was begun last
    with caplog.at_level(logging.WARNING):
        compiled("one")
        second.end()
        compiled("two")
    assert heard == ["one", "two"]
    assert len(caplog.messages) == 1, "the second watch was on for the first kernel"


def test_a_runner_watches_from_the_end_of_the_start_until_it_is_closed() -> None:
    config = toy_config()
    backend = TritonBackend(config.num_heads, config.num_kv_heads, config.head_dim, 64)
    sizes = sizes_for(
        config,
        max_running=2,
        max_context=64,
        num_pages=8,
        page_size=8,
    )
    before = knobs.compilation.listener
    runner = CudaRunner(toy_model(config), backend, sizes, torch.device("cpu"))
    assert knobs.compilation.listener is before, "kernels of the start are nobody's fault"
    runner.watch_compilers()
    assert knobs.compilation.listener is not before
    runner.close()
    assert knobs.compilation.listener is before
    runner.close()
