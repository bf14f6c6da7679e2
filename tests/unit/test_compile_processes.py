"""Processes that compile kernels: begun where nothing is compiled yet, and none is left over."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from triton import knobs

from kernels import compile_processes
from kernels.compile_processes import CompileProcesses, begin_if_cold, close_begun, take_begun
from kernels.config import triton_cache_folder
from worker import __main__ as start
from worker.config import from_args

KERNELS = """
import triton, triton.language as tl

@triton.jit
def double(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)

@triton.jit
def broken(x, n, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0, "never so small")
"""

# Compiles for a GPU that is not there, with two processes.
PROGRAM = """
import logging, os, pathlib
import torch
from triton import knobs
from kernels import compile_processes
from kernels.compile_ahead import compiling
from kernels.compile_processes import CompileProcesses
from kernels.launcher import launch
from kernels.testing_driver import AbsentGpu
from some_kernels import broken, double

logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
gpu, hits = AbsentGpu(), []
knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
compile_processes.END_SECONDS = 60
processes = CompileProcesses(["some_kernels"], 2, mark=pathlib.Path(os.environ["TRITON_CACHE_DIR"]) / "mark")
compile_processes._begun.append(processes)
"""


@pytest.fixture
def run(tmp_path: Path, run_on_absent_gpu: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Lines that a program prints, in a process of its own with an empty cache."""
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    return lambda code: run_on_absent_gpu(PROGRAM + textwrap.dedent(code))


def test_kernels_come_from_the_processes_and_these_end(run: Callable[[str], list[str]]) -> None:
    assert run(
        """
        with compiling(torch.device("cpu")):
            for size in (16, 32, 64):
                launch(double, (1,), (torch.zeros(64), 64), (size,), num_warps=1)
        print(hits, gpu.loaded, processes._process.returncode, processes._mark.exists())
        launch(double, (1,), (torch.zeros(64), 64), (128,), num_warps=1)
        print(hits)
        """
    ) == ["[True, True, True] ['double', 'double', 'double'] 0 True", "[True, True, True, False]"]


def test_what_a_process_cannot_compile_is_tried_here_and_says_why(run: Callable[[str], list[str]]) -> None:
    printed = run(
        """
        try:
            with compiling(torch.device("cpu")):
                launch(broken, (1,), (torch.zeros(64), 64), (16,), num_warps=1)
        except Exception as error:
            print("here:", "never so small" in str(error))
        print("ended", processes._process.returncode)
        print("marked", processes._mark.exists())
        """
    )
    assert "event=compiled_here kernels=1 first='broken: " in printed[0]
    assert "never so small" in printed[0]
    assert printed[-3:] == ["here: True", "ended 0", "marked False"]


def test_processes_that_die_are_done_without(run: Callable[[str], list[str]]) -> None:
    """However many kernels come after them: nobody waits for a process that is gone."""
    printed = run(
        """
        processes._process.kill()  # its children go with it
        with compiling(torch.device("cpu")):
            for size in (16, 32, 64, 128):
                launch(double, (1,), (torch.zeros(64), 64), (size,), num_warps=1)
        print(hits, gpu.loaded)
        """
    )
    assert 'event=compiled_here kernels=4 first="double: no answer: ' in printed[0]
    assert printed[-1] == f"{[False] * 4} {['double'] * 4}"


def test_a_process_that_hangs_is_given_up_and_ended(run: Callable[[str], list[str]]) -> None:
    printed = run(
        """
        import signal, time
        from pathlib import Path

        def runs(pid):
            try:
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            except OSError:
                return False

        server = f"/proc/{processes._process.pid}"
        for connection in processes._connections:  # each is there, and answers
            connection.send(())
            assert "TypeError" in connection.recv()
        children = Path(f"{server}/task/{server[6:]}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGSTOP)
        compile_processes.ANSWER_SECONDS = compile_processes.END_SECONDS = 0.1
        with compiling(torch.device("cpu")):
            launch(double, (1,), (torch.zeros(64), 64), (16,), num_warps=1)
        print(hits, len(children), processes._process.returncode)
        while any(map(runs, children)):  # else the test runs into its limit
            time.sleep(0.01)
        print("gone")
        """
    )
    assert "no answer within 0.1 s" in printed[0]
    assert printed[-2:] == ["[False] 2 -9", "gone"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder of Triton."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_processes, "_begun", [])
    monkeypatch.setattr(compile_processes.os, "sched_getaffinity", lambda pid: set(range(4)))
    yield tmp_path / "cache"
    if (left := take_begun()) is not None:
        left.close()


def began(shape: str) -> bool:
    """Whether a start of this shape begins processes."""
    begin_if_cold([], shape)
    processes = take_begun()
    if processes is None:
        return False
    assert processes.count == 3
    processes.close()
    return True


def test_they_are_begun_where_these_kernels_were_not_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert began("a")
    begin_if_cold([], "a")
    processes = take_begun()
    assert processes is not None
    processes.close()
    processes.mark_compiled()  # there is no cache folder: it was not needed
    cache.mkdir()
    processes.mark_compiled()
    assert not began("a")
    assert began("b")
    monkeypatch.setattr(compile_processes, "version", lambda name: f"another {name}")
    assert began("a")


def test_a_machine_of_few_cores_begins_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes.os, "sched_getaffinity", lambda pid: {0, 1})
    assert not began("a")


