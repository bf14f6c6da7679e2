"""A device whose steps take a fixed time, one after the other, and on which the host waits without holding
the interpreter. Every token is 7. Keeps the page table, for the audit.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.launch_marks import When
from worker.execution.fake_runner import CopiedRows
from worker.execution.runner import StepHandle
from worker.scheduling.audit import RowSpan
from worker.scheduling.step import Step, StepResult

LAUNCH_CALLS = 6
"""Of a launch that let other threads have the interpreter, as the calls of a library do: a replayed step has
two kernels, a graph and three calls of events."""


class FixedStep:
    """A step that ends at a time."""

    is_replayed = False

    def __init__(self, step: Step, ready: float) -> None:
        self._step = step
        self.ready = ready

    def is_ready(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() >= self.ready

    def result(self) -> StepResult:
        """Waits as for a device: without the interpreter."""
        if (left := self.ready - time.perf_counter()) > 0:
            time.sleep(left)
        return StepResult([7] * len(self._step.sampled))


def fixed_mark(handle: StepHandle) -> When:
    """When a step of this device ends."""
    assert isinstance(handle, FixedStep), handle
    ready = handle.ready
    return lambda: ready


class FixedDevice:
    """A `Runner` without a model."""

    def __init__(self, step_seconds: float, max_running: int, *, context: int, page_size: int) -> None:
        self._step_seconds = step_seconds
        self._page_size = page_size
        self._pages = np.zeros((max_running + 1, context // page_size), dtype=np.int32)
        self._free = 0.0  # time at which everything that was launched is over

    def launch(self, step: Step) -> FixedStep:
        """Ends a fixed time after its beginning, which is now or the end of the step before."""
        if step.new_page_ids:
            rows, indexes, ids = step.new_page_rows, step.new_page_indexes, step.new_page_ids
            self._pages[np.asarray(rows), np.asarray(indexes)] = np.asarray(ids)
        if self._step_seconds:
            for _ in range(LAUNCH_CALLS):
                time.sleep(0)  # not a wait: lets go of the interpreter, as each call of a real launch does
        self._free = max(self._free, time.perf_counter()) + self._step_seconds
        return FixedStep(step, self._free)

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """Slots of rows."""
        offsets = np.arange(self._page_size, dtype=np.int32)
        slots = (self._pages[rows][:, :, None] * self._page_size + offsets).reshape(len(rows), -1)
        return [row[:count].tolist() for row, count in zip(slots, num_slots, strict=True)]

    def begin_read(self, spans: Sequence[RowSpan]) -> CopiedRows:
        """Parts of rows, copied at once."""
        lengths = [span.first + len(span.slots) for span in spans]
        whole = self.read_rows([span.row for span in spans], lengths)
        return CopiedRows([row[span.first :] for row, span in zip(whole, spans, strict=True)])

    def close(self) -> None:
        """Nothing to free."""
