"""Everything that is measured of pages and not merely counted: one fold of events into all of it.

Runs on the observer's thread, before the ledger folds the same events, since it asks the ledger what
was true of a page until then.
"""

from collections.abc import Mapping

from worker.readers.buckets import FrozenBuckets
from worker.readers.event_arrays import EventArrays
from worker.readers.ledger import Ledger
from worker.readers.lives import PageLives
from worker.readers.pressure import PressureMeter
from worker.readers.reuse import ReuseDistances


class PoolMeters:
    """Lives, reuse and pressure of one pool."""

    def __init__(self, num_pages: int, watermark_pages: int) -> None:
        self._lives = PageLives(num_pages)
        self._reuse = ReuseDistances(num_pages)
        self._pressure = PressureMeter(num_pages, watermark_pages)

    def fold(self, ledger: Ledger, events: EventArrays) -> None:
        """A batch that the ledger folds next."""
        self._lives.fold(ledger, events)
        self._reuse.fold(ledger, events)
        self._pressure.fold(ledger, events)

    def run_to(self, time_us: int) -> None:
        """It is so late, and nothing has happened since the last event."""
        self._pressure.run_to(time_us)

    def restart(self, ledger: Ledger) -> None:
        """Events were lost; the ledger has been built anew."""
        self._lives.restart()
        self._pressure.restart(ledger)

    def pressure_seconds(self) -> dict[str, float]:
        """Time by band."""
        return self._pressure.seconds()

    def frozen(self) -> Mapping[tuple[str, tuple[str, ...]], FrozenBuckets]:
        """All histograms by name and label values."""
        return {**self._lives.frozen(), **self._reuse.frozen()}
