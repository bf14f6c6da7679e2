"""Which page goes first: each policy against a slow model of itself, and the rules they share."""

import random
from array import array

import pytest

from worker.pages.eviction import POLICIES, PageLists
from worker.pages.page_cache import CacheConfig, PageCache


def make(num_pages: int = 16, page_size: int = 1, policy: str = "lru", **more: object) -> PageCache:
    return PageCache(CacheConfig(num_pages, page_size, policy, event_capacity=4096, **more))  # type: ignore[arg-type]


def store(cache: PageCache, tokens: list[int], owner: int = 1, salt: bytes = b"") -> list[int]:
    """What a finished request leaves behind: hits taken over, the rest computed and sealed, all released."""
    size = cache.config.page_size
    ids = array("I", tokens)
    found = cache.lookup(ids, salt, len(tokens) // size).pages
    cache.acquire(found, owner, is_hit=True)
    fresh = cache.allocate(array("H", (owner,)) * (len(tokens) // size - len(found)))
    assert fresh is not None
    pages = found + fresh
    for index in range(len(found), len(pages)):
        parent = pages[index - 1] if index else None
        token_bytes = ids[index * size : (index + 1) * size].tobytes()
        assert cache.seal(pages[index], parent, salt, token_bytes, owner) == pages[index]
    cache.release(pages, owner)
    assert cache.check() == []
    return pages


def known(cache: PageCache, tokens: list[int]) -> int:
    return len(cache.lookup(array("I", tokens), b"", len(tokens) // cache.config.page_size).pages)


@pytest.mark.parametrize("policy", POLICIES)
def test_leaves_go_before_their_parents(policy: str) -> None:
    """M-15: a parent becomes a candidate when it turns leaf and nobody refers to it."""
    cache = make(policy=policy)
    store(cache, [1, 2, 3, 4])
    store(cache, [1, 2, 9])
    for left in range(4, -1, -1):
        cache.evict(1)
        assert cache.check() == []
        assert cache.pool.num_cached == left
    assert cache.pool.num_free == 16


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_names_each_page_once_and_then_none(policy: str) -> None:
    order = POLICIES[policy](4)
    assert order.pop() is None
    order.add(2, 0, 1, True)
    assert (order.pop(), order.pop()) == (2, None)


@pytest.mark.parametrize("policy", POLICIES)
def test_evicting_more_than_there_is_is_an_error_that_changes_nothing(policy: str) -> None:
    """M-17."""
    cache = make(policy=policy)
    store(cache, [1, 2, 3])
    with pytest.raises(ValueError, match="4 pages to evict, only 3"):
        cache.evict(4)
    assert cache.pool.num_cached == 3


def test_exactly_as_many_pages_are_evicted_as_are_needed() -> None:
    """M-16, B018: page by page, never a whole chain for one page."""
    cache = make(60)
    for number in range(5):
        store(cache, [number] * 10)
    cache.evict(3)
    assert (cache.pool.num_cached, cache.num_capacity_evictions) == (47, 3)
    cache.evict(0)
    assert cache.pool.num_cached == 47


def test_pages_in_use_are_never_evicted() -> None:
    cache = make(8)
    pages = store(cache, [1, 2, 3, 4])
    cache.acquire(pages[:2], 2, is_hit=True)
    cache.evict(2)
    assert known(cache, [1, 2, 3, 4]) == 2
    assert cache.pool.num_cached == 0


def test_allocation_evicts_before_it_gives_up() -> None:
    """B019: idle cached prefixes never make room short."""
    cache = make(8)
    store(cache, [1, 2, 3, 4, 5, 6])
    assert cache.allocate(array("H", (7,)) * 7) is not None
    assert cache.pool.num_cached == 1


def test_a_failed_allocation_evicts_nothing() -> None:
    cache = make(8)
    store(cache, [1, 2, 3, 4, 5, 6])
    held = cache.allocate(array("H", (7,)) * 3)
    before = (cache.events.number, cache.pool.num_cached)
    assert cache.allocate(array("H", (7,)) * 6) is None
    assert (cache.events.number, cache.pool.num_cached) == before
    assert held is not None


def test_a_hit_refreshes_the_page_it_ends_on() -> None:
    """H4, B017: after a partial hit the pages that were hit are younger than what came between."""
    cache = make(8)
    store(cache, [1, 2, 3])
    store(cache, [7, 8, 9])
    pages = cache.lookup(array("I", [1, 2, 5]), b"", 2).pages
    assert len(pages) == 2
    cache.acquire(pages, 2, is_hit=True)
    cache.release(pages, 2)
    cache.evict(4)
    assert known(cache, [1, 2, 3]) == 2
    assert known(cache, [7, 8, 9]) == 0


def test_a_prefix_that_is_hit_again_and_again_survives() -> None:
    """B017."""
    cache = make(12)
    store(cache, [100, 101])
    for number in range(12):
        store(cache, [number, number])
        pages = cache.lookup(array("I", [100, 101]), b"", 2).pages
        cache.acquire(pages, 2, is_hit=True)
        cache.release(pages, 2)
    assert known(cache, [100, 101]) == 2


def test_looking_up_alone_refreshes_nothing() -> None:
    cache = make(8)
    store(cache, [1, 2])
    store(cache, [7, 8])
    assert known(cache, [1, 2]) == 2
    cache.evict(2)
    assert known(cache, [1, 2]) == 0


def test_least_recently_used_is_exact() -> None:
    """Against a list of all unreferenced pages by last use."""
    rng = random.Random(8)
    cache = make(40)
    order: list[int] = []
    for _ in range(600):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        free = cache.pool.num_free
        found = cache.lookup(array("I", tokens), b"", len(tokens)).pages
        missing = len(tokens) - len(found)
        order = [page for page in order if page not in found]
        evicted = order[: max(0, missing - free)]
        before = cache.events.number
        pages = store(cache, tokens)
        events = cache.events.read(before)
        assert events is not None
        gone = [page for kind, page in zip(events.kinds, events.pages, strict=True) if kind == 6]
        assert gone == evicted
        order = [page for page in order if page not in evicted] + pages[::-1]


def test_least_frequently_used_keeps_what_is_hit() -> None:
    cache = make(12, policy="lfu")
    for number in range(4):
        store(cache, [number, number])
    for _ in range(3):
        store(cache, [2, 2])
    store(cache, [0, 0])
    cache.evict(4)
    assert [known(cache, [number, number]) for number in range(4)] == [2, 0, 2, 0]


def test_first_in_first_out_takes_no_notice_of_hits() -> None:
    cache = make(12, policy="fifo")
    for number in range(4):
        store(cache, [number, number])
    for _ in range(3):
        store(cache, [0, 0])
    cache.evict(2)
    assert [known(cache, [number, number]) for number in range(4)] == [0, 2, 2, 2]


def test_first_in_first_out_keeps_nothing_of_a_page_that_a_flush_took() -> None:
    """Of one that it had passed over before; with what comes into that page the order starts anew."""
    cache = make(4, policy="fifo")
    (first,) = store(cache, [1])
    store(cache, [2])
    cache.acquire([first], 9, is_hit=True)
    cache.evict(1)
    cache.release([first], 9)
    cache.flush()
    for number in (3, 4, 5):
        store(cache, [number])
    cache.evict(2)
    assert [known(cache, [number]) for number in (3, 4, 5)] == [0, 0, 1]


@pytest.mark.parametrize("is_passed_over", [False, True])
def test_first_in_first_out_knows_nothing_more_of_a_page_that_a_flush_took_from_its_holder(
    is_passed_over: bool,
) -> None:
    """What comes into that page afterwards is the newest; it went first, in the place of what was there."""
    cache = make(4, policy="fifo")
    (first,) = store(cache, [1], salt=b"a")
    for number in (2, 3, 4):
        store(cache, [number])
    cache.acquire([first], 9, is_hit=True)
    left = [3, 4]
    if is_passed_over:
        cache.evict(1)
    else:
        left.insert(0, 2)
    cache.flush(matches=lambda salt: salt == b"a", include_active=True)
    cache.release([first], 9)
    assert store(cache, [5]) == [first]
    cache.evict(1)
    assert [number for number in (2, 3, 4, 5) if known(cache, [number])] == [*left[1:], 5]


def test_first_in_first_out_returns_to_what_it_had_to_pass_over() -> None:
    cache = make(12, policy="fifo")
    first = store(cache, [1, 1])
    store(cache, [2, 2])
    store(cache, [3, 3])
    cache.acquire(first, 9, is_hit=True)
    cache.evict(2)
    assert known(cache, [2, 2]) == 0
    cache.release(first, 9)
    cache.evict(2)
    assert [known(cache, [number, number]) for number in (1, 3)] == [0, 2]


def test_cost_aware_keeps_deep_pages_longer_and_forgets_in_the_end() -> None:
    cache = make(40, policy="cost")
    store(cache, [5] * 16)
    store(cache, [6])
    store(cache, [7])
    cache.evict(2)
    assert [known(cache, [6]), known(cache, [7]), known(cache, [5] * 16)] == [0, 0, 16]
    for number in range(100, 400):
        store(cache, [number])
    assert known(cache, [5] * 16) < 16


@pytest.mark.parametrize("policy", POLICIES)
def test_any_history_of_any_policy_keeps_the_rules(policy: str) -> None:
    """B005, B006: random stores, hits and evictions; at the end everything can be evicted."""
    rng = random.Random(13)
    cache = make(24, 2, policy)
    held: list[list[int]] = []
    for _ in range(800):
        tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 5))]
        what = rng.random()
        if what < 0.5 and cache.num_available >= 5:
            store(cache, tokens)
        elif what < 0.7:
            pages = cache.lookup(array("I", tokens), b"", len(tokens) // 2).pages
            if pages:
                cache.acquire(pages, 3, is_hit=True)
                held.append(pages)
        elif held:
            cache.release(held.pop(rng.randrange(len(held))), 3)
        if rng.random() < 0.2:
            cache.evict(rng.randint(0, cache.pool.num_cached))
        assert cache.check() == []
    while held:
        cache.release(held.pop(), 3)
    cache.evict(cache.pool.num_cached)
    assert cache.pool.num_free == 24


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'mru' is none of lru, lfu, fifo, cost"):
        make(policy="mru")


def test_lists_catch_a_page_that_enters_twice_or_leaves_twice() -> None:
    lists = PageLists(4)
    lists.append(2)
    lists.prepend(3)
    assert lists.pages() == [3, 2]
    with pytest.raises(AssertionError, match="page 2 stands in a list"):
        lists.append(2)
    lists.remove(2)
    with pytest.raises(AssertionError, match="page 2 stands in no list"):
        lists.remove(2)
