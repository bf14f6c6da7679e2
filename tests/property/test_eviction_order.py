"""Each eviction policy alone against a list that is sorted anew for every victim, over random histories.

All pages are leaves here; what a policy does about pages with children is in tests/unit/test_eviction.py.
"""

import random
from collections.abc import Callable

import pytest

from worker.pages.eviction import POLICIES, EvictionPolicy

NUM_PAGES = 40


class Plain:
    """Unreferenced pages with what they were put in with."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int, ...]] = {}  # page → what it is sorted by, smallest first
        self.number = 0
        self.clock = 0  # of the cost-aware one: the class of the last victim

    def add(self, page: int, rank: int) -> None:
        self.number += 1
        self.pages[page] = (rank, self.number)

    def pop(self) -> int | None:
        if not self.pages:
            return None
        victim = min(self.pages, key=self.pages.__getitem__)
        self.clock = self.pages.pop(victim)[0]
        return victim


def by_use(plain: Plain, hits: int, depth: int) -> int:
    return 0


def by_hits(plain: Plain, hits: int, depth: int) -> int:
    return min(hits, 63)


def by_cost(plain: Plain, hits: int, depth: int) -> int:
    """floor(log2(2 * depth)) + floor(log2(1 + hits)), at most 48, above what was evicted last."""
    doublings = sum(2**power <= depth for power in range(40)) + sum(
        2**power <= 1 + hits for power in range(1, 40)
    )
    return plain.clock + min(doublings, 48)


RANKS: dict[str, Callable[[Plain, int, int], int]] = {
    "lru": by_use,
    "lfu": by_hits,
    "cost": by_cost,
}


def put_in(policy: EvictionPolicy, plain: Plain, rank: int, page: int, hits: int, depth: int) -> None:
    policy.add(page, hits, depth, True)
    plain.add(page, rank)


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("seed", range(4))
def test_victims_come_in_the_order_of_their_definition(name: str, seed: int) -> None:
    draw = random.Random(seed)
    policy, plain = POLICIES[name](NUM_PAGES), Plain()
    classes = set()
    for _ in range(3000):
        what, page = draw.random(), draw.randrange(NUM_PAGES)
        if what < 0.15:
            assert policy.pop() == plain.pop()
        elif page in plain.pages:
            (policy.hold if what < 0.6 else policy.forget)(page)
            del plain.pages[page]
        else:
            hits, depth = draw.choice((0, 1, 5, 62, 63, 64, 65_535)), draw.choice((1, 2, 30, 2**30))
            rank = RANKS[name](plain, hits, depth)
            classes.add(rank)
            put_in(policy, plain, rank, page, hits, depth)
    while plain.pages:
        assert policy.pop() == plain.pop()
    assert policy.pop() is None
    assert len(classes) > {"lru": 0, "lfu": 4, "cost": 100}[name], "the wheel of classes went round"


@pytest.mark.parametrize("seed", range(4))
def test_many_at_once_are_as_many_one_after_another(seed: int) -> None:
    """Least recently used, which is told of many pages in one call."""
    draw = random.Random(seed)
    one, many = POLICIES["lru"](NUM_PAGES), POLICIES["lru"](NUM_PAGES)
    inside: list[int] = []
    for _ in range(600):
        outside = [page for page in range(NUM_PAGES) if page not in inside]
        some = draw.sample(outside, draw.randint(0, len(outside)))
        for page in some:
            one.add(page, 0, 1, True)
        many.add_all(some)
        inside += some
        held = draw.sample(inside, draw.randint(0, len(inside) // 2))
        for page in held:
            one.hold(page)
        many.hold_all(held)
        inside = [page for page in inside if page not in held]
        count = draw.randint(0, len(inside) + 2)
        victims = [page for page in (one.pop() for _ in range(count)) if page is not None]
        assert many.pop_all(count) == victims == inside[:count]
        inside = inside[count:]
