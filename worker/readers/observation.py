"""What the engine hands to the observer, ten times a second while it has work. Frozen; owns nothing."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from worker.ids import SequenceId
from worker.pages.snapshot import PoolSnapshot
from worker.readers.audit import AuditRound
from worker.stats import EngineCounts, Growth, SequenceView, StepStats


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that changed since the last one, consistent with the page event `revision`."""

    revision: int  # number of the last page event
    time_us: int  # of the engine's clock, as page events have it
    changes: Sequence[SequenceView]
    growth: Growth
    ended: Sequence[SequenceId]
    started: Sequence[SequenceView]  # got an owner number, without pages; may have ended since
    ended_owners: "array[int]"  # 'H': owner numbers that were given back
    progress_owners: "array[int]"
    progress_tokens: "array[int]"
    counts: EngineCounts
    rows_used: int
    idle_seconds: float  # in total since the start
    steps: Sequence[StepStats]
    bills: Sequence[float] = ()  # page-seconds of each request that ended
    audits: Sequence[AuditRound] = ()
    snapshot: PoolSnapshot | None = None  # asked for after a loss: replaces everything