def test_none_is_begun_twice(cache: Path) -> None:
    begin_if_cold([], "a")
    begin_if_cold([], "a")
    processes = take_begun()
    assert processes is not None
    assert take_begun() is None
    processes.close()
    processes.close()


ADOPTING = """
import ctypes, os, sys
sys.path[:] = {path!r}
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
from kernels import compile_processes
compile_processes.END_SECONDS = 60
processes = compile_processes.CompileProcesses([], 3)
for connection in processes._connections:
    connection.send(())
    connection.recv()
processes.close()
print(processes._process.returncode)
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("none left")
"""


def test_process_1_of_a_container_is_left_none_to_wait_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADOPTING.format(path=sys.path)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split("\n") == ["0", "none left", ""], done.stderr


def test_a_terminals_interrupt_is_not_theirs() -> None:
    """While they import, too: a worker that is interrupted ends them."""
    with CompileProcesses([], 1) as processes:
        deadline = time.monotonic() + 200
        status = Path(f"/proc/{processes._process.pid}/status")
        while not int(re.findall(r"SigIgn:\s*(\w+)", status.read_text())[0], 16) & 1 << (signal.SIGINT - 1):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        processes._process.send_signal(signal.SIGINT)
        processes._connections[0].send(())
        assert "TypeError" in processes._connections[0].recv()


def test_a_cache_that_may_not_be_searched_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert not began("a")


def test_a_user_without_a_home_has_a_cache_where_triton_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert str(triton_cache_folder()) == "~/.triton/cache"


def test_closing_ends_them_while_they_still_import(tmp_path: Path) -> None:
    with CompileProcesses([], 3) as processes:
        assert processes._process.poll() is None
    assert processes._process.returncode is not None


def shapes_begun(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """With what a worker of these settings would begin processes."""
    begun: list[str] = []
    monkeypatch.setattr(start, "begin_if_cold", lambda modules, shape: begun.append(shape))
    start.begin_compilers(from_args(["--device", "cuda", *arguments]))
    return begun


@pytest.mark.parametrize(
    ("arguments", "has_flashinfer", "count"),
    [
        ((), False, 1),
        ((), True, 1),  # auto takes ours where its kernels are not compiled
        (("--attention-backend", "triton"), True, 1),
        (("--attention-backend", "flashinfer"), True, 0),
        (("--attention-backend", "paged_cuda"), False, 0),
    ],
)
def test_a_worker_begins_them_for_kernels_of_its_own_only(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], has_flashinfer: bool, count: int
) -> None:
    monkeypatch.setattr(start, "find_spec", lambda name: object() if has_flashinfer else None)
    assert len(shapes_begun(monkeypatch, *arguments)) == count


def test_what_was_begun_for_another_backends_start_is_ended_and_not_begun_again(cache: Path) -> None:
    """A start that took FlashInfer needs none the next time; one that failed tells nothing."""
    cache.mkdir()
    close_begun(is_needless=True)  # nothing was begun
    for is_needless in (False, True):
        begin_if_cold([], "a")
        [processes] = compile_processes._begun
        close_begun(is_needless=is_needless)
        assert take_begun() is None
        assert processes._process.returncode is not None
        assert began("a") != is_needless


def test_a_mark_made_beside_flashinfer_says_nothing_of_a_start_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [object()]
    monkeypatch.setattr(start, "find_spec", lambda name: there[0])
    beside = shapes_begun(monkeypatch)
    assert shapes_begun(monkeypatch, "--attention-backend", "triton") != beside
    there[0] = None
    assert shapes_begun(monkeypatch) != beside


def test_what_kernels_depend_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    settings = (
        *(
            (),
            ("--model", "random:tiny"),
            ("--dtype", "fp32"),
            ("--weight-dtype", "fp8"),
            ("--page-size", "32"),
        ),
        *(("--kv-dtype", "fp8"), ("--deterministic",), ("--max-running", "3"), ("--max-context", "99")),
    )
    shapes = {shape for arguments in settings for shape in shapes_begun(monkeypatch, *arguments)}
    assert len(shapes) == len(settings)
    assert shapes_begun(monkeypatch, "--worker-id", "another")[0] in shapes


@pytest.mark.parametrize("home", ["", "/somewhere"])
def test_the_cache_folder_is_tritons(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", home) if home else monkeypatch.delenv("TRITON_HOME", raising=False)
    assert str(triton_cache_folder()) == knobs.cache.dir
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    assert str(triton_cache_folder()) == knobs.cache.dir == "/chosen"
