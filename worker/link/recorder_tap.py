"""The observer's sink with the recorder beside it: it gets ledgers after a loss, and what audits find.

Runs on the observer's thread. Everything else of the sink is the feed's.
"""

from collections.abc import Callable

from worker.channels import Handover
from worker.link import integrity_codec
from worker.readers.ledger import Ledger
from worker.readers.observer import Fold, Sink
from worker.readers.recorder import Recorder
from worker.stats import PoolTotals

MAX_ASKS = 4


class RecorderTap:
    """Implements worker.readers.observer.Sink around another one."""

    def __init__(self, sink: Sink, epoch: int) -> None:
        self._sink = sink
        self._epoch = epoch
        self._asks: Handover[Callable[[Ledger], None]] = Handover(MAX_ASKS)
        self.recorder: Recorder | None = None  # once it is made

    @property
    def dropped_events(self) -> int:
        """See Sink."""
        return self._sink.dropped_events

    def recorder_dropped(self) -> int:
        """Page events that the recorder did not see."""
        return 0 if self.recorder is None else self.recorder.dropped_events

    def ask_for_ledger(self, give: Callable[[Ledger], None]) -> None:
        """``give`` is lent the ledger once, for the length of the call; from any thread."""
        self._asks.put(give)

    def open(self) -> None:
        """See Sink."""
        self._sink.open()

    def publish(self, fold: Fold, pool: PoolTotals, now: float) -> float:
        """See Sink."""
        if fold.findings and self.recorder is not None:
            first = fold.findings[0]
            why = f"{first.check}: {first.subject}: expected {first.expected}, found {first.found}"
            self.recorder.found(integrity_codec.violations(fold.findings, self._epoch), why)
        for give in self._asks.take_all():
            give(fold.ledger)
        return self._sink.publish(fold, pool, now)

    def close(self) -> None:
        """See Sink."""
        self._sink.close()
