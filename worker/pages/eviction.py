"""Which cached page goes first when pages are needed.

Owns the order of unreferenced pages in intrusive lists (two integers a page, no objects). Knows neither
the trie nor the pool: it is told what becomes unreferenced, and names victims one at a time in O(1).

Only a page without children may be named. Each holder of a page also holds its parent, so references
of a parent are never fewer than those of its child, and pages become unreferenced child first. With
least recently used that alone is enough: all unreferenced pages stand in one list in the order of
their last use, a child before its parent, and the head is always a leaf. The same holds for least
frequently used, since every hit of a child is a hit of its parent. The other two are told which page
is a leaf, and when one becomes a leaf.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of unreferenced, unpinned pages."""

    is_by_use_alone: bool  # hits, depth and leaves are nothing to it: it need not be told

    def add(self, page: int, hits: int, depth: int, is_leaf: bool) -> None:
        """``page`` is not referenced any more; children come before their parents."""
        ...

    def add_all(self, pages: Sequence[int]) -> None:
        """``add`` of each, in this order, without what only some policies ask for."""
        ...

    def hold(self, page: int) -> None:
        """``page`` is referenced again, or pinned."""
        ...

    def hold_all(self, pages: Sequence[int]) -> None:
        """``hold`` of each."""
        for page in pages:
            self.hold(page)

    def becomes_leaf(self, page: int, hits: int, depth: int) -> None:
        """The last child of ``page``, which is unreferenced, was evicted."""
        ...

    def forget(self, page: int) -> None:
        """``page`` left the cache."""
        ...

    def forget_held(self, page: int) -> None:
        """``page``, which is referenced, left the cache: when it comes again it has other content."""

    def pop(self) -> int | None:
        """Takes out the leaf to evict next; None: there is none."""
        ...

    def pop_all(self, count: int) -> list[int]:
        """``pop`` so many times, where nothing need be heard of new leaves between; fewer: no more."""
        raise AssertionError(f"{count} pages taken out at once")


class PageLists:
    """Doubly linked lists over page numbers: two arrays, the heads behind the pages."""

    def __init__(self, num_pages: int, num_lists: int = 1) -> None:
        total = num_pages + num_lists
        self._base = num_pages
        self._next = array("I", range(total))  # 'I' is written faster than 'i'
        self._prev = self._next[:]

    def __contains__(self, page: int) -> bool:
        return self._next[page] != page

    def first(self, which: int = 0) -> int | None:
        """Head of a list; None when it is empty."""
        page = self._next[self._base + which]
        return page if page < self._base else None

    def append(self, page: int, which: int = 0) -> None:
        """At the tail."""
        self._insert(page, self._prev[self._base + which])

    def append_all(self, pages: Sequence[int]) -> None:
        """At the tail of the first list, in this order."""
        following, before, head = self._next, self._prev, self._base
        tail = before[head]
        for page in pages:
            assert following[page] == page, f"page {page} stands in a list already"
            following[tail] = page
            before[page] = tail
            tail = page
        following[tail] = head
        before[head] = tail

    def prepend(self, page: int, which: int = 0) -> None:
        """At the head."""
        self._insert(page, self._base + which)

    def _insert(self, page: int, after: int) -> None:
        assert self._next[page] == page, f"page {page} stands in a list already"
        following = self._next[after]
        self._next[after] = self._prev[following] = page
        self._next[page] = following
        self._prev[page] = after

    def remove(self, page: int) -> None:
        """Out of the list it stands in."""
        self.remove_all((page,))

    def remove_all(self, pages: Sequence[int]) -> None:
        """Each out of the list it stands in."""
        following, previous = self._next, self._prev
        for page in pages:
            before, after = previous[page], following[page]
            assert after != page, f"page {page} stands in no list"
            following[before] = after
            previous[after] = before
            following[page] = previous[page] = page

    def pop(self, which: int = 0) -> int | None:
        """Takes out the head of a list; None when it is empty."""
        head = self._base + which
        page = self._next[head]
        if page >= self._base:
            return None
        after = self._next[page]
        self._next[head], self._prev[after] = after, head
        self._next[page] = self._prev[page] = page
        return page

    def pop_all(self, count: int) -> list[int]:
        """Takes out the first ``count`` of the first list, or all there are."""
        following, before, head = self._next, self._prev, self._base
        found: list[int] = []
        page = following[head]
        while len(found) < count and page < head:
            found.append(page)
            after = following[page]
            following[page] = before[page] = page
            page = after
        following[head], before[page] = page, head
        return found

    def pages(self, which: int = 0) -> list[int]:
        """All pages of a list, head first; for tests and audits."""
        found, page = [], self._next[self._base + which]
        while page < self._base:
            found.append(page)
            page = self._next[page]
        return found


