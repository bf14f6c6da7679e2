"""The fold of page events: what every page is as of a revision, in planes, and totals that add up.

Vectors over pages, not objects: a batch of events is folded by a few array operations, so the fold
costs the same however busy the pool is. Lives on the observer thread; holds no pool. Rebuilt from a
PoolSnapshot when events were lost.
"""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from worker.ids import NO_PAGE
from worker.pages.events import HIT_TAG, EventColumns, PageFlag, PageState
from worker.pages.events import PageEventKind as Kind
from worker.pages.snapshot import PoolSnapshot
from worker.readers.event_arrays import I64, U8, U16, U32, U64, Bools, EventArrays, kinds_table

FREE, ACTIVE, CACHED, PINNED, RESERVED = map(int, PageState)
SHARED, RELEASED = int(Kind.SHARED), int(Kind.RELEASED)


def slots_of_page(index: int, token_count: int, page_size: int) -> int:
    """Slots that hold a token in the index-th page of a sequence."""
    return max(0, min(page_size, token_count - index * page_size))


# Which kinds write which plane. Of several events on one page the last counts: an assignment with
# repeated indexes leaves the last value behind.
_SETS_LIFE = kinds_table(Kind.ALLOCATED, Kind.FREED)
_SETS_SEAL = kinds_table(Kind.ALLOCATED, Kind.SEALED, Kind.EVICTED, Kind.FREED)
_SETS_PIN = kinds_table(Kind.ALLOCATED, Kind.PINNED, Kind.UNPINNED, Kind.FREED)
_SETS_FILL = kinds_table(Kind.ALLOCATED, Kind.SEALED, Kind.FREED)
_SETS_USE = kinds_table(Kind.ALLOCATED, Kind.SHARED, Kind.REVIVED, Kind.RELEASED)
_SETS_OWNER = kinds_table(Kind.ALLOCATED, Kind.REVIVED, Kind.CACHED, Kind.FREED)
_MOVES_OWNER = kinds_table(Kind.ALLOCATED, Kind.REVIVED, Kind.SHARED, Kind.RELEASED)
_HITS = kinds_table(Kind.SHARED, Kind.REVIVED)


