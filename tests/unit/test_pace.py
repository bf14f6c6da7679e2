"""Observers work in pieces: they leave the interpreter to the engine, but not what the ring runs over."""

from pathlib import Path

from worker.execution.testing import small_config
from worker.pages.events import PageEventKind
from worker.readers.pace import REST_SECONDS, WORK_SECONDS, Pace
from worker.readers.recorder import Recorder, RecordingOptions
from worker.trace.testing import RecordedWorker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.rests: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds


def test_who_worked_long_enough_rests_and_begins_anew() -> None:
    clock = Clock()
    pace = Pace(clock=lambda: clock.now, sleep=clock.sleep)
    pace.begin()
    for _ in range(10):
        clock.now += WORK_SECONDS * 0.4
        pace.rest()
    assert clock.rests == [REST_SECONDS] * 3, "after each third piece"


def test_who_waited_before_its_turn_does_not_rest_at_once() -> None:
    clock = Clock()
    pace = Pace(clock=lambda: clock.now, sleep=clock.sleep)
    pace.rest()  # nobody's turn has begun
    clock.now += 1.0
    pace.begin()
    pace.rest()
    assert clock.rests == []


def slow(recorder: Recorder) -> Clock:
    """From now on each of the recorder's pieces takes long enough to rest after it."""
    clock = Clock()

    def later() -> float:
        clock.now += WORK_SECONDS
        return clock.now

    recorder._pace = Pace(clock=later, sleep=clock.sleep)
    recorder._pace.begin()
    return clock


def test_a_burst_of_requests_is_recorded_in_pieces(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60), tmp_path)
    worker.recorder.start_recording(RecordingOptions())
    for number in range(40):
        worker.add([number] * 8, max_tokens=2)
    worker.step()
    clock = slow(worker.recorder)
    worker.recorder.turn()
    assert len(clock.rests) >= 40, "after each request"
    assert worker.recorder.stop_recording("").num_requests == 40


def test_a_ring_that_is_nearly_full_is_read_without_a_rest(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60, event_capacity=256), tmp_path)
    worker.recorder.start_recording(RecordingOptions())
    ring = worker.scheduler.cache.events
    for _ in range(100):
        ring.append(PageEventKind.ALLOCATED, 1, 1, 1)
        ring.append(PageEventKind.FREED, 1, 0, 0)
    for number in range(10):
        worker.add([number] * 8, max_tokens=2)
    clock = slow(worker.recorder)
    worker.recorder.turn()
    assert len(clock.rests) <= 2, "not before the events were read"
    assert worker.recorder.stop_recording("").num_events == 200
