"""The page pool: the state of every page, how many sequences refer to it, and which pages are free.

Owns page numbers, reference counts and the page events. Knows nothing of prompts, rows or tensors.

            allocate                 release, last reference, not sealed
  FREE ───────────────▶ ACTIVE ─────────────────────────────────────────▶ FREE
   ▲                     │  ▲
   │ evict               │  │ share (prefix hit)
   │                     ▼  │
   └────────────────── CACHED ◀──── release, last reference, sealed     PINNED: CACHED, never evicted
                                                                        RESERVED: the dummy page

Every change passes through ``_change``, which also writes the page event: no reader can miss one. All
columns are arrays with an entry per page (about 60 bytes a page), and every operation costs
O(pages it is given), whatever the size of the pool.
"""

import sys
from array import array
from collections.abc import MutableSequence, Sequence
from itertools import compress

from worker.ids import NO_PAGE
from worker.pages.events import HIT_TAG, EventRing, PageEventKind, PageFlag, PageState
from worker.pages.sharing import SharedTime
from worker.pages.snapshot import Planes
from worker.pages.violation import Violation

SEALED, PINNED = int(PageFlag.SEALED), int(PageFlag.PINNED)
TOKEN_BYTES = 4
FREE, ACTIVE, CACHED, HELD, RESERVED = (int(state) for state in PageState)  # HELD: PageState.PINNED
_ONLY_CACHED = frozenset((CACHED,))
_SOUND = frozenset(  # state, whether it is referred to, flags
    [
        (FREE, False, 0),
        (CACHED, False, SEALED),
        (HELD, False, SEALED | PINNED),
        (RESERVED, False, 0),
        *[(ACTIVE, True, flags) for flags in (0, SEALED, SEALED | PINNED)],
    ]
)
_FLAGS = {FREE: 0, CACHED: SEALED, HELD: SEALED | PINNED, RESERVED: 0}  # that go with a state