class Ledger:
    """All pages, the dummy page last, as of `revision`."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        count = num_pages + 1
        self.page_size = page_size
        self.num_pages = num_pages
        self.revision = 0
        self.step = 0
        self.time_us = 0  # of the last event, since the start of the epoch
        self.states: U8 = np.full(count, FREE, dtype=np.uint8)
        self.refs: U16 = np.zeros(count, dtype=np.uint16)
        self.filled: U16 = np.zeros(count, dtype=np.uint16)
        self.owners: U16 = np.zeros(count, dtype=np.uint16)
        self.hits: U16 = np.zeros(count, dtype=np.uint16)
        self.parents: U32 = np.full(count, NO_PAGE, dtype=np.uint32)
        self.born_ms: U32 = np.zeros(count, dtype=np.uint32)
        self.used_ms: U32 = np.zeros(count, dtype=np.uint32)
        self.fingerprints: U64 = np.zeros(count, dtype=np.uint64)
        self.sealed: Bools = np.zeros(count, dtype=np.bool_)
        self.pinned: Bools = np.zeros(count, dtype=np.bool_)
        self.dirty: Bools = np.zeros(count, dtype=np.bool_)  # changed since the last delta
        self.event_counts = np.zeros(16, dtype=np.int64)  # by kind, since the start of the epoch
        self.flush_evictions = 0  # evictions for nobody, since the start of the epoch
        self._lives: Bools = np.zeros(count, dtype=np.bool_)
        # By page, for the length of a call; clean again behind it.
        self._mask: Bools = np.zeros(count, dtype=np.bool_)
        self._places: npt.NDArray[np.int32] = np.full(count, -1, dtype=np.int32)
        self.sharers: dict[int, list[int]] = {}  # owners of a shared page after the oldest, by age
        self.states[num_pages] = RESERVED
        self.state_counts = np.bincount(self.states, minlength=6)  # by state
        self.shared_pages = 0
        self.references = 0
        self.filled_slots = 0  # of active pages

    @property
    def flags(self) -> U8:
        """Plane of PageFlag bits."""
        return self.flags_of(slice(None))

    def flags_of(self, pages: "U32 | slice") -> U8:
        """PageFlag bits of some pages."""
        bits = self.sealed[pages] * np.uint8(PageFlag.SEALED) | self.pinned[pages] * np.uint8(PageFlag.PINNED)
        return bits.astype(np.uint8, copy=False)

    def fold(self, events: EventColumns) -> None:
        """Applies consecutive events."""
        self.fold_arrays(EventArrays(events))

    def fold_arrays(self, columns: EventArrays) -> None:
        """Applies consecutive events that are arrays already."""
        assert columns.first_number == self.revision + 1, (columns.first_number, self.revision)
        if not len(columns):
            return
        kinds, pages = columns.kinds, columns.pages
        touched = self._distinct(pages)
        self._count(touched, -1)
        self._fold_standing(columns)
        self._fold_owners(columns)
        self._fold_hits(columns)
        at = _SETS_USE[kinds]
        self.used_ms[pages[at]] = columns.times_ms[at]
        lives, refs = self._lives[touched], self.refs[touched]
        kept = np.where(self.pinned[touched], PINNED, CACHED)
        self.states[touched] = np.where(lives, np.where(refs > 0, ACTIVE, kept), FREE)
        self._count(touched, +1)
        self.dirty[touched] = True
        self.event_counts += np.bincount(kinds, minlength=16)
        self.flush_evictions += int(np.count_nonzero((kinds == Kind.EVICTED) & (columns.owners == 0)))
        self.revision += len(columns)
        self.step, self.time_us = columns.last_step, int(columns.times_us[-1])

    def _distinct(self, pages: U32) -> I64:
        """Each page once, ascending: with a mask, since np.unique takes 0.7 ms of 15,000 events."""
        self._mask[pages] = True
        found = np.flatnonzero(self._mask)
        self._mask[found] = False
        return found

    def _fold_standing(self, events: EventArrays) -> None:
        kinds, pages = events.kinds, events.pages
        self.refs[pages] = events.refs
        at = _SETS_LIFE[kinds]
        born = kinds == Kind.ALLOCATED
        self._lives[pages[at]] = born[at]
        self.born_ms[pages[born]] = events.times_ms[born]
        at = _SETS_PIN[kinds]
        self.pinned[pages[at]] = kinds[at] == Kind.PINNED
        at = _SETS_SEAL[kinds]
        sealed = kinds[at] == Kind.SEALED
        self.sealed[pages[at]] = sealed
        self.parents[pages[at]] = np.where(sealed, events.others[at], np.uint32(NO_PAGE))
        self.fingerprints[pages[at]] = np.where(sealed, events.tags[at], np.uint64(0))
        at = _SETS_FILL[kinds]
        self.filled[pages[at]] = np.where(kinds[at] == Kind.SEALED, self.page_size, 0)

    def _fold_owners(self, events: EventArrays) -> None:
        kinds, pages = events.kinds, events.pages
        at = _SETS_OWNER[kinds]
        holds = (kinds[at] == Kind.ALLOCATED) | (kinds[at] == Kind.REVIVED)
        self.owners[pages[at]] = np.where(holds, events.owners[at], 0)
        shares = (kinds == Kind.SHARED) | ((kinds == Kind.RELEASED) & (events.refs > 0))
        if not shares.any():
            return
        # Only pages that several sequences hold need their events in order, one by one.
        shared = pages[shares]
        self._mask[shared] = True
        at = self._mask[pages] & _MOVES_OWNER[kinds]
        self._mask[shared] = False
        columns = (kinds[at], pages[at], events.owners[at], events.refs[at])
        self._move_owners(zip(*(column.tolist() for column in columns), strict=True))

    def _move_owners(self, moves: Iterable[tuple[int, int, int, int]]) -> None:
        """Kind, page, owner and references of each event, in order."""
        owners, sharers = self.owners, self.sharers
        for kind, page, owner, refs in moves:
            if kind == SHARED:
                if page in sharers:
                    sharers[page].append(owner)
                else:
                    sharers[page] = [owner]
            elif kind != RELEASED:  # allocated or revived: the first of a new life
                owners[page] = owner
                sharers.pop(page, None)
            elif refs == 0:
                sharers.pop(page, None)
                owners[page] = 0
            elif later := sharers.get(page):
                # The oldest goes most often, and looking it up among all others is what would take long.
                if owners[page] != owner and owner in later:
                    later.remove(owner)
                else:
                    owners[page] = later.pop(0)

    def _fold_hits(self, events: EventArrays) -> None:
        kinds, pages = events.kinds, events.pages
        hits = _HITS[kinds] & (events.tags == HIT_TAG)
        resets = np.flatnonzero(_SETS_SEAL[kinds])
        if not hits.any() and not len(resets):
            return
        self.hits[pages[resets]] = 0
        places = np.flatnonzero(hits)
        if len(places) and len(resets):
            # Hits before a page's last seal, allocation or end were hits of another content.
            self._places[pages[resets]] = resets
            places = places[places > self._places[pages[places]]]
            self._places[pages[resets]] = -1
        hit_pages = pages[places]
        hit_pages = hit_pages[self.sealed[hit_pages]]
        unique, counts = np.unique(hit_pages, return_counts=True)
        self.hits[unique] = np.minimum(self.hits[unique] + counts, 65535)

    def fill(self, pages: "array[int]", slots: "array[int]") -> None:
        """Pages hold so many tokens now; the last entry of a page counts, sealed pages are full anyway."""
        if not pages:
            return
        at, now = np.frombuffer(pages, np.uint32), np.frombuffer(slots, np.uint16)
        moved = (self.filled[at] != now) & ~self.sealed[at]
        at, now = at[moved], now[moved]
        touched = self._distinct(at)
        active = touched[self.states[touched] == ACTIVE]
        before = int(self.filled[active].sum(dtype=np.int64))
        self.filled[at] = now
        self.filled_slots += int(self.filled[active].sum(dtype=np.int64)) - before
        self.dirty[touched] = True

    def _count(self, touched: I64, sign: int) -> None:
        states, refs = self.states[touched], self.refs[touched]
        self.state_counts += sign * np.bincount(states, minlength=6)
        self.shared_pages += sign * int(np.count_nonzero(refs >= 2))
        self.references += sign * int(refs.sum(dtype=np.int64))
        self.filled_slots += sign * int(self.filled[touched[states == ACTIVE]].sum(dtype=np.int64))

    def restore(self, snapshot: PoolSnapshot) -> None:
        """Starts over from a snapshot; events between are lost to the counts by kind."""
        self.revision, self.step, self.time_us = snapshot.number, snapshot.step, snapshot.time_us
        self.states[:] = np.frombuffer(snapshot.states, dtype=np.uint8)
        flags = np.frombuffer(snapshot.flags, dtype=np.uint8)
        self.sealed[:] = flags & PageFlag.SEALED != 0
        self.pinned[:] = flags & PageFlag.PINNED != 0
        self.refs[:] = np.frombuffer(snapshot.ref_counts, dtype=np.uint16)
        self.filled[:] = np.frombuffer(snapshot.filled_slots, dtype=np.uint16)
        self.owners[:] = np.frombuffer(snapshot.owners, dtype=np.uint16)
        self.owners[self.refs == 0] = 0
        self.hits[:] = np.frombuffer(snapshot.hit_counts, dtype=np.uint16)
        self.parents[:] = np.frombuffer(snapshot.parent_page_ids, dtype=np.uint32)
        self.born_ms[:] = np.frombuffer(snapshot.born_ms, dtype=np.uint32)
        self.used_ms[:] = np.frombuffer(snapshot.used_ms, dtype=np.uint32)
        self.fingerprints[:] = np.frombuffer(snapshot.fingerprints, dtype=np.uint64)
        for view in snapshot.sequences:  # also pages that a flush took out of the index while in use
            for index, page in enumerate(view.page_ids):
                self.filled[page] = slots_of_page(index, view.token_count, self.page_size)
        self._lives[:] = (self.states != FREE) & (self.states != RESERVED)
        self.state_counts[:] = 0
        self.shared_pages = self.references = self.filled_slots = 0
        self._count(np.arange(self.num_pages + 1), +1)
        self.sharers = self._find_sharers(snapshot)
        self.dirty[:] = True

    def _find_sharers(self, snapshot: PoolSnapshot) -> dict[int, list[int]]:
        sharers: dict[int, list[int]] = {}
        holders = [(view.owner, view.page_ids) for view in snapshot.sequences]
        for owner, pages in (*holders, *snapshot.held):
            for page in pages:
                if self.refs[page] >= 2 and self.owners[page] != owner:
                    sharers.setdefault(page, []).append(owner)
        return sharers
