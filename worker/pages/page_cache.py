"""Pool, prefix index, eviction order and pins as one thing: what the scheduler takes pages from.

Owns the rules between the four: what is found is referenced before anything is evicted, pages are
evicted one at a time and only when the free list is short, a sealed page that nobody holds is cached.
Knows token ids only as keys. What-if runs the same code.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.pages.columns import PINNED, SEALED
from worker.pages.events import EventRing
from worker.pages.eviction import POLICIES
from worker.pages.fingerprint import Fingerprinter
from worker.pages.marked_prefixes import MarkedPrefixes
from worker.pages.no_sharing import NoSharing
from worker.pages.pool import PagePool
from worker.pages.prefix_trie import PrefixIndex, PrefixTrie
from worker.pages.unwatched_pool import UnwatchedPool
from worker.pages.violation import Violation


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size and strategy of the cache."""

    num_pages: int  # without the dummy page
    page_size: int
    eviction_policy: str = "lru"  # a name of eviction.POLICIES
    sharing: bool = True  # False: the naive strategy, no prefix is ever found
    fingerprint_key: bytes = b""
    event_capacity: int = 65_536  # 0: for what-if. Nobody watches, and token ids are marks of prefixes
    max_remembered: int = 262_144  # evicted pages whose loss can still be told from a cold miss

    def __post_init__(self) -> None:
        if self.eviction_policy not in POLICIES:
            raise ValueError(f"eviction policy {self.eviction_policy!r} is none of {', '.join(POLICIES)}")

    @property
    def is_watched(self) -> bool:
        """Whether page events are kept."""
        return self.event_capacity > 0


class Lookup(NamedTuple):
    """What the cache has of a prompt. Changes nothing; valid until the next change of the cache."""

    pages: list[int]
    num_unreferenced: int  # of them; taking them makes as many fewer available


@dataclass(frozen=True, slots=True)
class FlushOutcome:
    """What a flush did."""

    num_freed: int
    num_unindexed: int  # pages in use that were taken out of the index


