"""Page events: what happened to which page, numbered without gaps, in a preallocated ring.

Owns the history. Knows nothing of pools, tries or sequences; they append, readers fold.

An event is eight integers in eight columns; no Python object is made per event. One thread appends.
Any thread may read without a lock: it copies a range and then looks whether the writer has begun to
overwrite it meanwhile. ``tags`` holds, by kind: SEALED: the fingerprint (see fingerprint.py, computed
once when the page is sealed); SHARED and REVIVED: 1 for a prefix hit, 0 for samples that share or a
duplicate that gave way; otherwise 0.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from worker.ids import NO_PAGE

HIT_TAG = 1
"""Tag of SHARED and REVIVED events that a prefix look-up caused."""

MAX_SPAN_US = 0xFFFF_FFFF
"""From first to last of the events that are read together: readers hand times on as offsets of 32 bits."""


class PageState(IntEnum):
    """What a page is; numbers are those of cache.proto."""

    FREE = 1
    ACTIVE = 2
    CACHED = 3
    PINNED = 4
    RESERVED = 5


class PageFlag(IntFlag):
    """Bits beside the state; numbers are those of cache.proto."""

    SEALED = 1
    PINNED = 2


class PageEventKind(IntEnum):
    """What happened; numbers and effects are those of PageEventType in cache.proto."""

    ALLOCATED = 1
    SHARED = 2
    SEALED = 3
    RELEASED = 4
    CACHED = 5
    EVICTED = 6
    FREED = 7
    COPIED = 8
    PINNED = 9
    UNPINNED = 10
    REVIVED = 11
    MOVED = 12


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events first_number .. first_number + len(kinds) - 1, entry i of every column together."""

    first_number: int
    kinds: bytes
    pages: "array[int]"  # 'I'
    owners: "array[int]"  # 'H': for whom; 0: nobody
    refs: "array[int]"  # 'H': references after the event
    others: "array[int]"  # 'I': COPIED: the original, SEALED: the parent; else NO_PAGE
    tags: "array[int]"  # 'Q': see the module's text
    steps: "array[int]"  # 'Q'
    times_us: "array[int]"  # 'Q': microseconds since the start of the epoch
    tokens: Sequence[bytes | None]  # SEALED: the page's ids, u32 little endian; () unless asked for

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def last_number(self) -> int:
        """Number of the last event; first_number - 1 when there is none."""
        return self.first_number + len(self.kinds) - 1


