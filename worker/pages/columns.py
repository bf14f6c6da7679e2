"""The columns of the page pool: what is known of every page, as arrays with an entry per page.

Owns the arrays (about 60 bytes a page) and answers questions about them; changes nothing. Each question costs
O(pages it is given), whatever the size of the pool, where nothing else is said.
"""

import sys
from array import array
from collections.abc import MutableSequence, Sequence
from itertools import compress

from worker.ids import NO_PAGE
from worker.pages.events import PageFlag, PageState
from worker.pages.snapshot import Planes

SEALED, PINNED = int(PageFlag.SEALED), int(PageFlag.PINNED)
FREE, ACTIVE, CACHED, HELD, RESERVED = (int(state) for state in PageState)  # HELD: PageState.PINNED


class PageColumns:
    """``num_pages`` pages for sequences and one dummy page, index ``num_pages``, never handed out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens is not possible")
        if (num_pages + 1) * page_size > 2**31 - 1:
            raise ValueError(f"{num_pages} pages of {page_size} tokens: slots do not fit 32 bits")
        self.num_pages = num_pages
        self.page_size = page_size
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
        self._num_shared = 0  # with two or more references
        self._num_flagged_pinned = 0  # pages with that flag, whatever their state

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
