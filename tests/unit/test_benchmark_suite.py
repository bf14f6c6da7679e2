"""The suite ends whatever its stages do, and says what became of each."""

import importlib.util
from pathlib import Path

import psutil
import pytest

from benchmarks.suite import STAGES, Stage, arguments, count_tests, run_all

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [(name, command) for stage in STAGES for name, command in stage.commands.items()]


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
        for stage in STAGES
        if stage.name.startswith("tests-")
        for command in stage.commands.values()
        for word in arguments(command)
        if word.startswith("tests/")
    ]
    there = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert sorted(tests) == there
    assert all(stage.usual_s < stage.limit_s <= 600 for stage in STAGES)
