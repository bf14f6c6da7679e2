"""A prefix index for token ids that are marks: no two prefixes end in the same one.

What-if makes its ids so (trace/workload.py). The last id of a page then stands for all that comes before
it, and is the whole key: no tokens are compared, no fingerprints computed. For such ids it answers as the
trie does; tests hold the two side by side.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import count
from typing import cast

from worker.pages.prefix_trie import TOKEN_BYTES, Key, MissCounts
from worker.pages.violation import Violation

NO_MARK = -1


class MarkedPrefixes:
    """See PrefixIndex. Salts are not looked at: what stands under another salt has another mark."""

    def __init__(self, num_pages: int, page_size: int, num_remembered: int) -> None:
        self.version = 0
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = num_pages  # stands behind the pages: the parent of first pages, at depth 0
        self._pages: dict[int, int] = {}  # by mark
        # By page. Lists: read and written in half the time of an array.
        self._marks = [NO_MARK] * num_pages
        self._parents = [0] * num_pages
        self._num_children = [0] * (num_pages + 1)
        self._depths = [0] * (num_pages + 1)
        # By mark: how many evictions had been when it was evicted last. Only the latest count.
        self._evictions: dict[int, int] = {}
        self._num_evictions = 0
        self._num_remembered = num_remembered

    def match(self, tokens: "array[int]", salt: bytes, max_pages: int) -> list[int]:
        """See PrefixIndex. Of a known prefix all parts are known: the first gap is the end."""
        size = self._page_size
        found = list(map(self._pages.get, tokens[size - 1 : max_pages * size : size]))
        if None in found:
            del found[found.index(None) :]
        return cast("list[int]", found)

    def classify(self, tokens: "array[int]", salt: bytes, matched: list[int], max_pages: int) -> MissCounts:
        """See PrefixIndex."""
        size, evictions = self._page_size, self._evictions
        forgotten, num_evicted = self._num_evictions - self._num_remembered, 0
        for mark in tokens[(len(matched) + 1) * size - 1 : max_pages * size : size]:
            if evictions.get(mark, NO_MARK) < max(forgotten, 0):
                break
            num_evicted += 1
        return MissCounts(max(0, max_pages - len(matched)) - num_evicted, num_evicted)

    def insert(self, page: int, parent: int | None, salt: bytes, token_bytes: bytes) -> int:
        """See PrefixIndex."""
        self.insert_run((page,), parent, salt, token_bytes)
        return self._pages[_last_of(token_bytes)]

    def insert_run(self, pages: Sequence[int], parent: int | None, salt: bytes, raw: bytes) -> list[int]:
        """See PrefixIndex."""
        assert len(raw) == len(pages) * self._page_bytes, f"{len(pages)} pages are not full: {len(raw)} bytes"
        marks = memoryview(raw).cast("I")[self._page_size - 1 :: self._page_size].tolist()
        return self._enter(pages, [self._root if parent is None else parent, *pages], marks)

    def insert_each(
        self, pages: Sequence[int], aboves: Sequence[int | bytes], raws: Sequence[bytes]
    ) -> list[int]:
        """See PrefixIndex."""
        root = self._root
        parents = [root if isinstance(above, bytes) else above for above in aboves]
        return self._enter(pages, parents, list(map(_last_of, raws)))

    def _enter(self, pages: Sequence[int], parents: Sequence[int], marks: list[int]) -> list[int]:
        """Enters pages up to the first whose mark is known; returns the marks of those."""
        known, own, above = self._pages, self._marks, self._parents
        children, depths = self._num_children, self._depths
        self.version += 1
        for at, (page, parent, mark) in enumerate(zip(pages, parents, marks, strict=False)):
            if mark in known:
                return marks[:at]
            assert own[page] == NO_MARK, f"page {page} would stand in two nodes: {own[page]}, {mark}"
            known[mark] = page
            own[page] = mark
            above[page] = parent
            children[parent] += 1
            depths[page] = depths[parent] + 1
        return marks

    def remove(self, page: int, remember: bool) -> int | None:
        """See PrefixIndex."""
        parent = self._parents[page]
        if remember:
            self.evict((page,))
        else:
            self._evictions.pop(self._marks[page], None)
            self._take_out((page,))
        return parent if parent != self._root and not self._num_children[parent] else None

    def evict(self, pages: Sequence[int]) -> None:
        """See PrefixIndex."""
        marks, done = self._take_out(pages), self._num_evictions
        self._evictions.update(zip(marks, count(done), strict=False))
        self._num_evictions = done + len(marks)
        if len(self._evictions) > 2 * self._num_remembered + len(pages):
            forgotten = self._num_evictions - self._num_remembered
            self._evictions = {mark: at for mark, at in self._evictions.items() if at >= forgotten}

    def _take_out(self, pages: Sequence[int]) -> list[int]:
        """Leaves; returns their marks."""
        known, own, above, children = self._pages, self._marks, self._parents, self._num_children
        self.version += 1
        marks: list[int] = []
        for page in pages:
            mark = own[page]
            assert mark != NO_MARK, f"page {page} is not in the index"
            assert not children[page], f"page {page} has {children[page]} children"
            del known[mark]
            own[page] = NO_MARK
            children[above[page]] -= 1
            marks.append(mark)
        return marks

    def fingerprint(self, page: int) -> int:
        """See PrefixIndex: its mark."""
        return self._marks[page]

    def has_children(self, page: int) -> bool:
        """See PrefixIndex."""
        return self._num_children[page] > 0

    def depth(self, page: int) -> int:
        """See PrefixIndex; of a page that left, what it was."""
        return self._depths[page]

    def salt(self, page: int) -> bytes:
        """See PrefixIndex: not known."""
        return b""

    def pages(self) -> list[int]:
        """See PrefixIndex."""
        return sorted(self._pages.values(), key=self._depths.__getitem__, reverse=True)

    def key(self, page: int) -> Key | None:
        """See PrefixIndex; the mark stands for the page's tokens."""
        mark, parent = self._marks[page], self._parents[page]
        if mark == NO_MARK:
            return None
        return (b"" if parent == self._root else parent, mark.to_bytes(TOKEN_BYTES, sys.byteorder))

    def keys(self, window: range) -> Sequence[Key | None]:
        """See PrefixIndex."""
        return [self.key(page) for page in window]

    def check(self, window: range | None = None) -> list[Violation]:
        """See PrefixIndex; always all of it: nobody waits for a simulation's audit."""
        found = []
        children = [0] * (self._root + 1)
        for page, mark in enumerate(self._marks):
            if mark != NO_MARK:
                children[self._parents[page]] += 1
                if self._pages.get(mark) != page:
                    subject = f"page under the mark of {page}"
                    found.append(Violation("trie", subject, page, self._pages.get(mark), page))
        if sum(children) != len(self._pages):
            subject = "nodes and pages that stand in one"
            found.append(Violation("trie", subject, len(self._pages), sum(children)))
        for page, number in enumerate(children):
            if number != self._num_children[page]:
                subject = f"children of page {page}"
                found.append(Violation("trie", subject, number, self._num_children[page], page))
        return found


def _last_of(raw: bytes) -> int:
    return int.from_bytes(raw[-TOKEN_BYTES:], sys.byteorder)
