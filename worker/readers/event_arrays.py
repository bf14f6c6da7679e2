"""Page events as arrays, and what an event can know of the events before it on the same page.

A batch of events is looked at as a whole: a fold costs a few array operations, however many events
there are. Owns no state of pages.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from worker.pages.events import EventColumns
from worker.pages.events import PageEventKind as Kind

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def kinds_table(*kinds: Kind) -> Bools:
    """Whether a kind is one of these, by its number: ``table[kinds]`` is the mask of a batch."""
    table = np.zeros(16, dtype=np.bool_)
    table[[int(kind) for kind in kinds]] = True
    return table


class EventArrays:
    """Consecutive page events; the arrays share the memory of the ring's copy. Entry i of each together."""

    def __init__(self, events: EventColumns) -> None:
        self.first_number = events.first_number
        self.last_step = events.steps[-1] if len(events) else 0
        self.kinds: U8 = np.frombuffer(events.kinds, dtype=np.uint8)
        self.pages: U32 = np.frombuffer(events.pages, dtype=np.uint32)
        self.owners: U16 = np.frombuffer(events.owners, dtype=np.uint16)
        self.refs: U16 = np.frombuffer(events.refs, dtype=np.uint16)
        self.others: U32 = np.frombuffer(events.others, dtype=np.uint32)
        self.tags: U64 = np.frombuffer(events.tags, dtype=np.uint64)
        self.times_us: U64 = np.frombuffer(events.times_us, dtype=np.uint64)
        milliseconds = self.times_us // np.uint64(1000)
        self.times_ms: U32 = (milliseconds & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def by_page(self) -> "EventsByPage":
        """The same events ordered by page; made once, when somebody asks."""
        return EventsByPage(self)


class EventsByPage:
    """Events of a batch ordered by page, those of one page in their own order."""

    def __init__(self, events: EventArrays) -> None:
        self.order: I64 = np.argsort(events.pages, kind="stable")
        self.kinds: U8 = events.kinds[self.order]
        self.pages: U32 = events.pages[self.order]
        self._places = np.arange(len(self.order))
        is_first = np.empty(len(self.order), dtype=np.bool_)
        is_first[:1] = True
        np.not_equal(self.pages[1:], self.pages[:-1], out=is_first[1:])
        self.first: I64 = np.maximum.accumulate(np.where(is_first, self._places, 0))

    def last_before(self, is_wanted: Bools) -> I64:
        """Place of the last wanted event before each one on the same page; -1: none in the batch."""
        found = np.full(len(self.order), -1, dtype=np.int64)
        found[1:] = np.maximum.accumulate(np.where(is_wanted, self._places, -1))[:-1]
        found[found < self.first] = -1
        return found
