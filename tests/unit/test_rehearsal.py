"""Rehearsals of the service: how long they last, beside how many calls, and what ends them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kvatlas import rehearsal
from kvatlas.rehearsal import ENOUGH_CORES, EVERY_SECONDS, LASTING_SECONDS, has_cores
from service import errors
from service.handlers.rehearsal import FEW_CALLS, Rehearsal


class _Loop:
    """A clock and its timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.timers.append((self.now + seconds, call))
        return object()

    def run_until(self, end: float) -> None:
        while self.timers and self.timers[0][0] <= end:
            self.now, call = self.timers.pop(0)
            call()
        self.now = end


class _Stage:
    """A rehearsal on such a loop."""

    def __init__(self) -> None:
        self.loop = _Loop()
        self.live = 0
        self.plays = 0
        self.fails = False
        loop = cast(asyncio.AbstractEventLoop, self.loop)
        self.rehearsal = Rehearsal(loop, self._play, lambda: self.live)

    def _play(self) -> None:
        if self.fails:
            raise errors.not_ready()
        self.plays += 1


def test_it_plays_for_a_moment_after_the_last_call_and_then_nothing_is_left() -> None:
    stage = _Stage()
    stage.rehearsal.begin()
    stage.loop.run_until(10.0)
    assert abs(stage.plays - LASTING_SECONDS / EVERY_SECONDS) <= 1
    assert stage.loop.timers == []


def test_a_second_call_prolongs_it_and_makes_it_no_faster() -> None:
    stage = _Stage()
    stage.rehearsal.begin()
    stage.loop.run_until(LASTING_SECONDS / 2)
    before = stage.plays
    stage.rehearsal.begin()
    assert len(stage.loop.timers) == 1
    stage.loop.run_until(10.0)
    assert abs(stage.plays - before - LASTING_SECONDS / EVERY_SECONDS) <= 1


def test_it_plays_beside_few_calls_as_long_as_they_run_and_not_beside_many() -> None:
    stage = _Stage()
    stage.live = FEW_CALLS
    stage.rehearsal.begin()
    stage.loop.run_until(10 * LASTING_SECONDS)
    beside_few = stage.plays
    assert abs(beside_few - 10 * LASTING_SECONDS / EVERY_SECONDS) <= 1
    stage.live = FEW_CALLS + 1
    stage.loop.run_until(20 * LASTING_SECONDS)
    assert stage.plays == beside_few
    stage.live = 0
    stage.loop.run_until(30 * LASTING_SECONDS)
    assert stage.plays == beside_few  # the last call began long ago
    assert stage.loop.timers == []


def test_where_requests_are_refused_it_ends_and_the_next_call_begins_it_again() -> None:
    stage = _Stage()
    stage.fails = True
    stage.rehearsal.begin()
    stage.loop.run_until(1.0)
    assert stage.loop.timers == []
    stage.fails = False
    stage.rehearsal.begin()
    stage.loop.run_until(2.0)
    assert stage.plays > 0


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [
        (ENOUGH_CORES, None, True),
        (ENOUGH_CORES - 1, None, False),
        (64, "max 100000", True),
        (64, "100000 100000", False),
        (64, f"{ENOUGH_CORES}00000 100000", True),
        (2, "6400000 100000", False),
        (64, "no numbers", True),
        (64, "1 0", True),
    ],
)
def test_processors_are_those_of_the_affinity_and_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: int, quota: str | None, expected: bool
) -> None:
    monkeypatch.setattr(rehearsal.os, "sched_getaffinity", lambda pid: set(range(affinity)))
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    assert has_cores(file) is expected
