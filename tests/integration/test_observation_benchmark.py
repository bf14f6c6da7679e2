"""What looking costs is measured on and off in one run, on any device, and written down."""

import gc
import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import observation
from benchmarks.fixed_device import FixedDevice
from benchmarks.launch_marks import StepTimes
from benchmarks.observation_parts import table_rows
from benchmarks.observed_load import in_turns
from benchmarks.observed_loop import Loop, Run
from worker.__main__ import SWITCH_SECONDS
from worker.messages import EngineCommand
from worker.pages.page_cache import CacheConfig
from worker.row_desk import BOOK_ROWS, DEVICE_ROWS
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig


def test_a_workload_runs_on_and_off_in_turns_and_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--device", "cpu", "--model", "random:tiny", "--workload", "b1", "--rounds", "2"]
    monkeypatch.setattr(
        sys, "argv", ["observation", *arguments, "--num-pages", "100", "--results", str(tmp_path)]
    )
    observation.main()
    (file,) = tmp_path.glob("*-observation-b1.json")
    found = json.loads(file.read_text())["figures"]["b1"]
    assert (found["workload"], found["model"], found["rounds"]) == ("b1", "random:tiny", 2)
    assert found["tokens_per_second_off"] > 0
    assert found["tokens_per_second_on"] > 0
    assert len(found["cost_of_each_round"]) == 2
    assert found["engine_look_share"] > 0, "nobody looked"
    assert found["observer_cpu_share"] > 0, "nobody observed"


def test_no_round_begins_after_the_deadline() -> None:
    seen = []

    def run(observed: bool) -> Run:
        seen.append(observed)
        return Run(
            100.0 - observed, 1e-3, 0.01, 0.02, 2.0, StepTimes(0.1 + 0.02 * observed, 3, 0.0, 0.0, 0.0)
        )

    found = in_turns(run, rounds=4, deadline=0.0)  # long past: one round is measured all the same
    assert (found["rounds"], seen) == (1, [False, True])
    assert (found["cost_median"], found["cost_standard_error"]) == (0.01, 0.0)
    assert (found["cost_by_idle_mean"], found["device_off"]["idle_ms"]) == (0.01, 100.0)
    assert in_turns(run, rounds=3)["rounds"] == 3
    assert seen[2:] == [False, True, True, False, False, True]


def test_runs_have_the_interpreter_of_a_worker_and_leave_it_as_it_was() -> None:
    before, seen = sys.getswitchinterval(), []

    def run(observed: bool) -> Run:
        seen.append((sys.getswitchinterval(), gc.get_freeze_count() > 1000))
        if len(seen) == 3:
            raise TimeoutError
        return Run(100.0, 1e-3, 0.01, 0.02, 2.0, StepTimes(0.0, 0, 0.0, 0.0, 0.0))

    with pytest.raises(TimeoutError):
        in_turns(run, rounds=2)
    assert seen == [(pytest.approx(SWITCH_SECONDS), True)] * 3
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before, 0)


def test_with_observation_off_an_engine_with_nothing_to_run_sleeps(tmp_path: Path) -> None:
    config = SchedulerConfig(CacheConfig(100, 16), max_running=2, max_step_tokens=64, max_context_tokens=128)
    device = FixedDevice(0.001, 2, context=128, page_size=16)
    loop = Loop(Scheduler(config), device, tmp_path, observed=False, overlap=True)
    limits: list[float] = []
    wait = loop.commands.wait

    def noted(limit: float | None) -> EngineCommand | None:
        limits.append(limit or 0.0)
        return wait(limit)

    loop.commands.wait = noted  # type: ignore[method-assign]
    with loop.running():
        until = time.monotonic() + 30
        while len(limits) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert min(limits[1:3]) > 0.01, "it looked on and on, and kept the interpreter from others"


def test_rows_of_the_page_table_take_many_short_turns() -> None:
    found = table_rows(sequences=20, context=200, pages=2000)
    assert found["books_turns"] == -(-20 // BOOK_ROWS)
    assert found["device_turns"] == -(-20 // DEVICE_ROWS) + 1  # one more to take the last copy in
