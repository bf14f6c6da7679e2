"""The page pool for what-if: nobody reads events, times or owners, so none are kept.

The same columns of states, flags, references and hits as in PagePool, the same free list in the same
order, and the same answers; tests hold the two side by side. Each operation is one pass over its pages,
where PagePool makes one for every event.
"""

from array import array
from collections.abc import Sequence

from worker.pages.columns import ACTIVE, CACHED, FREE, HELD, SEALED
from worker.pages.events import NoEvents
from worker.pages.pool import PagePool
from worker.pages.sharing import NoSharedTime

MAX_HITS = 65_535


class UnwatchedPool(PagePool):
    """See PagePool."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size, NoEvents())
        self._refs = [0] * (num_pages + 1)  # read and written in half the time of an array
        self.sharing = NoSharedTime(self._refs)

    def allocate(self, owners: "array[int]") -> list[int] | None:
        """See PagePool."""
        count, free, page_size = len(owners), self._free, self.page_size
        if count > len(free):
            return None
        if not count:
            return []
        pages = [slot // page_size for slot in free[: -count - 1 : -1]]
        del free[-count:]
        states, refs = self._states, self._refs
        for page in pages:
            assert states[page] == FREE, f"page {page} allocated in state {states[page]}"
            states[page] = ACTIVE
            refs[page] = 1
        self._move(FREE, ACTIVE, count)
        self._num_references += count
        return pages

    def _move(self, old: int, new: int, count: int) -> None:
        counts = self._counts
        counts[old] -= count
        counts[new] += count

    def share(self, pages: Sequence[int], owner: int, is_hit: bool) -> list[int]:
        """See PagePool."""
        states, refs, cached, num_held = self._states, self._refs, list[int](), 0
        for page in pages:
            count = refs[page]
            refs[page] = count + 1
            if count > 1:
                continue
            if count:
                self._num_shared += 1
                continue
            if states[page] == CACHED:
                cached.append(page)
            else:
                assert states[page] == HELD, f"page {page} shared in state {states[page]}"
                num_held += 1
            states[page] = ACTIVE
        if cached or num_held:
            self._move(CACHED, ACTIVE, len(cached))
            self._move(HELD, ACTIVE, num_held)
        self._num_references += len(pages)
        if is_hit:
            hits = self._hits
            for page in pages:
                if hits[page] != MAX_HITS:
                    hits[page] += 1
        return cached

    def release(self, pages: Sequence[int], owner: int) -> list[int]:
        """See PagePool."""
        states, refs, flags = self._states, self._refs, self._flags
        cached, lost, num_held = list[int](), list[int](), 0
        for page in pages[::-1]:
            left = refs[page] - 1
            assert left >= 0, f"page {page} was released twice, state {states[page]}, owner {owner}"
            refs[page] = left
            if left > 1:
                continue
            if left:
                self._num_shared -= 1
                continue
            flag = flags[page]
            if flag == SEALED:
                states[page] = CACHED
                cached.append(page)
            elif flag:
                states[page] = HELD
                num_held += 1
            else:
                lost.append(page)
        self._num_references -= len(pages)
        if cached or num_held:
            self._move(ACTIVE, CACHED, len(cached))
            self._move(ACTIVE, HELD, num_held)
        if lost:
            self._free_all(lost, ACTIVE)
        return cached

    def _free_all(self, pages: Sequence[int], old: int) -> None:
        states, page_size = self._states, self.page_size
        for page in pages:
            states[page] = FREE
        self._move(old, FREE, len(pages))
        self._free.extend([page * page_size for page in pages])

    def seal(
        self, page: int, parent: int | None, fingerprint: int, owner: int, tokens: bytes | None = None
    ) -> None:
        """See PagePool."""
        self._seal_all((page,))

    def seal_run(
        self, pages: Sequence[int], parent: int | None, fingerprints: Sequence[int], owner: int, raw: bytes
    ) -> None:
        """See PagePool."""
        assert parent is None or self._flags[parent] & SEALED, f"parent {parent} of {pages} is not sealed"
        self._seal_all(pages)

    def seal_each(
        self,
        pages: Sequence[int],
        aboves: Sequence[int | bytes],
        fingerprints: Sequence[int],
        owners: Sequence[int],
        raws: Sequence[bytes],
    ) -> None:
        """See PagePool."""
        self._seal_all(pages)

    def _seal_all(self, pages: Sequence[int]) -> None:
        states, flags, hits = self._states, self._flags, self._hits
        for page in pages:
            assert states[page] == ACTIVE, f"page {page} sealed in state {states[page]}"
            assert not flags[page], f"page {page} sealed with flags {flags[page]}"
            flags[page] = SEALED
            hits[page] = 0

    def unseal(self, pages: Sequence[int], owners: Sequence[int]) -> None:
        """See PagePool."""
        flags, refs = self._flags, self._refs
        unused = [page for page in pages if not refs[page]]
        for page in pages:
            assert flags[page] == SEALED, f"page {page} evicted with flags {flags[page]}"
            flags[page] = 0
        self._free_all(unused, CACHED)
