"""When the device ended each step and when the host had launched the next: who waited for whom.

Wraps a runner and leaves a mark behind every step, an event on the device's stream. Knows nothing of what
else runs in the process; with and without it the marks cost the same.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from worker.execution.runner import RowsRead, Runner, StepHandle
from worker.scheduling.audit import RowSpan
from worker.scheduling.step import Step

When = Callable[[], float]
"""The host's time at which the device came past a mark; asked after it has."""

Mark = Callable[[StepHandle], When]
"""Leaves a mark behind a step that was just launched."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds; of one run of consecutive steps."""

    idle: float  # in which the device had ended a step and the next was not launched yet
    late_steps: int  # that it waited for
    turn_p50: float  # from the end of a step until the step after next was launched: the host's turn
    turn_p99: float
    turn_max: float

    @classmethod
    def of(cls, launched: Sequence[float], ended: Sequence[float]) -> "StepTimes":
        """From the times of the same steps, in order. Fewer than three tell nothing: all 0."""
        if len(launched) < 3:
            return cls(0.0, 0, 0.0, 0.0, 0.0)
        launches, ends = np.array(launched), np.array(ended)
        waits = np.maximum(launches[1:] - ends[:-1], 0.0)
        turns = launches[2:] - ends[:-2]
        p50, p99 = np.percentile(turns, (50, 99)).tolist()
        return cls(float(waits.sum()), int(np.count_nonzero(waits)), p50, p99, float(turns.max()))


def host_mark(handle: StepHandle) -> When:
    """For a device that is the host itself: a step is over when its launch returns."""
    now = time.perf_counter()
    return lambda: now


def cuda_mark() -> Mark:
    """Events of the current device's stream, with the host's time of the first one. Waits for the device."""
    import torch  # not above: a device that is scripted needs none

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    first = event()
    first.synchronize()
    began = time.perf_counter()

    def mark(handle: StepHandle) -> When:
        end = event()

        def when() -> float:
            end.synchronize()
            return began + float(first.elapsed_time(end)) / 1000

        return when

    return mark


class MarkedRunner:
    """A `Runner` that keeps the times of its steps."""

    def __init__(self, runner: Runner, mark: Mark) -> None:
        self._runner = runner
        self._mark = mark
        self._launched: list[float] = []
        self._ended: list[When] = []

    def launch(self, step: Step) -> StepHandle:
        """The runner's, and a mark behind it."""
        handle = self._runner.launch(step)
        self._launched.append(time.perf_counter())
        self._ended.append(self._mark(handle))
        return handle

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """See Runner."""
        return self._runner.read_rows(rows, num_slots)

    def begin_read(self, spans: Sequence[RowSpan]) -> RowsRead:
        """See Runner."""
        return self._runner.begin_read(spans)

    def close(self) -> None:
        """The runner is its maker's to close."""

    def times(self) -> StepTimes:
        """Of all steps so far, which have ended."""
        return StepTimes.of(self._launched, [when() for when in self._ended])
