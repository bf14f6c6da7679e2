"""The naive strategy: no prefix is ever found. Same interface as the trie, so that both can be compared."""

from array import array
from collections.abc import Sequence

from worker.pages.prefix_trie import Key, MissCounts
from worker.pages.violation import Violation


class NoSharing:
    """The strategy without a cache: nothing is found, nothing is kept. Same interface as PrefixTrie."""

    version = 0

    def match(self, tokens: "array[int]", salt: bytes, max_pages: int) -> list[int]:
        """Nothing."""
        return []

    def classify(self, tokens: "array[int]", salt: bytes, matched: list[int], max_pages: int) -> MissCounts:
        """All cold."""
        return MissCounts(max_pages, 0)

    def insert(self, page: int, parent: int | None, salt: bytes, token_bytes: bytes) -> int:
        """Never called: the page cache does not seal without an index."""
        raise AssertionError(f"page {page} sealed without a prefix index")

    def insert_run(self, pages: Sequence[int], parent: int | None, salt: bytes, raw: bytes) -> list[int]:
        """Never called, as insert."""
        raise AssertionError(f"pages {pages} sealed without a prefix index")

    def insert_each(
        self, pages: Sequence[int], aboves: Sequence[int | bytes], raws: Sequence[bytes]
    ) -> list[int]:
        """Never called, as insert."""
        raise AssertionError(f"pages {pages} sealed without a prefix index")

    def evict(self, pages: Sequence[int]) -> None:
        """Never called: nothing is in it."""
        raise AssertionError(f"pages {pages} are not in the index")

    def remove(self, page: int, remember: bool) -> int | None:
        """Never called: nothing is in it."""
        raise AssertionError(f"page {page} is not in the index")

    def fingerprint(self, page: int) -> int:
        """None is known."""
        return 0

    def has_children(self, page: int) -> bool:
        """Never."""
        return False

    def depth(self, page: int) -> int:
        """Nowhere."""
        return 0

    def salt(self, page: int) -> bytes:
        """Never called."""
        raise AssertionError(f"page {page} is not in the index")

    def pages(self) -> list[int]:
        """None."""
        return []

    def key(self, page: int) -> Key | None:
        """None."""
        return None

    def keys(self, window: range) -> Sequence[Key | None]:
        """None of them."""
        return [None] * len(window)

    def check(self, window: range | None = None) -> list[Violation]:
        """Holds."""
        return []
