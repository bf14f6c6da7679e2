"""The prefix index: whole pages found by (parent page, real token ids), the salt standing above the root.

Owns keys, children and the memory of evicted prefixes. Knows nothing of references or free pages: the
page cache decides what may enter and what must leave.

Equality is that of token ids; no hash is trusted. A node is one whole page, so nothing is ever split.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from worker.pages.evicted_prefixes import EvictedPrefixes
from worker.pages.fingerprint import Fingerprinter
from worker.pages.violation import Violation

TOKEN_BYTES = 4
Key = tuple[int | bytes, bytes]
"""(parent page, or the salt above a first page; the page's token ids as u32)."""


class MissCounts(NamedTuple):
    """Whole pages that a look-up did not find, by cause."""

    num_cold: int
    num_evicted: int


class PrefixIndex(Protocol):
    """Which page holds which prefix. Two strategies: PrefixTrie, and NoSharing that never finds anything."""

    version: int  # another one with each page that enters or leaves: what ``match`` found holds until then

    def match(self, tokens: "array[int]", salt: bytes, max_pages: int) -> list[int]:
        """Pages of the longest known prefix of ``tokens``, at most ``max_pages``; touches nothing."""
        ...

    def classify(self, tokens: "array[int]", salt: bytes, matched: list[int], max_pages: int) -> MissCounts:
        """Why the whole pages after ``matched``, up to ``max_pages``, were not found."""
        ...

    def insert(self, page: int, parent: int | None, salt: bytes, token_bytes: bytes) -> int:
        """The page that holds this prefix from now on: ``page``, or the one that held it before."""
        ...

    def insert_run(self, pages: Sequence[int], parent: int | None, salt: bytes, raw: bytes) -> list[int]:
        """``insert`` of consecutive pages, up to the first that is held by another; their fingerprints.

        ``raw``: the tokens of all ``pages``.
        """
        ...

    def insert_each(
        self, pages: Sequence[int], aboves: Sequence[int | bytes], raws: Sequence[bytes]
    ) -> list[int]:
        """``insert`` of pages of as many sequences, up to the first that is held by another.

        ``aboves``: the parent of each, or the salt above a first page. Returns their fingerprints.
        """
        ...

    def remove(self, page: int, remember: bool) -> int | None:
        """Takes a leaf out; returns its parent if that is a leaf now. ``remember``: as evicted."""
        ...

    def evict(self, pages: Sequence[int]) -> None:
        """``remove`` of each in this order, remembered; nobody asks for new leaves."""
        ...

    def fingerprint(self, page: int) -> int:
        """Fingerprint of a page of the index."""
        ...

    def has_children(self, page: int) -> bool:
        """Whether longer prefixes hang on ``page``."""
        ...

    def depth(self, page: int) -> int:
        """Pages from the root to ``page``, itself included."""
        ...

    def salt(self, page: int) -> bytes:
        """Salt of the tree that ``page`` stands in."""
        ...

    def pages(self) -> list[int]:
        """All pages of the index, children before parents."""
        ...

    def key(self, page: int) -> Key | None:
        """Its key; None: not in the index."""
        ...

    def keys(self, window: range) -> Sequence[Key | None]:
        """``key`` of each page in ``window``."""
        ...

    def check(self, window: range | None = None) -> list[Violation]:
        """Invariants of the index alone, for the pages in ``window``; None: for all, and its totals."""
        ...


class PrefixTrie:
    """A tree of whole pages for each salt."""

    def __init__(
        self, num_pages: int, page_size: int, fingerprints: Fingerprinter, num_remembered: int
    ) -> None:
        self.version = 0
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._fingerprinter = fingerprints
        self._pages: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_pages
        self._num_children = array("I", bytes(4 * num_pages))
        self._depths = array("I", bytes(4 * num_pages))
        self._prints = array("Q", bytes(8 * num_pages))
        self._evicted = EvictedPrefixes(num_remembered)

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, tokens: "array[int]", salt: bytes, max_pages: int) -> list[int]:
        """See PrefixIndex."""
        found: list[int] = []
        find, size = self._pages.get, self._page_bytes
        above: int | bytes = salt
        raw = tokens[: max_pages * self._page_size].tobytes()
        for at in range(0, len(raw) - size + 1, size):
            page = find((above, raw[at : at + size]))
            if page is None:
                break
            found.append(page)
            above = page
        return found

    def classify(self, tokens: "array[int]", salt: bytes, matched: list[int], max_pages: int) -> MissCounts:
        """See PrefixIndex.

        Leaves go first, so whatever hangs below a page that nobody remembers was forgotten before it:
        the first cold page ends the search, and a new prompt costs one fingerprint.
        """
        num_missing = max_pages - len(matched)
        if num_missing <= 0 or not len(self._evicted):
            return MissCounts(max(num_missing, 0), 0)
        above = self._print_of(matched[-1] if matched else salt)
        num_evicted, size = 0, self._page_size
        for at in range(len(matched) * size, min(max_pages * size, len(tokens) - size + 1), size):
            mark = self._fingerprinter.of_page(above, tokens[at : at + size].tobytes())
            if mark not in self._evicted:
                break
            num_evicted += 1
            above = mark.to_bytes(8, "little")
        return MissCounts(num_missing - num_evicted, num_evicted)

    def _print_of(self, above: int | bytes) -> bytes:
        """What stands for the page above, or for the salt."""
        if isinstance(above, bytes):
            return self._fingerprinter.of_salt(above)
        return self._prints[above].to_bytes(8, "little")

    def insert(self, page: int, parent: int | None, salt: bytes, token_bytes: bytes) -> int:
        """See PrefixIndex."""
        key: Key = (salt if parent is None else parent, token_bytes)
        known = self._pages.get(key)
        if known is not None:
            return known
        assert self._keys[page] is None, f"page {page} would stand in two nodes: {self._keys[page]}, {key}"
        assert len(token_bytes) == self._page_bytes, f"page {page} is not full: {len(token_bytes)} bytes"
        self.version += 1
        self._pages[key] = page
        self._keys[page] = key
        mark = self._fingerprinter.of_page(self._print_of(key[0]), token_bytes)
        self._prints[page] = mark
        if parent is None:
            self._depths[page] = 1
        else:
            self._num_children[parent] += 1
            self._depths[page] = self._depths[parent] + 1
        self._evicted.discard_all((mark,))
        return page

    def insert_run(self, pages: Sequence[int], parent: int | None, salt: bytes, raw: bytes) -> list[int]:
        """See PrefixIndex."""
        known, keys, prints, depths = self._pages, self._keys, self._prints, self._depths
        children, size, of_page = self._num_children, self._page_bytes, self._fingerprinter.of_page
        assert len(raw) == len(pages) * size, f"{len(pages)} pages are not full: {len(raw)} bytes"
        above: int | bytes = salt if parent is None else parent
        mark_above = self._print_of(above)
        depth = 0 if parent is None else depths[parent]
        self.version += 1
        marks: list[int] = []
        for at, page in enumerate(pages):
            token_bytes = raw[at * size : (at + 1) * size]
            key: Key = (above, token_bytes)
            if key in known:
                break
            assert keys[page] is None, f"page {page} would stand in two nodes: {keys[page]}, {key}"
            known[key], keys[page] = page, key
            prints[page] = mark = of_page(mark_above, token_bytes)
            depth += 1
            depths[page] = depth
            if parent is not None:
                children[parent] += 1
            marks.append(mark)
            mark_above = mark.to_bytes(8, "little")
            above = parent = page
        self._evicted.discard_all(marks)
        return marks

    def insert_each(
        self, pages: Sequence[int], aboves: Sequence[int | bytes], raws: Sequence[bytes]
    ) -> list[int]:
        """See PrefixIndex."""
        known, keys, prints, depths = self._pages, self._keys, self._prints, self._depths
        children, size, of_page = self._num_children, self._page_bytes, self._fingerprinter.of_page
        self.version += 1
        marks: list[int] = []
        for page, above, raw in zip(pages, aboves, raws, strict=True):
            key: Key = (above, raw)
            if key in known:
                break
            assert keys[page] is None, f"page {page} would stand in two nodes: {keys[page]}, {key}"
            assert len(raw) == size, f"page {page} is not full: {len(raw)} bytes"
            known[key], keys[page] = page, key
            if isinstance(above, bytes):
                mark_above = self._fingerprinter.of_salt(above)
                depths[page] = 1
            else:
                mark_above = prints[above].to_bytes(8, "little")
                depths[page] = depths[above] + 1
                children[above] += 1
            prints[page] = mark = of_page(mark_above, raw)
            marks.append(mark)
        self._evicted.discard_all(marks)
        return marks

    def evict(self, pages: Sequence[int]) -> None:
        """See PrefixIndex."""
        known, keys, prints, depths = self._pages, self._keys, self._prints, self._depths
        children, marks = self._num_children, list[int]()
        self.version += 1
        for page in pages:
            key = keys[page]
            assert key is not None, f"page {page} is not in the index"
            assert not children[page], f"page {page} has {children[page]} children"
            del known[key]
            keys[page] = None
            marks.append(prints[page])
            prints[page] = depths[page] = 0
            above = key[0]
            if not isinstance(above, bytes):
                children[above] -= 1
        self._evicted.add_all(marks)

    def remove(self, page: int, remember: bool) -> int | None:
        """See PrefixIndex."""
        key = self._keys[page]
        assert key is not None, f"page {page} is not in the index"
        assert not self._num_children[page], f"page {page} has {self._num_children[page]} children"
        self.version += 1
        del self._pages[key]
        self._keys[page] = None
        if remember:
            self._evicted.add(self._prints[page])
        self._prints[page] = self._depths[page] = 0
        parent = key[0]
        if isinstance(parent, bytes):
            return None
        self._num_children[parent] -= 1
        return parent if not self._num_children[parent] else None

    def fingerprint(self, page: int) -> int:
        """See PrefixIndex."""
        return self._prints[page]

    def has_children(self, page: int) -> bool:
        """See PrefixIndex."""
        return self._num_children[page] > 0

    def depth(self, page: int) -> int:
        """See PrefixIndex."""
        return self._depths[page]

    def salt(self, page: int) -> bytes:
        """See PrefixIndex."""
        key = self._keys[page]
        while key is not None:
            above = key[0]
            if isinstance(above, bytes):
                return above
            key = self._keys[above]
        raise AssertionError(f"page {page} is not in the index")

    def pages(self) -> list[int]:
        """See PrefixIndex."""
        return sorted(self._pages.values(), key=self._depths.__getitem__, reverse=True)

    def key(self, page: int) -> Key | None:
        """See PrefixIndex."""
        return self._keys[page]

    def keys(self, window: range) -> Sequence[Key | None]:
        """See PrefixIndex."""
        return self._keys[window.start : window.stop]

    def check(self, window: range | None = None) -> list[Violation]:
        """See PrefixIndex."""
        found = []
        keys, pages = self._keys, self._pages
        for page in range(len(keys)) if window is None else window:
            key = keys[page]
            if key is None:
                if self._num_children[page]:
                    subject = f"page {page}, which has children"
                    found.append(Violation("trie", subject, "in the index", "not", page))
            elif pages.get(key) != page:
                found.append(Violation("trie", f"page under the key of {page}", page, pages.get(key), page))
        return found + (self._check_counts() if window is None else [])

    def _check_counts(self) -> list[Violation]:
        found = []
        children = array("I", bytes(4 * len(self._keys)))
        for key in self._keys:
            if key is not None and not isinstance(key[0], bytes):
                children[key[0]] += 1
        num_keys = sum([key is not None for key in self._keys])
        if num_keys != len(self._pages):
            found.append(Violation("trie", "nodes and pages that stand in one", len(self._pages), num_keys))
        for page, count in enumerate(children):
            if count != self._num_children[page]:
                subject = f"children of page {page}"
                found.append(Violation("trie", subject, count, self._num_children[page], page))
        return found
