"""The seam between decision and device. Two implementations: torch_runner and fake_runner."""

from collections.abc import Sequence
from typing import Protocol

from worker.scheduling.audit import RowSpan
from worker.scheduling.step import Step, StepResult


class StepHandle(Protocol):
    """A step that was queued on the device."""

    @property
    def is_replayed(self) -> bool:
        """Whether a CUDA graph was replayed."""
        ...

    def is_ready(self) -> bool:
        """Whether `result` would not wait for the device; never raises."""
        ...

    def result(self) -> StepResult:
        """Waits for the step and returns its outcome; raises what the device raised. Called once."""
        ...


class BrokenHandle:
    """A step that did not get as far as the device; a `StepHandle`."""

    is_replayed = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_ready(self) -> bool:
        """Always: nothing is on its way."""
        return True

    def result(self) -> StepResult:
        """Raises why."""
        raise self._error


class RowsRead(Protocol):
    """A copy of parts of the page table that is on its way from the device."""

    def is_ready(self) -> bool:
        """Whether `result` need not wait."""
        ...

    def result(self) -> list[list[int]]:
        """The slots, a list for each span; waits for the device."""
        ...


class Runner(Protocol):
    """The only thing that touches the device. Used by the engine thread alone."""

    def launch(self, step: Step) -> StepHandle:
        """Queues a step; returns at once where the device is asynchronous. Steps run in launch order."""
        ...

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """Copies page table rows back from the device: slots [0, num_slots[i]) of rows[i]; waits for it.

        Raises where the device has failed for good.
        """
        ...

    def begin_read(self, spans: Sequence[RowSpan]) -> RowsRead:
        """Begins to copy parts of rows, as they are after every step launched so far; never waits.

        Only where each span begins and how long it is matters: what its slots are is for the caller to
        compare.
        """
        ...

    def close(self) -> None:
        """Frees device memory; idempotent."""
        ...
