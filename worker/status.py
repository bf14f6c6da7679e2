"""The board: newest frozen values that other threads may read at any time. One writer per field.

Reading and replacing a field are single attribute accesses; nothing here is ever changed in place.
"""

from dataclasses import dataclass

from worker.description import WorkerDescription, WorkerState
from worker.stats import EngineCounts, LoadView, PoolTotals


@dataclass(frozen=True, slots=True)
class StepMark:
    """The last step that was committed, and when."""

    number: int
    ended: float  # monotonic seconds


@dataclass(slots=True)
class StatusBoard:
    """What the link and the health endpoints say about the worker."""

    description: WorkerDescription  # written before anything serves
    state: WorkerState  # by the engine's thread
    step: StepMark  # by the engine
    load: LoadView  # by the observer


def first_board(description: WorkerDescription, now: float) -> StatusBoard:
    """The board of a worker that has done nothing yet."""
    pages = description.pool.num_pages
    pool = PoolTotals(
        0, 0, free_pages=pages, active_pages=0, cached_pages=0, pinned_pages=0, reserved_pages=1
    )
    return StatusBoard(description, WorkerState.STARTING, StepMark(0, now), LoadView(EngineCounts(), pool))