class PageCache:
    """All pages of one worker."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.pool = _pool(config)
        self.events = self.pool.events
        self._policy = POLICIES[config.eviction_policy](config.num_pages)
        self._index = _index(config)
        self._pin_counts: dict[int, int] = {}
        self.num_capacity_evictions = 0
        self.num_flush_evictions = 0

    def set_clock(self, step: int, time_us: int) -> None:
        """Stamps what happens from now on."""
        self.events.step = step
        self.events.time_us = time_us
        self.pool.now_ms = (time_us // 1000) & 0xFFFFFFFF
        self.pool.sharing.now = time_us / 1e6

    @property
    def index(self) -> PrefixIndex:
        """Which page holds which prefix."""
        return self._index

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free ones, and cached ones after eviction."""
        return self.pool.num_free + self.pool.num_cached

    @property
    def num_pinned_pages(self) -> int:
        """Pages of pinned prefixes, referenced or not."""
        return len(self._pin_counts)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.config.page_size)

    # Sequences.
    def lookup(self, tokens: "array[int]", salt: bytes, max_pages: int) -> Lookup:
        """The longest cached prefix, in whole pages; takes nothing and refreshes nothing."""
        pages = self._index.match(tokens, salt, max_pages)
        return Lookup(pages, self.pool.unreferenced(pages) if pages else 0)

    def acquire(self, pages: Sequence[int], owner: int, is_hit: bool) -> None:
        """One reference to each page; ``is_hit``: because a look-up found them. Recency is refreshed (H4)."""
        self._policy.hold_all(self.pool.share(pages, owner, is_hit))

    def allocate(self, owners: "array[int]") -> list[int] | None:
        """A page for each entry of ``owners``, evicting what is needed; None, nothing changed, if too few.

        Evictions are charged to the owners that come last.
        """
        pool = self.pool
        num_short = len(owners) - pool.num_free
        if num_short > 0:
            if num_short > pool.num_cached:
                return None
            self._evict(num_short, owners[len(owners) - num_short :])
        return pool.allocate(owners)

    def evict(self, num_pages: int, owner: int = 0) -> None:
        """Frees so many cached pages; asking for more than there are is an error (M-17)."""
        if num_pages > self.pool.num_cached:
            raise ValueError(f"{num_pages} pages to evict, only {self.pool.num_cached} can be")
        self._evict(num_pages, array("H", (owner,)) * num_pages)

    def _evict(self, num_pages: int, owners: "array[int]") -> None:
        if self._policy.is_by_use_alone:
            victims = self._policy.pop_all(num_pages)
            if victims:
                self._index.evict(victims)
        else:
            victims = [self._evict_one() for _ in range(num_pages)]
        assert len(victims) == num_pages, f"{num_pages} evictions, {len(victims)} pages were cached"
        self.pool.unseal(victims, owners)
        self.num_capacity_evictions += num_pages

    def _evict_one(self) -> int:
        """The policy hears of a new leaf before it names the next page."""
        page = self._policy.pop()
        assert page is not None, f"no page to evict, {self.pool.num_cached} are cached"
        self._unindex(page, remember=True)
        return page

    def _unindex(self, page: int, remember: bool) -> None:
        parent = self._index.remove(page, remember)
        if parent is not None and not self.pool.references(parent) and not self.pool.is_pinned(parent):
            self._policy.becomes_leaf(parent, self.pool.hits(parent), self._index.depth(parent))

    def release(self, pages: Sequence[int], owner: int) -> None:
        """One reference less on each page of a sequence, given in token order."""
        self._order(self.pool.release(pages, owner))

    def _order(self, pages: Sequence[int]) -> None:
        if self._policy.is_by_use_alone:
            self._policy.add_all(pages)
            return
        add, index, hits = self._policy.add, self._index, self.pool.hits
        for page in pages:
            add(page, hits(page), index.depth(page), not index.has_children(page))

    def seal(self, page: int, parent: int | None, salt: bytes, token_bytes: bytes, owner: int) -> int:
        """Enters a full, computed and committed page; returns the page that holds this prefix.

        If that is another one (two equal prompts in flight), the caller points its table there, takes
        a reference to it, and only then releases the duplicate (H1).
        """
        canonical = self._index.insert(page, parent, salt, token_bytes)
        if canonical == page:
            self.pool.seal(page, parent, self._index.fingerprint(page), owner, token_bytes)
        return canonical

    def seal_run(self, pages: Sequence[int], parent: int | None, salt: bytes, raw: bytes, owner: int) -> int:
        """``seal`` of consecutive pages with these tokens, up to the first that is held already; how many."""
        marks = self._index.insert_run(pages, parent, salt, raw)
        if marks:
            self.pool.seal_run(pages[: len(marks)], parent, marks, owner, raw)
        return len(marks)

    def seal_each(
        self,
        pages: Sequence[int],
        aboves: Sequence[int | bytes],
        owners: Sequence[int],
        raws: Sequence[bytes],
    ) -> int:
        """``seal`` of pages of as many sequences, up to the first that is held already; how many."""
        marks = self._index.insert_each(pages, aboves, raws)
        if marks:
            self.pool.seal_each(pages[: len(marks)], aboves, marks, owners, raws)
        return len(marks)

    # Operators.
    def flush(
        self, matches: Callable[[bytes], bool] | None = None, include_active: bool = False
    ) -> FlushOutcome:
        """Empties the index, or the trees whose salt ``matches``; pinned pages stay.

        Pages in use stay with their sequences; with ``include_active`` they leave the index, too.
        """
        pool, index = self.pool, self._index
        num_freed = num_unindexed = 0
        for page in index.pages():  # children first
            in_use = pool.references(page) > 0
            if (in_use and not include_active) or pool.is_pinned(page) or index.has_children(page):
                continue
            if matches is not None and not matches(index.salt(page)):
                continue
            (self._policy.forget_held if in_use else self._policy.forget)(page)
            self._unindex(page, remember=False)
            pool.unseal((page,), (0,))
            num_freed += not in_use
            num_unindexed += in_use
        self.num_flush_evictions += num_freed + num_unindexed
        return FlushOutcome(num_freed, num_unindexed)

    def pin(self, pages: Sequence[int]) -> None:
        """Keeps pages of one prefix; each call needs its own unpin."""
        for page in pages:
            count = self._pin_counts.get(page, 0)
            if not count and self.pool.pin(page):
                self._policy.hold(page)
            self._pin_counts[page] = count + 1

    def unpin(self, pages: Sequence[int]) -> None:
        """Ends one pin of these pages."""
        released = []
        for page in reversed(pages):
            self._pin_counts[page] -= 1
            if not self._pin_counts[page]:
                del self._pin_counts[page]
                if self.pool.unpin(page):
                    released.append(page)
        self._order(released)

    def num_newly_pinned(self, pages: Sequence[int]) -> int:
        """Pages among these that no pin keeps yet."""
        return sum(page not in self._pin_counts for page in pages)

    def num_pinned_once(self, pages: Iterable[int]) -> int:
        """Pages among these that one pin keeps and no other."""
        return sum(self._pin_counts[page] == 1 for page in pages)

    def check(self, window: range | None = None) -> list[Violation]:
        """Invariants of pool and index, and between them, for the pages in ``window``; None: for all."""
        pool, index = self.pool, self._index
        found = pool.check(window) + index.check(window)
        pages = range(self.config.num_pages) if window is None else window
        references, pins = pool.references, self._pin_counts
        for page, key, flags in zip(pages, index.keys(pages), pool.flags(pages), strict=True):
            if (key is not None) != bool(flags & SEALED):
                subject = f"page {page} in the index"
                found.append(Violation("trie", subject, bool(flags & SEALED), key is not None, page))
            if key is not None and not isinstance(key[0], bytes):
                above, here = references(key[0]), references(page)
                if above < here:  # eviction.py relies on it
                    subject = f"references of page {key[0]}, parent of {page}, at least"
                    found.append(Violation("refcount", subject, here, above, page))
            if bool(flags & PINNED) != (page in pins):
                pinned = page in pins
                found.append(Violation("trie", f"pin of page {page}", pinned, not pinned, page))
        return found


def _pool(config: CacheConfig) -> PagePool:
    if config.is_watched:
        return PagePool(config.num_pages, config.page_size, EventRing(config.event_capacity))
    return UnwatchedPool(config.num_pages, config.page_size)


def _index(config: CacheConfig) -> PrefixIndex:
    remembered = min(8 * config.num_pages, config.max_remembered)
    if not config.sharing:
        return NoSharing()
    if config.is_watched:
        marks = Fingerprinter(config.fingerprint_key)
        return PrefixTrie(config.num_pages, config.page_size, marks, remembered)
    return MarkedPrefixes(config.num_pages, config.page_size, remembered)