class LeastRecentlyUsed(EvictionPolicy):
    """The page whose last use is longest ago. The default."""

    is_by_use_alone = True

    def __init__(self, num_pages: int) -> None:
        self._lists = PageLists(num_pages)

    def add(self, page: int, hits: int, depth: int, is_leaf: bool) -> None:
        """See EvictionPolicy."""
        self._lists.append(page)

    def add_all(self, pages: Sequence[int]) -> None:
        """See EvictionPolicy."""
        self._lists.append_all(pages)

    def hold(self, page: int) -> None:
        """See EvictionPolicy."""
        self._lists.remove(page)

    def becomes_leaf(self, page: int, hits: int, depth: int) -> None:
        """Nothing: it stands in the list already, behind its children."""

    def forget(self, page: int) -> None:
        """See EvictionPolicy."""
        self._lists.remove(page)

    def pop(self) -> int | None:
        """See EvictionPolicy."""
        return self._lists.pop()

    def pop_all(self, count: int) -> list[int]:
        """See EvictionPolicy."""
        return self._lists.pop_all(count)

    def hold_all(self, pages: Sequence[int]) -> None:
        """See EvictionPolicy."""
        self._lists.remove_all(pages)


class _Buckets:
    """Lists ordered among each other; finds the first one that is not empty in O(1)."""

    def __init__(self, num_pages: int, num_lists: int) -> None:
        self._lists = PageLists(num_pages, num_lists)
        self._which = bytearray(num_pages)
        self._sizes = [0] * num_lists
        self._filled = 0  # bit per list that is not empty

    def __contains__(self, page: int) -> bool:
        return page in self._lists

    def append(self, page: int, which: int) -> None:
        self._which[page] = which
        self._sizes[which] += 1
        self._filled |= 1 << which
        self._lists.append(page, which)

    def remove(self, page: int) -> None:
        which = self._which[page]
        self._lists.remove(page)
        self._sizes[which] -= 1
        if not self._sizes[which]:
            self._filled &= ~(1 << which)

    def first_list(self, start: int = 0) -> int | None:
        """First list that is not empty, counted from ``start`` and round."""
        if not self._filled:
            return None
        ahead = self._filled >> start
        if ahead:
            return start + (ahead & -ahead).bit_length() - 1
        return (self._filled & -self._filled).bit_length() - 1

    def pop(self, which: int) -> int | None:
        page = self._lists.first(which)
        if page is not None:
            self.remove(page)
        return page


class LeastFrequentlyUsed(EvictionPolicy):
    """The page with the fewest prefix hits since it was sealed (capped at 63), then by last use."""

    is_by_use_alone = False

    def __init__(self, num_pages: int) -> None:
        self._buckets = _Buckets(num_pages, 64)

    def add(self, page: int, hits: int, depth: int, is_leaf: bool) -> None:
        """See EvictionPolicy."""
        self._buckets.append(page, min(hits, 63))

    def add_all(self, pages: Sequence[int]) -> None:
        """Never called: it asks for more than use."""
        raise AssertionError(f"{len(pages)} pages added without their hits and depths")

    def hold(self, page: int) -> None:
        """See EvictionPolicy."""
        self._buckets.remove(page)

    def becomes_leaf(self, page: int, hits: int, depth: int) -> None:
        """Nothing: its children had no more hits than it has and stood before it."""

    def forget(self, page: int) -> None:
        """See EvictionPolicy."""
        self._buckets.remove(page)

    def pop(self) -> int | None:
        """See EvictionPolicy."""
        which = self._buckets.first_list()
        return None if which is None else self._buckets.pop(which)