class EventRing:
    """The last ``capacity`` page events. ``step`` and ``time_us`` stamp what is appended next."""

    def __init__(self, capacity: int = 65_536) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"capacity of the event ring must be a power of two, not {capacity}")
        self.capacity = capacity
        self.step = 0
        self.time_us = 0
        self._number = 0  # last event that is complete
        self._claimed = 0  # events up to this number may be half written
        self._kinds = bytearray(capacity)
        self._pages = array("I", bytes(4 * capacity))
        self._owners = array("H", bytes(2 * capacity))
        self._refs = array("H", bytes(2 * capacity))
        self._others = array("I", bytes(4 * capacity))
        self._tags = array("Q", bytes(8 * capacity))
        self._steps = array("Q", bytes(8 * capacity))
        self._times = array("Q", bytes(8 * capacity))
        self._tokens: list[bytes | None] = [None] * capacity

    @property
    def number(self) -> int:
        """Number of the last event; 0 before the first."""
        return self._number

    def append(
        self,
        kind: int,
        page: int,
        owner: int,
        refs: int,
        other: int = NO_PAGE,
        tag: int = 0,
        tokens: bytes | None = None,
    ) -> None:
        """Adds one event."""
        number = self._number
        at = number & (self.capacity - 1)
        self._claimed = number + 1
        self._kinds[at] = kind
        self._pages[at] = page
        self._owners[at] = owner
        self._refs[at] = refs
        self._others[at] = other
        self._tags[at] = tag
        self._steps[at] = self.step
        self._times[at] = self.time_us
        self._tokens[at] = tokens
        self._number = number + 1

    def extend(
        self, kind: int, pages: "array[int]", owners: "array[int]", refs: "array[int]", tag: int = 0
    ) -> None:
        """Adds one event per page, all of one kind: slices, a tenth of the cost of that many appends."""
        done, total = 0, len(pages)
        while done < total:
            at = self._number & (self.capacity - 1)
            count = min(total - done, self.capacity - at)
            whole = count == total
            self._fill(
                kind,
                at,
                pages if whole else pages[done : done + count],
                owners if whole else owners[done : done + count],
                refs if whole else refs[done : done + count],
                tag,
            )
            done += count

    def _fill(
        self, kind: int, at: int, pages: "array[int]", owners: "array[int]", refs: "array[int]", tag: int
    ) -> None:
        count = len(pages)
        end = at + count
        self._claimed = self._number + count
        self._kinds[at:end] = bytes((kind,)) * count
        self._pages[at:end] = pages
        self._owners[at:end] = owners
        self._refs[at:end] = refs
        self._others[at:end] = array("I", (NO_PAGE,)) * count
        self._tags[at:end] = array("Q", (tag,)) * count
        self._steps[at:end] = array("Q", (self.step,)) * count
        self._times[at:end] = array("Q", (self.time_us,)) * count
        self._tokens[at:end] = [None] * count
        self._number += count

    def read(self, after_number: int, limit: int = 65_536, with_tokens: bool = False) -> EventColumns | None:
        """Events after ``after_number``, at most ``limit``, none more than MAX_SPAN_US after the first; from
        any thread.

        None: the reader lagged and some of them are overwritten; it needs a snapshot. A number
        that was not given yet is the reader's bug: ValueError.
        """
        last = self._number
        if after_number > last or after_number < 0:
            raise ValueError(f"events after number {after_number} asked for, the last is {last}")
        count = min(last - after_number, limit, self.capacity)
        if after_number + self.capacity < self._claimed:
            return None
        columns = self._copy(after_number, self._near(after_number, count), with_tokens)
        # Looked at again after the copy: the writer claims a place before it touches it.
        return None if after_number + self.capacity < self._claimed else columns

    def _near(self, after_number: int, count: int) -> int:
        """How many of the next ``count`` events lie within MAX_SPAN_US: nearly always all."""
        times, mask = self._times, self.capacity - 1
        last_us = times[after_number & mask] + MAX_SPAN_US
        if not count or times[(after_number + count - 1) & mask] <= last_us:
            return count
        return bisect_right(range(count), last_us, key=lambda place: times[(after_number + place) & mask])

    def _copy(self, after_number: int, count: int, with_tokens: bool) -> EventColumns:
        at = after_number & (self.capacity - 1)
        end = min(at + count, self.capacity)
        rest = count - (end - at)
        return EventColumns(
            first_number=after_number + 1,
            kinds=bytes(self._kinds[at:end] + self._kinds[:rest]),
            pages=self._pages[at:end] + self._pages[:rest],
            owners=self._owners[at:end] + self._owners[:rest],
            refs=self._refs[at:end] + self._refs[:rest],
            others=self._others[at:end] + self._others[:rest],
            tags=self._tags[at:end] + self._tags[:rest],
            steps=self._steps[at:end] + self._steps[:rest],
            times_us=self._times[at:end] + self._times[:rest],
            tokens=self._tokens[at:end] + self._tokens[:rest] if with_tokens else (),
        )


class NoEvents(EventRing):
    """For a pool that nobody watches: nothing is numbered, nothing kept."""

    def __init__(self) -> None:
        super().__init__(capacity=1)

    def append(
        self,
        kind: int,
        page: int,
        owner: int,
        refs: int,
        other: int = NO_PAGE,
        tag: int = 0,
        tokens: bytes | None = None,
    ) -> None:
        """Nobody reads it."""

    def read(self, after_number: int, limit: int = 65_536, with_tokens: bool = False) -> EventColumns | None:
        """None, as for a reader that lagged."""
        return None
