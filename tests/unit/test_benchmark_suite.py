"""The suite ends whatever its stages do, and says what became of each."""

import importlib.util
from pathlib import Path

import psutil
import pytest

from benchmarks.suite import STAGES, Stage, run_all

ROOT = Path(__file__).resolve().parents[2]


def test_failures_and_overruns_are_named_and_stop_nothing(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    stages = [
        Stage("fails", "python -c 'raise SystemExit(3)'", 1, 60),
        Stage("hangs", f"sh -c 'sleep 600 & echo $! > {pid}; wait'", 1, 3),
        Stage("too long", "python -c pass", 500, 600),
        Stage("works", "python -c 'print(5 * 5)'", 1, 60),
    ]
    outcomes = run_all(stages, tmp_path / "logs", 120)
    assert outcomes["fails"].startswith("failed (3)")
    assert outcomes["hangs"].startswith("over time")
    assert outcomes["too long"].startswith("not begun: takes 500 s")
    assert outcomes["works"].startswith("ok")
    assert (tmp_path / "logs" / "works.log").read_text() == "25\n"
    child = int(pid.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_names_what_is_there(stage: Stage) -> None:
    assert stage.usual_s < stage.limit_s <= 600
    words = stage.arguments
    assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None
    for word in words:
        assert not word.startswith("tests/") or (ROOT / word).exists(), word
