"""How long the pool was short of pages: time by band of available pages, a fold of page events.

Time runs from event to event, so a shortage between two scrapes is counted with the length it had; up
to the moment of an observation, so that an idle worker has time, too. Owns the clock of the bands.
"""

import numpy as np
import numpy.typing as npt

from worker.pages.events import PageEventKind as Kind
from worker.readers.event_arrays import I64, Bools, EventArrays, kinds_table
from worker.readers.ledger import CACHED, FREE, Ledger
from worker.readers.metric_table import BANDS

LOW_SHARE = 0.2
"""Of the usable pages: with fewer available ones the pool is low."""

_PIN_CHANGES = kinds_table(Kind.PINNED, Kind.UNPINNED)
_SETS_PIN = kinds_table(Kind.PINNED, Kind.UNPINNED, Kind.ALLOCATED, Kind.FREED)


class PressureMeter:
    """Seconds in each band since the start of the epoch."""

    def __init__(self, num_pages: int, watermark_pages: int) -> None:
        # Upper edges of exhausted, critical and low: available pages below an edge are in its band.
        self._edges = np.array([1, max(1, watermark_pages), max(1, watermark_pages, LOW_SHARE * num_pages)])
        self._seconds = [0.0] * len(BANDS)  # in the order of BANDS
        self._time_us = 0
        # Counted here, not taken from the ledger: batches may end between an eviction and its FREED.
        self._available = num_pages

    def fold(self, ledger: Ledger, events: EventArrays) -> None:
        """Time between the events of a batch that the ledger has not folded yet."""
        available = self._available
        times = np.maximum.accumulate(np.maximum(events.times_us.astype(np.int64), self._time_us))
        after = available + np.cumsum(_changes(ledger, events))
        self._add(self._bands(np.array([available])), np.array([times[0] - self._time_us]))
        self._add(self._bands(after[:-1]), np.diff(times))
        self._time_us = int(times[-1])
        self._available = int(after[-1])

    def run_to(self, time_us: int) -> None:
        """It is so late now; nothing has happened since the last event."""
        if time_us > self._time_us:
            now = self._bands(np.array([self._available]))
            self._add(now, np.array([time_us - self._time_us]))
            self._time_us = time_us

    def restart(self, ledger: Ledger) -> None:
        """Events were lost; the ledger has been built anew."""
        self._available = int(ledger.state_counts[FREE] + ledger.state_counts[CACHED])

    def _bands(self, available: I64) -> I64:
        """Index into BANDS."""
        return len(BANDS) - 1 - np.searchsorted(self._edges, available, side="right")

    def _add(self, bands: I64, microseconds: I64) -> None:
        found = np.bincount(bands, weights=microseconds, minlength=len(BANDS)) / 1e6
        self._seconds = [before + more for before, more in zip(self._seconds, found.tolist(), strict=True)]

    def seconds(self) -> dict[str, float]:
        """By band; adds up to the time since the start."""
        return dict(zip(BANDS, self._seconds, strict=True))


def _changes(ledger: Ledger, events: EventArrays) -> "npt.NDArray[np.int64]":
    """How many more pages are available after each event."""
    kinds, is_unused = events.kinds, events.refs == 0
    changes = np.zeros(len(kinds), dtype=np.int64)
    changes[kinds == Kind.ALLOCATED] = -1
    changes[kinds == Kind.FREED] = 1
    changes[(kinds == Kind.EVICTED) & is_unused] = -1  # until it is freed, at the same moment
    kept, woken = kinds == Kind.CACHED, kinds == Kind.REVIVED
    moves = kept | woken
    if moves.any():
        unpinned = ~_is_pinned(ledger, events)
        changes[kept & unpinned] = 1
        changes[woken & unpinned] = -1
    changes[(kinds == Kind.PINNED) & is_unused] = -1
    changes[(kinds == Kind.UNPINNED) & is_unused] = 1
    return changes


def _is_pinned(ledger: Ledger, events: EventArrays) -> Bools:
    """Whether the page of each event belonged to a pinned prefix."""
    if not _PIN_CHANGES[events.kinds].any():
        return ledger.pinned[events.pages]
    by_page = events.by_page
    before = by_page.last_before(_SETS_PIN[by_page.kinds])
    pinned = np.where(before >= 0, by_page.kinds[before] == Kind.PINNED, ledger.pinned[by_page.pages])
    found = np.empty(len(events), dtype=np.bool_)
    found[by_page.order] = pinned
    return found
