"""What-if's pool and index answer as the worker's do: both side by side under any order of operations."""

from array import array
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

from hypothesis import settings
from hypothesis.stateful import rule

from tests.property.test_page_pool_machine import NUM_PAGES, SIZE, PagePoolMachine
from worker.pages.marked_prefixes import MarkedPrefixes
from worker.pages.page_cache import CacheConfig, FlushOutcome, Lookup, PageCache
from worker.pages.unwatched_pool import UnwatchedPool
from worker.pages.violation import Violation

T = TypeVar("T")
ROOT = -1
REMEMBERED = 2  # evicted pages: few, so that some are forgotten


class TwinCache:
    """A worker's cache, and beside it one of what-if, whose token ids are marks. Differences raise."""

    def __init__(self, policy: str) -> None:
        self.config = CacheConfig(NUM_PAGES, SIZE, policy, event_capacity=1024, max_remembered=REMEMBERED)
        self.worker = PageCache(self.config)
        self.what_if = PageCache(
            CacheConfig(NUM_PAGES, SIZE, policy, event_capacity=0, max_remembered=REMEMBERED)
        )
        assert isinstance(self.what_if.pool, UnwatchedPool)
        assert isinstance(self.what_if.index, MarkedPrefixes)
        self.pool, self.events = self.worker.pool, self.worker.events
        self._numbers = count()
        self._marks: dict[tuple[int, bytes], int] = {}  # by mark above and tokens of the page
        self._mark_of: dict[int, int] = {}  # by page, as of its last seal

    def _mark(self, above: int, raw: bytes) -> int:
        return self._marks.setdefault((above, raw), next(self._numbers))

    def _marked(self, above: int, raw: bytes) -> "array[int]":
        """Ids of whole pages, made so that the last of each is its mark and no other is one."""
        found, size = array("I"), 4 * SIZE
        for at in range(0, len(raw) // size * size, size):
            above = self._mark(above, raw[at : at + size])
            found.extend([next(self._numbers) for _ in range(SIZE - 1)])
            found.append(above)
        return found

    def _above(self, parent: int | None) -> int:
        return ROOT if parent is None else self._mark_of[parent]

    def _both(self, do: Callable[[PageCache], T]) -> T:
        found, other = do(self.worker), do(self.what_if)
        assert found == other
        return found

    def lookup(self, tokens: "array[int]", salt: bytes, most: int) -> Lookup:
        """And why the rest is missing."""
        marked = self._marked(ROOT, tokens.tobytes())
        found = self.worker.lookup(tokens, salt, most)
        assert found == self.what_if.lookup(marked, salt, most)
        whole = min(most, len(tokens) // SIZE)
        missed = self.worker.index.classify(tokens, salt, found.pages, whole)
        assert missed == self.what_if.index.classify(marked, salt, found.pages, whole)
        return found

    def seal(self, page: int, parent: int | None, salt: bytes, raw: bytes, owner: int) -> int:
        """One page."""
        marked = self._marked(self._above(parent), raw)
        found = self.worker.seal(page, parent, salt, raw, owner)
        assert found == self.what_if.seal(page, parent, salt, marked.tobytes(), owner)
        self._mark_of[found] = marked[-1]
        return found

    def seal_run(self, pages: Sequence[int], parent: int | None, salt: bytes, raw: bytes, owner: int) -> int:
        """Consecutive pages."""
        marked = self._marked(self._above(parent), raw)
        found = self.worker.seal_run(pages, parent, salt, raw, owner)
        assert found == self.what_if.seal_run(pages, parent, salt, marked.tobytes(), owner)
        self._mark_of.update(zip(pages[:found], marked[SIZE - 1 :: SIZE], strict=False))
        return found

    def seal_each(
        self,
        pages: Sequence[int],
        aboves: Sequence[int | bytes],
        owners: Sequence[int],
        raws: Sequence[bytes],
    ) -> int:
        """One page each of several sequences."""
        marked = [
            self._marked(self._above(None if isinstance(above, bytes) else above), raw)
            for above, raw in zip(aboves, raws, strict=True)
        ]
        found = self.worker.seal_each(pages, aboves, owners, raws)
        ids = [tokens.tobytes() for tokens in marked]
        assert found == self.what_if.seal_each(pages, aboves, owners, ids)
        self._mark_of.update((page, tokens[-1]) for page, tokens in zip(pages[:found], marked, strict=False))
        return found

    def allocate(self, owners: "array[int]") -> list[int] | None:
        """The same pages, with the same evictions."""
        return self._both(lambda cache: cache.allocate(owners))

    def acquire(self, pages: Sequence[int], owner: int, is_hit: bool) -> None:
        """On both."""
        self._both(lambda cache: cache.acquire(pages, owner, is_hit))

    def release(self, pages: Sequence[int], owner: int) -> None:
        """On both."""
        self._both(lambda cache: cache.release(pages, owner))

    def evict(self, num_pages: int) -> None:
        """On both."""
        self._both(lambda cache: cache.evict(num_pages))

    def flush(self, include_active: bool) -> FlushOutcome:
        """On both."""
        return self._both(lambda cache: cache.flush(include_active=include_active))

    def pin(self, pages: Sequence[int]) -> None:
        """On both."""
        self._both(lambda cache: cache.pin(pages))

    def unpin(self, pages: Sequence[int]) -> None:
        """On both."""
        self._both(lambda cache: cache.unpin(pages))

    def check(self) -> list[Violation]:
        """Both audits, and page by page what is asked of a pool and an index."""
        pool, other = self.worker.pool, self.what_if.pool
        for page in range(NUM_PAGES + 1):
            assert pool.state(page) == other.state(page), page
            assert pool.references(page) == other.references(page), page
            assert pool.flags(range(page, page + 1)) == other.flags(range(page, page + 1)), page
            if pool.is_sealed(page):
                assert pool.hits(page) == other.hits(page), page
                assert self.worker.index.has_children(page) == self.what_if.index.has_children(page), page
                assert self.worker.index.depth(page) == self.what_if.index.depth(page), page
        assert pool.counts_by_state() == other.counts_by_state()
        assert (pool.num_shared, pool.num_references) == (other.num_shared, other.num_references)
        assert pool.free_slots() == other.free_slots()
        assert self.worker.index.pages() == self.what_if.index.pages()
        assert self.worker.num_capacity_evictions == self.what_if.num_capacity_evictions
        return self.worker.check() + self.what_if.check()


class TwinMachine(PagePoolMachine):
    """The operations of the pool's machine, and pages sealed many at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = TwinCache(self.policy)  # type: ignore[assignment]

    @rule(sequence=PagePoolMachine.sequences)
    def seal_all(self, sequence: list[object]) -> None:
        """All full pages in one call, up to the first that is held by another."""
        owner, pages, ids, first = sequence
        assert isinstance(owner, int)
        assert isinstance(pages, list)
        assert isinstance(ids, array)
        assert isinstance(first, int)
        end = min(len(ids) // SIZE, len(pages))
        parent = pages[first - 1] if first else None
        if first < end and (parent is None or self.cache.pool.is_sealed(parent)):
            raw = ids[first * SIZE : end * SIZE].tobytes()
            sequence[3] = first + self.cache.seal_run(pages[first:end], parent, b"", raw, owner)

    @rule(one=PagePoolMachine.sequences, other=PagePoolMachine.sequences)
    def seal_two(self, one: list[object], other: list[object]) -> None:
        """The next full page of each, in one call."""
        ready = []
        for sequence in [one] if one is other else [one, other]:
            owner, pages, ids, first = sequence
            assert isinstance(pages, list)
            assert isinstance(ids, array)
            assert isinstance(first, int)
            if first >= min(len(ids) // SIZE, len(pages)):
                continue
            above = pages[first - 1] if first else b""
            if first and not self.cache.pool.is_sealed(pages[first - 1]):
                continue
            raw = ids[first * SIZE : (first + 1) * SIZE].tobytes()
            ready.append((sequence, pages[first], above, owner, raw))
        if ready:
            sequences, numbers, aboves, owners, raws = zip(*ready, strict=True)
            for sequence in sequences[: self.cache.seal_each(numbers, aboves, owners, raws)]:
                sequence[3] += 1


class TwinLfu(TwinMachine):
    """The same with another policy."""

    policy = "lfu"


class TwinFifo(TwinMachine):
    """The same with another policy."""

    policy = "fifo"


class TwinCost(TwinMachine):
    """The same with another policy."""

    policy = "cost"


TestTwin = TwinMachine.TestCase
TestTwinLfu = TwinLfu.TestCase
TestTwinFifo = TwinFifo.TestCase
TestTwinCost = TwinCost.TestCase
TestTwin.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTwinLfu.settings = TestTwinFifo.settings = TestTwinCost.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None
)
