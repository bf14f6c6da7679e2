"""The page cache under any order of operations, against a Counter, and its events against the pool.

The model: sequences hold lists of pages; a Counter of what they hold; the set of sealed pages. After each
rule the audit holds and the fold of the page events gives the pool.
"""

from array import array
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from worker.execution.testing import PageFold
from worker.pages.events import PageState
from worker.pages.page_cache import CacheConfig, PageCache

NUM_PAGES = 6
SIZE = 2


class PagePoolMachine(RuleBasedStateMachine):
    """Sequences are [owner, pages, tokens, number of sealed pages]."""

    sequences = Bundle("sequences")
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.cache = PageCache(CacheConfig(NUM_PAGES, SIZE, self.policy, event_capacity=1024))
        self.fold = PageFold(NUM_PAGES)
        self.held: Counter[int] = Counter()
        self.next_owner = 1
        self.pins: list[list[int]] = []

    def _take(self, owner: int, count: int) -> list[int] | None:
        pool = self.cache.pool
        before = (self.cache.events.number, pool.counts_by_state())
        pages = self.cache.allocate(array("H", (owner,)) * count)
        if pages is None:
            assert count > before[1][PageState.FREE] + before[1][PageState.CACHED]
            assert (self.cache.events.number, pool.counts_by_state()) == before
            return None
        assert len(set(pages)) == len(pages) == count
        assert not any(self.held[page] for page in pages)
        assert max(pages, default=0) < NUM_PAGES
        self.held.update(pages)
        return pages

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start(self, tokens: list[int]) -> list[object]:
        """Looks up, takes what is found, allocates the rest; gives it back when that fails."""
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        ids = array("I", tokens)
        lookup = self.cache.lookup(ids, b"", (len(tokens) - 1) // SIZE)
        cached = [page for page in lookup.pages if self.cache.pool.state(page) == PageState.CACHED]
        assert lookup.num_unreferenced == len(cached)
        self.cache.acquire(lookup.pages, owner, is_hit=True)
        self.held.update(lookup.pages)
        fresh = self._take(owner, -(-len(tokens) // SIZE) - len(lookup.pages))
        if fresh is None:
            self._release(owner, lookup.pages)
            return [owner, [], ids, 0]
        return [owner, lookup.pages + fresh, ids, len(lookup.pages)]

    def _release(self, owner: int, pages: list[int]) -> None:
        self.cache.release(pages, owner)
        self.held.subtract(pages)

    @rule(sequence=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, sequence: list[object], tokens: list[int]) -> None:
        """More tokens; pages only at page edges."""
        owner, pages, ids, _ = sequence
        assert isinstance(pages, list)
        assert isinstance(ids, array)
        if not pages:
            return
        more = self._take(int(owner), -(-(len(ids) + len(tokens)) // SIZE) - len(pages))  # type: ignore[call-overload]
        if more is not None:
            pages.extend(more)
            ids.extend(tokens)

    @rule(sequence=sequences)
    def seal(self, sequence: list[object]) -> None:
        """The next full page enters the index, or gives way to the page that is there already."""
        owner, pages, ids, num_sealed = sequence
        assert isinstance(owner, int)
        assert isinstance(pages, list)
        assert isinstance(ids, array)
        assert isinstance(num_sealed, int)
        if (num_sealed + 1) * SIZE > len(ids) or num_sealed >= len(pages):
            return
        parent = pages[num_sealed - 1] if num_sealed else None
        if parent is not None and not self.cache.pool.is_sealed(parent):
            return
        token_bytes = ids[num_sealed * SIZE : (num_sealed + 1) * SIZE].tobytes()
        page = pages[num_sealed]
        kept = self.cache.seal(page, parent, b"", token_bytes, owner)
        if kept != page:
            self.cache.acquire([kept], owner, is_hit=False)
            self.held.update([kept])
            pages[num_sealed] = kept
            self._release(owner, [page])
        sequence[3] = num_sealed + 1

    @rule(sequence=consumes(sequences))
    def end(self, sequence: list[object]) -> None:
        """All references back."""
        owner, pages, _, _ = sequence
        assert isinstance(owner, int)
        assert isinstance(pages, list)
        self._release(owner, pages)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: list[object]) -> list[object]:
        """Another sequence shares the sealed pages."""
        _, pages, ids, num_sealed = sequence
        assert isinstance(pages, list)
        assert isinstance(ids, array)
        assert isinstance(num_sealed, int)
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        shared = pages[:num_sealed]
        self.cache.acquire(shared, owner, is_hit=False)
        self.held.update(shared)
        return [owner, shared, ids[: num_sealed * SIZE], num_sealed]

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        """Never more than there is."""
        if count <= self.cache.pool.num_cached:
            free = self.cache.pool.num_free
            self.cache.evict(count)
            assert self.cache.pool.num_free == free + count

    @rule(include_active=st.booleans())
    def flush(self, include_active: bool) -> None:
        """Everything that nobody refers to or pins, or all that nobody pins."""
        self.cache.flush(include_active=include_active)
        assert self.cache.pool.num_cached == 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=6))
    def pin(self, tokens: list[int]) -> None:
        """Whatever is cached of a prefix."""
        pages = self.cache.lookup(array("I", tokens), b"", len(tokens) // SIZE).pages
        if pages and len(self.pins) < 2:
            self.cache.pin(pages)
            self.pins.append(pages)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        """The oldest pin."""
        self.cache.unpin(self.pins.pop(0))

    @invariant()
    def audit(self) -> None:
        """Pool, index, model and events agree."""
        assert self.cache.check() == []
        pool = self.cache.pool
        events = self.cache.events.read(self.fold.number)
        assert events is not None
        self.fold.apply(events)
        pinned = {page for pages in self.pins for page in pages}
        for page in range(NUM_PAGES):
            assert pool.references(page) == self.held[page] == self.fold.refs[page]
            assert pool.state(page) == self.fold.states[page]
            assert pool.is_pinned(page) == (page in pinned)
            if not self.held[page] and pool.is_sealed(page):
                assert pool.state(page) == (PageState.PINNED if page in pinned else PageState.CACHED)
        held = {page for page, count in self.held.items() if count}
        total = pool.num_free + pool.num_cached + pool.num_pinned + len(held)
        assert total == NUM_PAGES, "S1-35: free + cached + held, disjoint"


class LfuMachine(PagePoolMachine):
    """The same with another policy."""

    policy = "lfu"


class FifoMachine(PagePoolMachine):
    """The same with another policy."""

    policy = "fifo"


class CostMachine(PagePoolMachine):
    """The same with another policy."""

    policy = "cost"


TestPagePool = PagePoolMachine.TestCase
TestLfu = LfuMachine.TestCase
TestFifo = FifoMachine.TestCase
TestCost = CostMachine.TestCase
TestPagePool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLfu.settings = TestFifo.settings = TestCost.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None
)
