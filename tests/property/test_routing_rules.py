"""Routing keeps its promises for any workers, loads and prefixes: one answer, few moves, bounded load."""

import math
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from service.fleet.prefix_hint import ROUTED_PAGES, routing_key
from service.fleet.router import HELD_SHARE, LOAD_FACTOR, Candidate, choose

names = st.lists(st.text("abcdefgh-0123456789", min_size=1, max_size=12), min_size=2, max_size=9, unique=True)
prefixes = st.binary(min_size=1, max_size=16)


def idle(worker_ids: list[str]) -> list[Candidate]:
    return [Candidate(name, f"tcp://{number}") for number, name in enumerate(worker_ids)]


@st.composite
def busy_workers(draw: st.DrawFn) -> list[Candidate]:
    return [
        replace(one, load=draw(st.integers(0, 40)), held_share=draw(st.floats(0, 1)))
        for one in idle(draw(names))
    ]


@settings(max_examples=60, deadline=None)
@given(busy_workers(), st.one_of(st.just(b""), prefixes), st.randoms(use_true_random=False))
def test_every_service_chooses_alike_whatever_order_and_addresses_it_knows(
    workers: list[Candidate], prefix: bytes, chance: random.Random
) -> None:
    chosen = choose(workers, prefix)
    assert chosen is not None
    shuffled = [replace(one, address=f"ipc://elsewhere/{chance.random()}") for one in workers]
    chance.shuffle(shuffled)
    other = choose(shuffled, prefix)
    assert other is not None
    assert other.worker_id == chosen.worker_id


@settings(max_examples=60, deadline=None)
@given(names, st.lists(prefixes, min_size=1, max_size=50), st.data())
def test_a_lost_worker_moves_only_its_own_prefixes(
    worker_ids: list[str], keys: list[bytes], data: st.DataObject
) -> None:
    workers = idle(worker_ids)
    lost = data.draw(st.sampled_from(workers))
    rest = [one for one in workers if one is not lost]
    for key in keys:
        before, after = choose(workers, key), choose(rest, key)
        assert before is lost or after is before
        assert choose(workers, key, avoid={lost.address}) is after


@settings(max_examples=60, deadline=None)
@given(busy_workers(), prefixes)
def test_nobody_gets_more_than_its_bound_and_full_pools_only_if_all_are(
    workers: list[Candidate], prefix: bytes
) -> None:
    chosen = choose(workers, prefix)
    assert chosen is not None
    limit = math.ceil(LOAD_FACTOR * (sum(one.load for one in workers) + 1) / len(workers))
    assert chosen.load < limit
    if chosen.held_share >= HELD_SHARE:
        assert all(one.held_share >= HELD_SHARE for one in workers if one.load < limit)


@settings(max_examples=60, deadline=None)
@given(busy_workers(), st.one_of(st.just(b""), prefixes), st.data())
def test_the_avoided_are_taken_only_if_there_is_no_other(
    workers: list[Candidate], prefix: bytes, data: st.DataObject
) -> None:
    avoid = data.draw(st.sets(st.sampled_from([one.address for one in workers])))
    chosen = choose(workers, prefix, avoid)
    assert chosen is not None
    assert chosen.address not in avoid or len(avoid) == len(workers)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 120))
def test_requests_of_one_prefix_spread_over_all_when_they_pile_up(count: int, requests: int) -> None:
    """Pure affinity under skew would send all of them to one worker."""
    workers = idle([f"w{number}" for number in range(count)])
    for _ in range(requests):
        chosen = choose(workers, b"one prefix")
        assert chosen is not None
        workers = [replace(one, load=one.load + 1) if one is chosen else one for one in workers]
    assert max(one.load for one in workers) <= math.ceil(LOAD_FACTOR * requests / count)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=200),
    st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.integers(1, 32),
    st.binary(max_size=8),
)
def test_prompts_with_the_same_first_pages_have_one_key(
    ids: list[int], more: list[int], page_size: int, salt: bytes
) -> None:
    key = routing_key(ids, page_size, salt)
    assert bool(key) == (len(ids) > page_size)
    if len(ids) > ROUTED_PAGES * page_size:
        assert routing_key([*ids, *more], page_size, salt) == key
    if key:
        assert routing_key(ids, page_size, salt + b"x") != key
        assert routing_key([(ids[0] + 1) % 2**32, *ids[1:]], page_size, salt) != key