class FirstInFirstOut(EvictionPolicy):
    """The leaf that was cached first; hits change nothing.

    A page keeps its place while it is referenced. One that cannot go when its turn comes is taken out
    and put at the head again as soon as it can: each page is passed over at most once per time it is
    put in, so a victim costs O(1) on average.
    """

    is_by_use_alone = False

    def __init__(self, num_pages: int) -> None:
        self._lists = PageLists(num_pages)
        self._can_go = bytearray(num_pages)
        self._passed_over = bytearray(num_pages)

    def add(self, page: int, hits: int, depth: int, is_leaf: bool) -> None:
        """See EvictionPolicy."""
        self._can_go[page] = is_leaf
        if self._passed_over[page]:
            if is_leaf:
                self._return(page)
        elif page not in self._lists:
            self._lists.append(page)

    def add_all(self, pages: Sequence[int]) -> None:
        """Never called: it asks for more than use."""
        raise AssertionError(f"{len(pages)} pages added without their hits and depths")

    def hold(self, page: int) -> None:
        """See EvictionPolicy."""
        self._can_go[page] = 0

    def becomes_leaf(self, page: int, hits: int, depth: int) -> None:
        """See EvictionPolicy."""
        self._can_go[page] = 1
        if self._passed_over[page]:
            self._return(page)

    def _return(self, page: int) -> None:
        self._passed_over[page] = 0
        self._lists.prepend(page)

    def forget(self, page: int) -> None:
        """See EvictionPolicy."""
        self._lists.remove(page)  # a leaf that nobody refers to was not passed over, or is back

    def forget_held(self, page: int) -> None:
        """See EvictionPolicy: its place, or that it was passed over, is of what was in it."""
        self._passed_over[page] = 0
        if page in self._lists:
            self._lists.remove(page)

    def pop(self) -> int | None:
        """See EvictionPolicy."""
        while (page := self._lists.pop()) is not None and not self._can_go[page]:
            self._passed_over[page] = 1
        return page


class CostAware(EvictionPolicy):
    """The leaf whose loss costs least: log2 of its depth times its uses, aged (GreedyDual).

    Computing a page again costs attention over everything before it, so deep pages and pages with hits
    are kept longer. The class of what was evicted last is added to what comes later: a page that is
    never used again sinks to the front, however dear it was.
    """

    _NUM_LISTS = 64  # more than the spread of classes (33 + 16), so that the wheel never laps itself

    is_by_use_alone = False

    def __init__(self, num_pages: int) -> None:
        self._buckets = _Buckets(num_pages, self._NUM_LISTS)
        self._clock = 0

    def add(self, page: int, hits: int, depth: int, is_leaf: bool) -> None:
        """See EvictionPolicy."""
        if is_leaf:
            self.becomes_leaf(page, hits, depth)

    def becomes_leaf(self, page: int, hits: int, depth: int) -> None:
        """See EvictionPolicy."""
        worth = depth.bit_length() + (1 + hits).bit_length() - 1
        self._buckets.append(page, (self._clock + min(worth, 48)) % self._NUM_LISTS)

    def add_all(self, pages: Sequence[int]) -> None:
        """Never called: it asks for more than use."""
        raise AssertionError(f"{len(pages)} pages added without their hits and depths")

    def hold(self, page: int) -> None:
        """See EvictionPolicy."""
        if page in self._buckets:
            self._buckets.remove(page)

    forget = hold

    def pop(self) -> int | None:
        """See EvictionPolicy."""
        which = self._buckets.first_list(self._clock)
        if which is None:
            return None
        self._clock = which
        return self._buckets.pop(which)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "cost": CostAware,
}
"""Policies by the name that the configuration uses."""
