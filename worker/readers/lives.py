"""How long pages live, lie idle and are used again: a fold of page events into histograms.

Looks at a batch of events together with what the ledger knows of the pages before it. Owns histograms
and, per page, whether its life ended by eviction. Flushes are no evictions here: nothing was short.
"""

import numpy as np
import numpy.typing as npt

from worker.pages.events import HIT_TAG
from worker.pages.events import PageEventKind as Kind
from worker.readers.buckets import Buckets, FrozenBuckets
from worker.readers.event_arrays import I64, U32, Bools, EventArrays, EventsByPage, kinds_table
from worker.readers.ledger import Ledger
from worker.readers.metric_table import AGE_SECONDS, USES

_USES = kinds_table(Kind.ALLOCATED, Kind.SHARED, Kind.REVIVED, Kind.RELEASED)
_HITS = kinds_table(Kind.SHARED, Kind.REVIVED)
_FORGETS_HITS = kinds_table(Kind.ALLOCATED, Kind.SEALED, Kind.EVICTED, Kind.FREED)
_ENDS = kinds_table(Kind.EVICTED, Kind.FREED)
_BIRTHS = kinds_table(Kind.ALLOCATED)

Floats = npt.NDArray[np.float64]


class PageLives:
    """Histograms of what pages went through."""

    def __init__(self, num_pages: int) -> None:
        self._was_evicted: Bools = np.zeros(num_pages + 1, dtype=np.bool_)  # in this life, by page
        self._lifetimes = {end: Buckets(AGE_SECONDS) for end in ("freed", "evicted")}
        self._idle = Buckets(AGE_SECONDS)
        self._gaps = Buckets(AGE_SECONDS)
        self._uses = Buckets(USES)

    def fold(self, ledger: Ledger, events: EventArrays) -> None:
        """Counts a batch that the ledger has not folded yet."""
        kinds = events.kinds
        hits = _HITS[kinds] & (events.tags == HIT_TAG)
        ends = _ENDS[kinds]
        has_ends = bool(ends.any())
        if has_ends or hits.any():
            turned = _Turned(ledger, events)
            self._gaps.observe_all(turned.idle_seconds(hits[turned.order]))
            if has_ends:
                self._fold_ends(turned, hits)
        leaves = (kinds == Kind.EVICTED) & (events.refs == 0)
        at = leaves | (kinds == Kind.ALLOCATED)
        self._was_evicted[events.pages[at]] = leaves[at]

    def restart(self) -> None:
        """Events were lost, and with them which pages were evicted; at a snapshot none waits to be freed."""
        self._was_evicted[:] = False

    def _fold_ends(self, turned: "_Turned", hits: Bools) -> None:
        events = turned.events
        dropped = turned.kinds == Kind.EVICTED
        evicted = dropped & (events.refs[turned.order] == 0)  # others stay with their sequences
        self._lifetimes["evicted"].observe_all(turned.ages(evicted))
        freed = turned.kinds == Kind.FREED
        freed[freed] = ~self._evicted_before(turned, evicted, freed)
        self._lifetimes["freed"].observe_all(turned.ages(freed))
        for_room = dropped & (events.owners[turned.order] != 0)
        self._idle.observe_all(turned.idle_seconds(for_room))
        self._uses.observe_all(turned.hits_before(hits[turned.order], for_room))

    def _evicted_before(self, turned: "_Turned", evicted: Bools, at: Bools) -> Bools:
        """Whether the page of each event ``at`` had been evicted in this life."""
        before = turned.last_before(evicted | (turned.kinds == Kind.ALLOCATED))[at]
        return np.where(before >= 0, evicted[before], self._was_evicted[turned.pages[at]])

    def frozen(self) -> dict[tuple[str, tuple[str, ...]], FrozenBuckets]:
        """All histograms by name and label values."""
        histograms: dict[tuple[str, tuple[str, ...]], FrozenBuckets] = {
            ("page_lifetime_seconds", (end,)): buckets.frozen() for end, buckets in self._lifetimes.items()
        }
        histograms["page_idle_before_eviction_seconds", ()] = self._idle.frozen()
        histograms["page_reuse_gap_seconds", ()] = self._gaps.frozen()
        histograms["page_uses_at_eviction", ()] = self._uses.frozen()
        return histograms


class _Turned:
    """A batch ordered by page, with what was true of a page just before each of its events."""

    def __init__(self, ledger: Ledger, events: EventArrays) -> None:
        self.events = events
        self._ledger = ledger
        self._by_page: EventsByPage = events.by_page
        self.order, self.kinds, self.pages = self._by_page.order, self._by_page.kinds, self._by_page.pages
        self._times: U32 = events.times_ms[self.order]

    def last_before(self, is_wanted: Bools) -> I64:
        """Place of the last wanted event of the page before each event; -1: none in the batch."""
        return self._by_page.last_before(is_wanted)

    def _seconds_since(self, table: Bools, plane: U32, at: Bools) -> Floats:
        before = self.last_before(table[self.kinds])[at]
        since = np.where(before >= 0, self._times[before], plane[self.pages[at]])
        return (self._times[at] - since).astype(np.float64) / 1000  # modulo 2^32, as the planes are

    def ages(self, at: Bools) -> Floats:
        """Seconds since the page was allocated, of the events ``at``."""
        return self._seconds_since(_BIRTHS, self._ledger.born_ms, at)

    def idle_seconds(self, at: Bools) -> Floats:
        """Seconds since the page was last used, of the events ``at``."""
        return self._seconds_since(_USES, self._ledger.used_ms, at)

    def hits_before(self, hits: Bools, at: Bools) -> Floats:
        """Prefix hits of the page since it was sealed, of the events ``at``."""
        before = self.last_before(_FORGETS_HITS[self.kinds])[at]
        counted = np.concatenate(([0], np.cumsum(hits)))  # counted[i]: among the events before place i
        places, first = np.flatnonzero(at), self._by_page.first[at]
        known = np.where(before >= 0, 0, self._ledger.hits[self.pages[at]])
        since = np.where(before >= 0, before, first)
        return (known + counted[places] - counted[since]).astype(np.float64)
