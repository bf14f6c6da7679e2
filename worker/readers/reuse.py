"""Reuse distances: how large the pool would have to be for a page to be still there when it is wanted again.

The distance of a use is the number of pages that were used since the last use of the same content, that
page included: an LRU pool of at least so many pages would have had it (Mattson et al., Evaluation
techniques for storage hierarchies, IBM Systems Journal 9, 1970). Kept for a sample of contents only,
chosen by a hash of their fingerprint, and scaled up (Waldspurger et al., Efficient MRC construction with
SHARDS, FAST 2015). Evicted contents are remembered as far back as eight pools reach. Holds no pool.
"""

from collections import OrderedDict

import numpy as np

from worker.pages.events import HIT_TAG
from worker.pages.events import PageEventKind as Kind
from worker.readers.buckets import Buckets, FrozenBuckets
from worker.readers.event_arrays import U64, Bools, EventArrays, kinds_table
from worker.readers.ledger import Ledger
from worker.readers.metric_table import CAPACITIES

SAMPLED_PAGES = 1024
"""Of a full pool so many pages are in the sample; smaller pools are taken whole."""

REMEMBERED_POOLS = 8

_HITS = kinds_table(Kind.SHARED, Kind.REVIVED)


class ReuseDistances:
    """LRU stack of sampled contents, and the histogram of distances."""

    def __init__(self, num_pages: int) -> None:
        self.rate = min(1.0, SAMPLED_PAGES / num_pages)
        self._threshold = np.uint64(min(2**64 - 1, int(self.rate * 2.0**64)))
        self._buckets = Buckets(tuple(share * num_pages for share in CAPACITIES))
        self._limit = max(1, int(REMEMBERED_POOLS * num_pages * self.rate))
        self._places: OrderedDict[int, int] = OrderedDict()  # of a content, least recently used first
        self._used = np.zeros(self._limit, dtype=np.int64)  # number of the last use, by place
        self._clock = 0

    def fold(self, ledger: Ledger, events: EventArrays) -> None:
        """Counts the uses of a batch that the ledger has not folded yet."""
        kinds = events.kinds
        is_hit = _HITS[kinds] & (events.tags == HIT_TAG)
        is_use = is_hit | (kinds == Kind.SEALED)
        if not is_use.any():
            return
        contents = _contents(ledger, events, is_hit)[is_use]
        for content in contents[(contents < self._threshold) & (contents != 0)].tolist():
            self._use(content)

    def _use(self, content: int) -> None:
        self._clock += 1
        place = self._places.get(content)
        if place is None:
            place = self._new_place()
        else:
            newer = int(np.count_nonzero(self._used > self._used[place]))
            self._buckets.observe(newer / self.rate + 1)
        self._places[content] = place
        self._places.move_to_end(content)
        self._used[place] = self._clock

    def _new_place(self) -> int:
        if len(self._places) < self._limit:
            return len(self._places)
        return self._places.popitem(last=False)[1]

    def frozen(self) -> dict[tuple[str, tuple[str, ...]], FrozenBuckets]:
        """The histogram by name and label values."""
        return {("page_reuse_distance_pages", ()): self._buckets.frozen()}


def _contents(ledger: Ledger, events: EventArrays, is_hit: Bools) -> U64:
    """Fingerprint that each event is about; only for uses."""
    contents = events.tags.copy()  # SEALED events carry it
    if not is_hit.any():
        return contents
    contents[is_hit] = ledger.fingerprints[events.pages[is_hit]]
    if not (events.kinds == Kind.SEALED).any():
        return contents
    # Some of the pages that were hit may have been sealed within this batch.
    by_page = events.by_page
    before = by_page.last_before(by_page.kinds == Kind.SEALED)
    hit = is_hit[by_page.order] & (before >= 0)
    contents[by_page.order[hit]] = events.tags[by_page.order[before[hit]]]
    return contents
