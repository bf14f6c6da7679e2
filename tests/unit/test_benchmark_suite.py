"""The suite ends whatever its stages do, and says what became of each."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.suite import Lane, count_tests, lanes, run_all
from benchmarks.suite_stages import MEMCHECKED, Stage, stages

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [(name, command) for stage in stages() for name, command in stage.commands.items()]
arguments = Lane().words


def stage(name: str, command: str, usual_s: int = 1, limit_s: int = 60) -> Stage:
    return Stage(name, {name: command}, usual_s, limit_s)


def test_failures_and_overruns_are_named_and_stop_nothing(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    stages = [
        stage("fails", "python -c 'raise SystemExit(3)'"),
        stage("hangs", f"sh -c 'sleep 600 & echo $! > {pid}; wait'", limit_s=3),
        stage("too long", "python -c pass", usual_s=500, limit_s=600),
        stage("works", "python -c 'print(5 * 5)'"),
    ]
    outcomes = run_all(stages, tmp_path / "logs", 120)
    assert outcomes["fails"].startswith("failed (3)")
    assert outcomes["hangs"].startswith("over time")
    assert outcomes["too long"].startswith("not begun: takes 500 s")
    assert outcomes["works"].startswith("ok")
    assert (tmp_path / "logs" / "works.log").read_text() == "25\n"
    child = int(pid.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


SUITE = """
import sys
from pathlib import Path
from benchmarks.suite import run_all
from benchmarks.suite_stages import Stage
folder = Path(sys.argv[1])
commands = [f"sh -c 'echo $$ > {folder}/pid; sleep 600 & wait'", f"sh -c 'touch {folder}/next'"]
run_all([Stage(name, {"it": name}, 1, 600) for name in commands], folder / "logs", 600)
"""


def test_a_suite_that_is_interrupted_leaves_no_command_behind(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """Commands have sessions of their own: an engine would hold the GPU, and the next stages would follow."""
    pid = tmp_path / "pid"
    suite = subprocess.Popen([sys.executable, "-c", SUITE, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        suite.send_signal(signal.SIGINT)
        suite.wait(60)
        child = int(pid.read_text())
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        assert not (tmp_path / "next").exists()
    finally:
        suite.kill()
        suite.wait()


def test_what_was_not_run_is_not_counted_by_the_log_of_another_suite(tmp_path: Path) -> None:
    (tmp_path / "second.log").write_text("=== 7 passed in 1.0s ===\n")
    commands = {"first": "sleep 600", "second": "python -c pass"}
    outcome = run_all([Stage("tests", commands, 1, 1)], tmp_path, 120)["tests"]
    assert outcome.startswith("first over time; second over time after")


def test_commands_that_run_at_once_share_the_cores(tmp_path: Path) -> None:
    show = "python -c 'import os; print(os.environ[\"OMP_NUM_THREADS\"])'"
    assert run_all([Stage("tests", {"one": show, "two": show}, 1, 60, at_once=2)], tmp_path, 120)
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {(tmp_path / f"{name}.log").read_text() for name in ("one", "two")} == {f"{half}\n"}
    alone, beside = (Lane(1, "4,5,6,7,8").words("python -V", count) for count in (1, 2))
    assert beside == [*alone[:5], "env", "OMP_NUM_THREADS=2", *alone[5:]]


def test_commands_of_a_stage_run_at_once_and_each_has_its_outcome(tmp_path: Path) -> None:
    """Two that wait for each other end only if both run."""
    here, there = tmp_path / "here", tmp_path / "there"
    meet = "sh -c 'touch {}; while [ ! -e {} ]; do sleep 0.05; done'"
    commands = {
        "one": meet.format(here, there),
        "other": meet.format(there, here),
        "bad": "sh -c 'echo ==== 1 failed, 2 passed in 0.1s ====; exit 1'",
    }
    outcome = run_all([Stage("tests", commands, 1, 60, at_once=2)], tmp_path / "logs", 120)["tests"]
    assert outcome.startswith("bad failed (1) [1 failed, 2 passed] after")


def test_a_stage_that_skips_all_its_tests_is_not_ok(tmp_path: Path) -> None:
    skips, passes = (f"sh -c 'echo ==== {count} in 0.1s ===='" for count in ("3 skipped", "2 passed"))
    todo = [
        Stage("skipped", {"one": skips, "other": skips}, 1, 60),
        Stage("partly", {"these": skips, "those": passes}, 1, 60),
    ]
    outcomes = run_all(todo, tmp_path / "logs", 120)
    assert outcomes["skipped"].startswith("nothing tested [6 skipped] after")
    assert outcomes["partly"].startswith("ok [3 skipped, 2 passed] after")


def test_each_gpu_takes_stages_with_cores_of_its_own(tmp_path: Path) -> None:
    """Two stages that wait for each other end only if two GPUs have them at once."""
    here, there = tmp_path / "here", tmp_path / "there"
    tells = "python -c 'import os; print(os.environ[\"CUDA_VISIBLE_DEVICES\"], *os.sched_getaffinity(0))'"
    meet = "sh -c 'touch {}; while [ ! -e {} ]; do sleep 0.05; done'"
    todo = [
        Stage("one", {"tells": tells, "meets": meet.format(here, there)}, 1, 60),
        stage("other", meet.format(there, here)),
        stage("later", tells),
    ]
    outcomes = run_all(todo, tmp_path / "logs", 120, gpus=2)
    assert list(outcomes) == ["one", "other", "later"]
    assert all(outcome.startswith("ok") for outcome in outcomes.values()), outcomes
    gpu, *cores = (tmp_path / "logs" / "tells.log").read_text().split()
    assert ",".join(cores) == lanes(2)[int(gpu)].cores
    assert lanes(1) == [Lane()]


def test_shares_of_the_cores_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(7)))
    assert [lane.cores for lane in lanes(3)] == ["0,1", "2,3", "4,5"]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5})
    assert [lane.cores for lane in lanes(2)] == ["5", "5"]  # better than none


def test_peers_are_told_where_their_packages_are_and_what_runs_beside() -> None:
    found = {stage.name: stage for stage in stages(["vllm"], ["vllm=/a", "mini_sglang=/b"], "others' tests")}
    words = arguments(found["peers-0.6b"].commands["peers-0.6b"])
    assert words[words.index("--compare") :] == [
        *("--compare", "random:qwen3-0.6b", "kvatlas", "vllm"),
        *("--site", "vllm=/a", "--also-running", "others' tests"),
    ]


def test_what_pytest_counted_is_added_up(tmp_path: Path) -> None:
    ends = [
        "== 173 passed, 29 skipped in 201.17s (0:03:21) ==",
        "==== 1 failed, 10 passed, 2 deselected, 1 error in 3.0s ====",
        "no tests here",
    ]
    logs = [tmp_path / str(number) for number in range(len(ends))]
    for log, end in zip(logs, ends, strict=True):
        log.write_text(f"=== 7 passed in 1.0s ===\nsome output\n{end}\n" if "=" in end else end)
    expected = {"passed": 183, "skipped": 29, "failed": 1, "error": 1}
    assert count_tests([*logs, tmp_path / "absent"]) == expected


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_command_names_what_is_there(name: str, command: str) -> None:
    words = arguments(command)
    assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None
    for word in words:
        assert not word.startswith("tests/") or (ROOT / word).exists(), word


def test_every_gpu_test_is_in_one_stage_and_stages_fit_into_ten_minutes() -> None:
    tests = [
        word
        for stage in stages()
        if stage.name.startswith("tests-")
        for command in stage.commands.values()
        for word in arguments(command)
        if word.startswith("tests/")
    ]
    there = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert sorted(tests) == there
    assert all(stage.usual_s < stage.limit_s <= 600 for stage in stages())


def test_memcheck_takes_the_files_that_the_makefile_names() -> None:
    verb = (ROOT / "Makefile").read_text().partition("memcheck: $(DEV)")[2]
    named = re.findall(r"[a-z_]+", verb.partition("test_%_gpu.py,")[2].partition(")")[0])
    assert sorted(named) == sorted(MEMCHECKED)
