"""What a pass says of its slowest turns."""

import gc
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.slow_steps import KEPT, SlowSteps, Times
from worker.scheduling.step import Step


class Clock:
    """Stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(rows: int, prompts: int = 0) -> Step:
    """Decode rows of a token each, then prompts of ten."""
    lengths = [1] * (rows - prompts) + [10] * prompts
    starts, ends = array("i", [0] * rows), array("i", lengths)
    return Step(1, range(rows), array("i", range(rows)), starts, ends, range(rows), rows - prompts)


def test_the_slowest_turns_of_each_kind_are_kept(clock: Clock) -> None:
    slow = SlowSteps(clock)
    with slow.watching():
        for number, ms in enumerate((5, 1, 9, 7, 3, 8)):
            clock.now += ms / 1000
            slow.turn(step(number + 1), step(number + 1), Times(), Times())
        clock.now += 0.1
        slow.turn(step(4), step(4, prompts=2), Times(), Times())
    report = slow.report()
    assert [(turn["ms"], turn["finished"]["rows"]) for turn in report["decode"]] == [(9.0, 3), (8.0, 6)]
    assert len(report["decode"]) == KEPT
    (prompts,) = report["prompts"]
    assert prompts["ms"] == 100.0
    assert prompts["launched"] == {"rows": 4, "tokens": 4}
    assert prompts["finished"] == {"rows": 4, "tokens": 22}
    assert prompts["at_ms"] == 33.0, "since the pass began"


def test_a_turn_has_its_own_share_of_the_times(clock: Clock) -> None:
    slow = SlowSteps(clock)
    with slow.watching():
        clock.now = 0.01
        slow.turn(step(1), None, Times(1.0, 2.0, 3.0, 4.0), Times(1.001, 2.002, 3.003, 4.004))
    (turn,) = slow.report()["decode"]
    parts = [turn[f"{part}_ms"] for part in ("schedule", "launch", "wait", "commit")]
    assert parts == [1.0, 2.0, 3.0, 4.0]
    assert turn["finished"] is None


def test_a_collection_is_told_in_its_turn_and_in_no_other(clock: Clock) -> None:
    slow = SlowSteps(clock)
    callbacks = list(gc.callbacks)

    def pause(phase: str, info: dict[str, Any]) -> None:
        clock.now += 0.02 if phase == "start" else 0.0

    with slow.watching():
        gc.callbacks.append(pause)  # after the watch's: time passes between its start and its stop
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(pause)
        slow.turn(step(1), None, Times(), Times())
        clock.now += 0.01
        slow.turn(step(2), None, Times(), Times())
    assert [(turn["launched"]["rows"], turn["gc_ms"]) for turn in slow.report()["decode"]] == [
        (1, 20.0),
        (2, 0.0),
    ]
    assert gc.callbacks == callbacks


def test_a_kernel_that_comes_late_is_named_and_others_still_hear_of_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    compilation = SimpleNamespace(listener=lambda **event: heard.append(event["src"].name))
    before = compilation.listener
    monkeypatch.setitem(
        sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(compilation=compilation))
    )
    slow = SlowSteps(clock)
    with slow.watching():
        compilation.listener(src=SimpleNamespace(name="_decode"), cache_hit=False)
        compilation.listener(src=SimpleNamespace(name="_draw"), cache_hit=True)
        slow.turn(step(1), None, Times(), Times())
        slow.turn(step(2), None, Times(), Times())
    told = {turn["launched"]["rows"]: turn["kernels"] for turn in slow.report()["decode"]}
    assert told == {1: ["_decode (compiled)", "_draw (cached)"], 2: []}
    assert heard == ["_decode", "_draw"]
    assert compilation.listener is before


def test_a_pass_that_fails_leaves_no_hook(clock: Clock) -> None:
    callbacks = list(gc.callbacks)
    with pytest.raises(RuntimeError), SlowSteps(clock).watching():
        raise RuntimeError
    assert gc.callbacks == callbacks