class PagePool:
    """``num_pages`` pages for sequences and one dummy page, index ``num_pages``, never handed out."""

    def __init__(self, num_pages: int, page_size: int, events: EventRing) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens is not possible")
        if (num_pages + 1) * page_size > 2**31 - 1:
            raise ValueError(f"{num_pages} pages of {page_size} tokens: slots do not fit 32 bits")
        self.num_pages = num_pages
        self.page_size = page_size
        self.events = events
        self.now_ms = 0
        total = num_pages + 1
        # First slots of free pages, handed out from the end, so page 0 goes first.
        self._free = array("i", range((num_pages - 1) * page_size, -1, -page_size))
        self._states = bytearray((FREE,)) * total
        self._states[num_pages] = RESERVED
        self._flags = bytearray(total)
        self._refs: MutableSequence[int] = array("H", bytes(2 * total))
        self._owners = array("H", bytes(2 * total))  # first owner since it was free
        self._hits = array("H", bytes(2 * total))
        self._parents = array("I", (NO_PAGE,)) * total
        self._born = array("I", bytes(4 * total))
        self._used = array("I", bytes(4 * total))
        self._fingerprints = array("Q", bytes(8 * total))
        self._counts = [0, num_pages, 0, 0, 0, 1]  # by state
        self._num_references = 0
        self._num_shared = 0
        self._num_flagged_pinned = 0  # pages with that flag, whatever their state
        self.sharing = SharedTime(self._refs)

    # What it is now, each in O(1).
    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return self._counts[FREE]

    @property
    def num_active(self) -> int:
        """Pages that sequences refer to; a page with several references counts once."""
        return self._counts[ACTIVE]

    @property
    def num_cached(self) -> int:
        """Unreferenced pages that can be found and evicted."""
        return self._counts[CACHED]

    @property
    def num_pinned(self) -> int:
        """Unreferenced pages that can be found and must stay."""
        return self._counts[HELD]

    @property
    def num_shared(self) -> int:
        """Pages with two or more references."""
        return self._num_shared

    @property
    def num_references(self) -> int:
        """References over all pages."""
        return self._num_references

    def counts_by_state(self) -> dict[PageState, int]:
        """Pages in each state; adds up to num_pages + 1."""
        return {state: self._counts[state] for state in PageState}

    def state(self, page: int) -> PageState:
        """State of a page."""
        return PageState(self._states[page])

    def references(self, page: int) -> int:
        """References to a page."""
        return self._refs[page]

    def references_of(self, pages: Sequence[int]) -> list[int]:
        """``references`` of each."""
        return list(map(self._refs.__getitem__, pages))

    def flags(self, window: range) -> bytes:
        """Bits of PageFlag of each page in ``window``."""
        return bytes(self._flags[window.start : window.stop])

    def referenced(self) -> set[int]:
        """All pages with references; for audits, 10 ns a page of the pool."""
        refs = self._refs
        return set(compress(range(len(refs)), refs))

    def is_sealed(self, page: int) -> bool:
        """Whether it is full, computed, committed and in the prefix index."""
        return self._flags[page] & SEALED != 0

    def is_pinned(self, page: int) -> bool:
        """Whether it belongs to a pinned prefix."""
        return self._flags[page] & PINNED != 0

    def hits(self, page: int) -> int:
        """Prefix hits since it was sealed, at most 65535."""
        return self._hits[page]

    def fingerprint(self, page: int) -> int:
        """Its fingerprint; 0: not sealed."""
        return self._fingerprints[page]

    def free_slots(self) -> "array[int]":
        """Copy of the free list: the first slot of each free page, next to be handed out first."""
        return self._free[::-1]

    def unreferenced(self, pages: Sequence[int]) -> int:
        """How many of ``pages`` are CACHED: taking them makes as many fewer available (B011)."""
        return list(map(self._states.__getitem__, pages)).count(CACHED)

    def planes(self) -> Planes:
        """Copies of all columns."""
        return Planes(
            states=bytes(self._states),
            flags=bytes(self._flags),
            ref_counts=array("H", self._refs),
            filled_slots=self._filled_slots(),
            owners=self._owners[:],
            hit_counts=self._hits[:],
            parent_page_ids=self._parents[:],
            born_ms=self._born[:],
            used_ms=self._used[:],
            fingerprints=self._fingerprints[:],
        )

    def _filled_slots(self) -> "array[int]":
        """page_size where sealed, otherwise 0; by bytes, or a million pages would take 40 ms."""
        low, high = bytearray(256), bytearray(256)  # by flags
        for flags in (SEALED, SEALED | PINNED):
            high[flags], low[flags] = divmod(min(self.page_size, 65_535), 256)
        bytes_of_slots = bytearray(2 * len(self._flags))
        bytes_of_slots[0::2] = self._flags.translate(low)
        bytes_of_slots[1::2] = self._flags.translate(high)
        filled = array("H", bytes_of_slots)
        if sys.byteorder == "big":
            filled.byteswap()
        return filled

    # Changes.
    def allocate(self, owners: "array[int]") -> list[int] | None:
        """One free page per entry of ``owners``; None and nothing taken if there are fewer."""
        count = len(owners)
        if count > len(self._free):
            return None
        if not count:
            return []
        page_size = self.page_size
        pages = [slot // page_size for slot in self._free[: -count - 1 : -1]]
        del self._free[-count:]
        self._change(PageEventKind.ALLOCATED, pages, owners, delta=1, state=ACTIVE)
        now, born, used, mine = self.now_ms, self._born, self._used, self._owners
        for page, owner in zip(pages, owners, strict=True):
            born[page] = used[page] = now
            mine[page] = owner
        return pages

    def share(self, pages: Sequence[int], owner: int, is_hit: bool) -> list[int]:
        """One more reference to each of ``pages``; returns those that were CACHED, same order."""
        states, used, now = self._states, self._used, self.now_ms
        revived = [page for page in pages if states[page] != ACTIVE]
        cached = revived
        if revived and not _ONLY_CACHED.issuperset(map(states.__getitem__, revived)):
            cached = [page for page in revived if states[page] == CACHED]
            for page in revived:
                assert states[page] in (CACHED, HELD), f"page {page} shared in state {states[page]}"
        active = [page for page in pages if states[page] == ACTIVE] if revived else pages
        tag = HIT_TAG if is_hit else 0
        if active:
            self._change(PageEventKind.SHARED, active, self._same(owner, active), delta=1, tag=tag)
            self.sharing.gained(active)
        if revived:
            owners = self._same(owner, revived)
            self._change(PageEventKind.REVIVED, revived, owners, delta=1, state=ACTIVE, tag=tag)
        for page in revived:
            self._owners[page] = owner
        for page in pages:
            used[page] = now
        if is_hit:
            hits = self._hits
            for page in pages:
                if hits[page] != 65_535:
                    hits[page] += 1
        return cached

    def release(self, pages: Sequence[int], owner: int) -> list[int]:
        """One reference less on each of ``pages``, given in token order.

        Returns those that are now CACHED, last token first, so that a page comes before its parent.
        """
        if not pages:
            return []
        in_token_order, pages = pages, pages[::-1]
        self._change(PageEventKind.RELEASED, pages, self._same(owner, pages), delta=-1)
        self.sharing.lost(in_token_order)
        refs, flags, used, now = self._refs, self._flags, self._used, self.now_ms
        for page in pages:
            used[page] = now
        unused = [page for page in pages if not refs[page]]
        kept = [page for page in unused if flags[page] & SEALED]
        pinned = [page for page in kept if flags[page] & PINNED] if self._num_flagged_pinned else []
        cached = [page for page in kept if not flags[page] & PINNED] if pinned else kept
        for some, state in ((cached, CACHED), (pinned, HELD)):
            if some:
                self._change(PageEventKind.CACHED, some, self._same(owner, some), state=state)
        if len(kept) < len(unused):
            lost = [page for page in unused if not flags[page] & SEALED]
            self._free_pages(lost, self._same(owner, lost))
        return cached

    def seal(
        self, page: int, parent: int | None, fingerprint: int, owner: int, tokens: bytes | None = None
    ) -> None:
        """``page`` is full, computed and committed, and stands in the prefix index after ``parent``."""
        assert self._states[page] == ACTIVE, f"page {page} sealed in state {self._states[page]}"
        assert not self._flags[page], f"page {page} sealed with flags {self._flags[page]}"
        other: int = NO_PAGE
        if parent is not None:
            other = parent
            assert self._flags[parent] & SEALED, f"parent {parent} of page {page} is not sealed"
            assert self._refs[parent], f"parent {parent} of page {page} is not held"
        self._flags[page] = SEALED
        self._parents[page] = other
        self._fingerprints[page] = fingerprint
        self._hits[page] = 0
        self._change(PageEventKind.SEALED, (page,), (owner,), other=other, tag=fingerprint, tokens=tokens)

    def seal_run(
        self, pages: Sequence[int], parent: int | None, fingerprints: Sequence[int], owner: int, raw: bytes
    ) -> None:
        """``seal`` of consecutive pages; ``raw``: the tokens of all of them."""
        size = self.page_size * TOKEN_BYTES
        for at, (page, mark) in enumerate(zip(pages, fingerprints, strict=True)):
            self.seal(page, parent, mark, owner, raw[at * size : (at + 1) * size])
            parent = page

    def seal_each(
        self,
        pages: Sequence[int],
        aboves: Sequence[int | bytes],
        fingerprints: Sequence[int],
        owners: Sequence[int],
        raws: Sequence[bytes],
    ) -> None:
        """``seal`` of pages that have nothing to do with each other; ``aboves``: parents, or salts."""
        for page, above, mark, owner, raw in zip(pages, aboves, fingerprints, owners, raws, strict=False):
            self.seal(page, None if isinstance(above, bytes) else above, mark, owner, raw)

    def unseal(self, pages: Sequence[int], owners: Sequence[int]) -> None:
        """``pages`` left the prefix index, each for its owner or, 0, by a flush; FREE if unreferenced."""
        flags, parents, marks, hits = self._flags, self._parents, self._fingerprints, self._hits
        for page in pages:
            assert flags[page] == SEALED, f"page {page} evicted with flags {flags[page]}"
            flags[page] = 0
        for page in pages:
            parents[page] = NO_PAGE
            marks[page] = hits[page] = 0
        self._change(PageEventKind.EVICTED, pages, owners)
        if not any(map(self._refs.__getitem__, pages)):
            self._free_pages(pages, owners)
            return
        unused = [at for at, page in enumerate(pages) if not self._refs[page]]
        self._free_pages([pages[at] for at in unused], [owners[at] for at in unused])

    def copied(self, target: int, source: int, owner: int) -> None:
        """``target`` gets the content of ``source`` in the step that is being planned."""
        assert self._states[target] == ACTIVE == self._states[source], (target, source)
        self._change(PageEventKind.COPIED, (target,), (owner,), other=source)

    def pin(self, page: int) -> bool:
        """Marks a sealed page as part of a pinned prefix; whether it was CACHED before."""
        assert self._flags[page] == SEALED, f"page {page} pinned with flags {self._flags[page]}"
        was_cached = self._states[page] == CACHED
        self._flags[page] = SEALED | PINNED
        self._num_flagged_pinned += 1
        self._change(PageEventKind.PINNED, (page,), (0,), state=HELD if was_cached else None)
        return was_cached

    def unpin(self, page: int) -> bool:
        """Takes the mark away; whether the page is CACHED now."""
        assert self._flags[page] == SEALED | PINNED, f"page {page} unpinned, flags {self._flags[page]}"
        is_cached = self._states[page] == HELD
        self._flags[page] = SEALED
        self._num_flagged_pinned -= 1
        self._change(PageEventKind.UNPINNED, (page,), (0,), state=CACHED if is_cached else None)
        return is_cached

    def _free_pages(self, pages: Sequence[int], owners: Sequence[int]) -> None:
        if not pages:
            return
        self._change(PageEventKind.FREED, pages, owners, state=FREE)
        mine, page_size = self._owners, self.page_size
        for page in pages:
            mine[page] = 0
        self._free.extend([page * page_size for page in pages])

    def _change(
        self,
        kind: PageEventKind,
        pages: Sequence[int],
        owners: Sequence[int],
        *,
        delta: int = 0,
        state: int | None = None,
        other: int = NO_PAGE,
        tag: int = 0,
        tokens: bytes | None = None,
    ) -> None:
        """The one door: references, state and their totals change here, and the event is written."""
        refs, states, counts = self._refs, self._states, self._counts
        if delta:
            edge = 2 if delta > 0 else 1  # where a page becomes, or stops being, shared
            for page in pages:
                after = refs[page] + delta
                assert after >= 0, f"page {page} was released twice, state {states[page]}, owner {owners}"
                refs[page] = after
                if after == edge:
                    self._num_shared += delta
            self._num_references += delta * len(pages)
        if state is not None:
            before = bytes(map(states.__getitem__, pages))
            for old in set(before):
                counts[old] -= before.count(old)
            for page in pages:
                states[page] = state
            counts[state] += len(pages)
        if len(pages) == 1:
            page = pages[0]
            self.events.append(kind, page, owners[0], refs[page], other, tag, tokens)
        else:
            after_all = array("H", [refs[page] for page in pages])
            self.events.extend(kind, array("I", pages), array("H", owners), after_all, tag)

    @staticmethod
    def _same(owner: int, pages: Sequence[int]) -> "array[int]":
        return array("H", (owner,)) * len(pages)

    def check(self, window: range | None = None) -> list[Violation]:
        """Invariants of the pool alone: totals, and page by page those in ``window``; None: all pages."""
        found: list[Violation] = []
        states, counts = self._states, self._counts
        for state in PageState:
            if states.count(state) != counts[state]:
                found.append(Violation("state_sum", state.name, counts[state], states.count(state)))
        if sum(counts) != self.num_pages + 1:
            found.append(Violation("state_sum", "pages in all states", self.num_pages + 1, sum(counts)))
        if window is None:  # under load each page is compared with who holds it; a sum takes 10 ms a million
            held = sum(self._refs)
            if held != self._num_references:
                found.append(Violation("refcount", "references over all pages", self._num_references, held))
            shared = sum([count >= 2 for count in self._refs])
            if shared != self._num_shared:
                found.append(Violation("refcount", "shared pages", self._num_shared, shared))
        found += self._check_pages(range(self.num_pages) if window is None else window)
        found += self._check_pages(range(self.num_pages, self.num_pages + 1))
        return found + self._check_free_list(window)

    def _check_pages(self, window: range) -> list[Violation]:
        at = slice(window.start, window.stop)
        # All at once first: a round of the live audit is the engine's time, and nearly always all is well.
        found = zip(self._states[at], map(bool, self._refs[at]), self._flags[at], strict=True)
        has_dummy = self._states[at].count(RESERVED) == 1
        if _SOUND.issuperset(found) and has_dummy == (window.stop == self.num_pages + 1):
            return []
        return self._find_in_pages(window)

    def _find_in_pages(self, window: range) -> list[Violation]:
        """Page by page, what does not hold."""
        found = []
        states, all_refs, all_flags = self._states, self._refs, self._flags
        for page in window:
            state, refs, flags = states[page], all_refs[page], all_flags[page]
            if (state == ACTIVE) != (refs > 0):
                expected = "some" if state == ACTIVE else 0
                subject = f"references of page {page}, state {state}"
                found.append(Violation("refcount", subject, expected, refs, page))
            expected_flags = (flags & SEALED) | (flags & PINNED) if state == ACTIVE else _FLAGS[state]
            if flags != expected_flags or (flags & PINNED and not flags & SEALED):
                subject = f"flags of page {page}, state {state}"
                found.append(Violation("state_sum", subject, expected_flags, flags, page))
            if (state == RESERVED) != (page == self.num_pages):
                found.append(
                    Violation("state_sum", f"dummy page; state of page {page}", RESERVED, state, page)
                )
        return found

    def _check_free_list(self, window: range | None) -> list[Violation]:
        """The free list holds the first slots of FREE pages, and in the whole audit each exactly once."""
        free, states, page_size = self._free, self._states, self.page_size
        if len(free) != self._counts[FREE]:
            return [Violation("free_list", "entries", self._counts[FREE], len(free))]
        if window is None:
            expected = {page * page_size for page, state in enumerate(states) if state == FREE}
            if set(free) != expected:
                return [
                    Violation(
                        "free_list", "slots", sorted(expected - set(free)), sorted(set(free) - expected)
                    )
                ]
            return []
        wrong = [
            s for s in free[window.start : window.stop] if s % page_size or states[s // page_size] != FREE
        ]
        return [Violation("free_list", "slots of pages that are not FREE", [], wrong)] if wrong else []
