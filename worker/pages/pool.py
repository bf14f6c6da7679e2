"""The page pool: the state of every page, how many sequences refer to it, and which pages are free.

Owns page numbers, reference counts and the page events. Knows nothing of prompts, rows or tensors.

            allocate                 release, last reference, not sealed
  FREE ───────────────▶ ACTIVE ─────────────────────────────────────────▶ FREE
   ▲                     │  ▲
   │ evict               │  │ share (prefix hit)
   │                     ▼  │
   └────────────────── CACHED ◀──── release, last reference, sealed     PINNED: CACHED, never evicted
                                                                        RESERVED: the dummy page

Every change passes through ``_change``, which also writes the page event: no reader can miss one. Every
operation costs O(pages it is given), whatever the size of the pool. What can be asked is in columns.py, what
must hold in pool_audit.py.
"""

from array import array
from collections.abc import Sequence

from worker.ids import NO_PAGE
from worker.pages.columns import ACTIVE, CACHED, FREE, HELD, PINNED, SEALED
from worker.pages.events import HIT_TAG, EventRing, PageEventKind
from worker.pages.pool_audit import AuditedColumns
from worker.pages.sharing import SharedTime

TOKEN_BYTES = 4
_ONLY_CACHED = frozenset((CACHED,))


class PagePool(AuditedColumns):
    """The pages of one worker; see PageColumns."""

    def __init__(self, num_pages: int, page_size: int, events: EventRing) -> None:
        super().__init__(num_pages, page_size)
        self.events = events
        self.now_ms = 0
        self.sharing = SharedTime(self._refs)

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
        """``seal`` of consecutive pages; ``raw``: the tokens of all of them, and maybe of more."""
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
