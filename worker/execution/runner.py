"""The seam between decision and device. Two implementations: torch_runner and fake_runner."""

from typing import Protocol

from worker.scheduling.step import Step, StepResult


class StepHandle(Protocol):
    """A step that was queued on the device."""

    def result(self) -> StepResult:
        """Waits for the step and returns its outcome; raises what the device raised. Called once."""
        ...


class Runner(Protocol):
    """The only thing that touches the device. Used by the engine thread alone."""

    def launch(self, step: Step) -> StepHandle:
        """Queues a step; returns at once where the device is asynchronous. Steps run in launch order."""
        ...

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """Copies page table rows back from the device, for the audit: slots [0, num_slots[i]) of rows[i]."""
        ...

    def close(self) -> None:
        """Frees device memory; idempotent."""
        ...
