"""The table of page events, applied one by one: the first event that it does not allow is named.

Owns a state of the pool of its own, in plain lists: the second implementation of the ledger's fold. It keeps
the owners of each page, so that a release by somebody who does not hold it is seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.ids import NO_PAGE
from worker.pages.events import EventColumns, PageFlag, PageState
from worker.pages.events import PageEventKind as Kind

FREE, ACTIVE, CACHED, PINNED, RESERVED = PageState
SEALED_FLAG, PINNED_FLAG = int(PageFlag.SEALED), int(PageFlag.PINNED)


class BadEvent(Exception):
    """An event that cannot have happened."""

    def __init__(self, number: int, step: int, kind: str, page: int, why: str) -> None:
        super().__init__(f"event {number}, step {step}: {kind} of page {page}: {why}")
        self.number = number
        self.step = step
        self.kind = kind
        self.page = page
        self.why = why


class _Broken(Exception):
    """Why an event is not allowed."""


@dataclass(frozen=True, slots=True)
class PagePlanes:
    """The states to begin with; one entry per page, the dummy page last."""

    states: Sequence[int]
    flags: Sequence[int]
    refs: Sequence[int]
    owners: Sequence[int]
    parents: Sequence[int]


class PageRules:
    """All pages as of `number`, and what may happen to them."""

    def __init__(
        self, planes: PagePlanes, sharers: Mapping[int, Sequence[int]], number: int, step: int
    ) -> None:
        self.number = number
        self.step = step
        self.num_pages = len(planes.states) - 1
        self.states = [PageState(state) for state in planes.states]
        self.flags = list(planes.flags)
        self.refs = list(planes.refs)
        self.parents = list(planes.parents)
        self.num_children = [0] * len(self.states)
        self.holders: dict[int, list[int]] = {}
        for page, owner in enumerate(planes.owners):
            if self.refs[page]:
                self.holders[page] = [owner, *sharers.get(page, ())]
            if self.parents[page] != NO_PAGE:
                self.num_children[self.parents[page]] += 1
        self._due: dict[int, tuple[Kind, int]] = {}  # what the next event of a page must be, and whose
        self._time_us = 0
        self._now = (step, 0)  # step and time of the event that is applied
        self._began: tuple[int, int] | None = None  # step and time of the first event
        # Pages that nobody holds, until their first event; some may be within a release, see `_settle`.
        self._unheld = {page for page, state in enumerate(self.states) if state in (CACHED, PINNED)}

    def apply(self, events: EventColumns) -> None:
        """Consecutive events. Raises BadEvent at the first that is not allowed."""
        columns = zip(
            events.kinds,
            events.pages,
            events.owners,
            events.refs,
            events.others,
            events.steps,
            events.times_us,
            strict=True,
        )
        for offset, (kind, page, owner, refs, other, step, time_us) in enumerate(columns):
            number = events.first_number + offset
            self._now = (step, time_us)
            try:
                self._check_place(number, kind, page, step, time_us)
                self._apply(Kind(kind), page, owner, other)
                if refs != self.refs[page]:
                    raise _Broken(f"it says {refs} references, there are {self.refs[page]}")
            except _Broken as broken:
                name = Kind(kind).name if kind in _KINDS else f"kind {kind}"
                raise BadEvent(number, step, name, page, str(broken)) from None
            self.number, self.step, self._time_us = number, step, time_us
            self._began = self._began or (step, time_us)

    def _check_place(self, number: int, kind: int, page: int, step: int, time_us: int) -> None:
        if number != self.number + 1:
            raise _Broken(f"it follows number {self.number}")
        if kind not in _KINDS:
            raise _Broken("there is no such kind")
        if not 0 <= page < self.num_pages:
            raise _Broken(f"the pool has pages 0 .. {self.num_pages - 1}")
        if step < self.step:
            raise _Broken(f"the event before is of step {self.step}")
        if time_us < self._time_us:
            raise _Broken(f"it is {self._time_us - time_us} us older than the event before")

    def _apply(self, kind: Kind, page: int, owner: int, other: int) -> None:
        due = self._due.pop(page, None)
        is_unheld = page in self._unheld
        self._unheld.discard(page)
        if due is not None and due != (kind, owner):
            raise _Broken(f"{due[0].name} of owner {due[1]} had to follow")
        if due is None and kind is Kind.CACHED:
            self._settle(page, is_unheld)
            return
        match kind:
            case Kind.ALLOCATED:
                self._must_be(page, FREE)
                self._take(page, owner)
            case Kind.SHARED:
                self._must_be(page, ACTIVE)
                self._take(page, owner)
            case Kind.REVIVED:
                self._must_be(page, CACHED, PINNED)
                self._take(page, owner)
            case Kind.SEALED:
                self._seal(page, owner, other)
            case Kind.RELEASED:
                self._release(page, owner)
            case Kind.CACHED:
                self._cache(page)
            case Kind.EVICTED:
                self._evict(page, owner)
            case Kind.FREED:
                self._free(page)
            case Kind.COPIED:
                self._copy(page, owner, other)
            case Kind.PINNED:
                self._pin(page, owner)
            case Kind.UNPINNED:
                self._unpin(page, owner)
            case Kind.MOVED:
                raise _Broken("this pool has one tier")

    def _must_be(self, page: int, *states: PageState) -> None:
        if self.states[page] not in states:
            wanted = " or ".join(state.name for state in states)
            raise _Broken(f"it is {self.states[page].name}, not {wanted}")

    def _must_hold(self, page: int, owner: int) -> None:
        holders = self.holders.get(page, ())
        if owner not in holders:
            raise _Broken(f"owner {owner} does not hold it, {list(holders)} do")

    def _take(self, page: int, owner: int) -> None:
        if not owner:
            raise _Broken("it is for nobody")
        self.states[page] = ACTIVE
        self.refs[page] += 1
        self.holders.setdefault(page, []).append(owner)

    def _seal(self, page: int, owner: int, parent: int) -> None:
        self._must_be(page, ACTIVE)
        self._must_hold(page, owner)
        if self.flags[page]:
            raise _Broken("it is sealed already")
        if parent != NO_PAGE:
            if not 0 <= parent < self.num_pages or parent == page:
                raise _Broken(f"its parent is page {parent}")
            if not self.flags[parent] & SEALED_FLAG:
                raise _Broken(f"its parent {parent} is not sealed")
            if owner not in self.holders.get(parent, ()):
                raise _Broken(f"owner {owner} does not hold its parent {parent}")
            self.num_children[parent] += 1
        self.flags[page] = SEALED_FLAG
        self.parents[page] = parent

    def _release(self, page: int, owner: int) -> None:
        self._must_be(page, ACTIVE)
        self._must_hold(page, owner)
        self.holders[page].remove(owner)
        self.refs[page] -= 1
        if not self.refs[page]:
            del self.holders[page]
            self._due[page] = (Kind.CACHED if self.flags[page] & SEALED_FLAG else Kind.FREED, owner)

    def _cache(self, page: int) -> None:
        self._must_be(page, ACTIVE)
        if self.refs[page]:
            raise _Broken(f"it has {self.refs[page]} references")
        if not self.flags[page] & SEALED_FLAG:
            raise _Broken("it is not sealed")
        self.states[page] = PINNED if self.flags[page] & PINNED_FLAG else CACHED

    def _settle(self, page: int, is_unheld: bool) -> None:
        """A recording may begin in the middle of a release: pages were released before its map, which has
        them as they will be, and are CACHED after it, at the time of its first event.
        """
        if not is_unheld or self._began not in (None, self._now):
            raise _Broken("its last reference was not released by the event before")

    def _evict(self, page: int, owner: int) -> None:
        self._must_be(page, CACHED, ACTIVE)
        if self.flags[page] != SEALED_FLAG:
            raise _Broken("it is pinned" if self.flags[page] else "it is not sealed")
        if self.num_children[page]:
            raise _Broken(f"{self.num_children[page]} sealed pages hang on it")
        self._unseal(page)
        if not self.refs[page]:
            self._due[page] = (Kind.FREED, owner)
        elif owner:
            raise _Broken(f"it is in use and leaves the index for owner {owner}: only a flush does that")

    def _unseal(self, page: int) -> None:
        self.flags[page] = 0
        if self.parents[page] != NO_PAGE:
            self.num_children[self.parents[page]] -= 1
        self.parents[page] = NO_PAGE

    def _free(self, page: int) -> None:
        self._must_be(page, ACTIVE, CACHED)
        if self.refs[page]:
            raise _Broken(f"it has {self.refs[page]} references")
        if self.flags[page]:
            raise _Broken("it is sealed")
        self.states[page] = FREE

    def _copy(self, page: int, owner: int, source: int) -> None:
        self._must_be(page, ACTIVE)
        self._must_hold(page, owner)
        if not 0 <= source < self.num_pages or self.states[source] is not ACTIVE:
            raise _Broken(f"its original {source} is not ACTIVE")

    def _pin(self, page: int, owner: int) -> None:
        if owner:
            raise _Broken(f"pins are nobody's, not owner {owner}'s")
        if self.flags[page] != SEALED_FLAG:
            raise _Broken("it is pinned already" if self.flags[page] else "it is not sealed")
        self.flags[page] |= PINNED_FLAG
        if not self.refs[page]:
            self.states[page] = PINNED

    def _unpin(self, page: int, owner: int) -> None:
        if owner:
            raise _Broken(f"pins are nobody's, not owner {owner}'s")
        if not self.flags[page] & PINNED_FLAG:
            raise _Broken("it is not pinned")
        self.flags[page] &= ~PINNED_FLAG
        if not self.refs[page]:
            self.states[page] = CACHED

    @property
    def due(self) -> frozenset[int]:
        """Pages whose next event is certain: between two turns of an engine there is none."""
        return frozenset(self._due)


_KINDS = frozenset(map(int, Kind))
