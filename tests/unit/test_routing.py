"""Which worker gets a request, and what that is worth: prompts find the pages of those before them."""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from service.fleet.prefix_hint import routing_key
from service.fleet.router import Candidate, choose
from worker.pages.page_cache import CacheConfig, PageCache

PAGE_SIZE = 16


def test_without_a_prefix_the_least_loaded_is_chosen_and_the_avoided_only_if_alone() -> None:
    one, two = Candidate("a", "ipc://a", load=3), Candidate("b", "ipc://b", load=1)
    assert choose([]) is None
    assert choose([one, two]) is two
    assert choose([one, two], avoid={"ipc://b"}) is one
    assert choose([two], avoid={"ipc://b"}) is two
    assert choose([replace(one, load=1, held_share=0.5), two]) is two


def test_the_owner_is_passed_over_while_it_has_too_much_to_do_or_no_pages() -> None:
    workers = [Candidate(name, f"ipc://{name}") for name in "abc"]
    owner = choose(workers, b"prefix")
    assert owner is not None
    others = [one for one in workers if one is not owner]
    second = choose(others, b"prefix")
    assert choose([replace(owner, load=2), *others], b"prefix") is second  # of 3 requests a third gets 1.5
    busy = [replace(one, load=2) for one in others]
    assert choose([replace(owner, load=3), *busy], b"prefix") == replace(owner, load=3)
    assert choose([replace(owner, held_share=0.95), *others], b"prefix") is second
    assert choose([replace(owner, held_share=0.94), *others], b"prefix") == replace(owner, held_share=0.94)


def keep(cache: PageCache, prompt: "array[int]") -> int:
    """What a request does to a pool, at once: finds pages, computes the others, leaves all; tokens found."""
    whole = (len(prompt) - 1) // PAGE_SIZE
    found = cache.lookup(prompt, b"", whole).pages
    cache.acquire(found, owner=1, is_hit=True)
    made = cache.allocate(array("H", (1,)) * (whole - len(found)))
    assert made is not None, "a prompt fits a pool that nobody else uses"
    raw = prompt[len(found) * PAGE_SIZE : whole * PAGE_SIZE].tobytes()
    assert cache.seal_run(made, found[-1] if found else None, b"", raw, 1) == len(made)
    cache.release([*found, *made], 1)
    return len(found) * PAGE_SIZE


def hit_rate(policy: Callable[[Sequence[Candidate], bytes], Candidate | None]) -> float:
    """Share of prompt tokens that three workers with real page caches find.

    Sixty conversations of six turns in random order; a turn carries all that was said before it. A pool holds
    less than half of them. Four requests are under way at a time.
    """
    chance = random.Random(7)
    caches = {f"w{number}": PageCache(CacheConfig(num_pages=400, page_size=PAGE_SIZE)) for number in range(3)}
    said = [array("I", (chance.randrange(512) for _ in range(80))) for _ in range(60)]
    turns = [number for number in range(60) for _ in range(6)]
    chance.shuffle(turns)
    under_way: list[str] = []
    found = asked = 0
    for number in turns:
        prompt = said[number]
        prompt.extend(chance.randrange(512) for _ in range(40))
        candidates = [Candidate(name, f"ipc://{name}", load=under_way.count(name)) for name in caches]
        chosen = policy(candidates, routing_key(prompt, PAGE_SIZE, b"tenant\0"))
        assert chosen is not None
        found += keep(caches[chosen.worker_id], prompt)
        asked += len(prompt)
        under_way = [*under_way, chosen.worker_id][-4:]
    return found / asked


def test_affinity_finds_more_of_shared_prefixes_than_the_least_load_does() -> None:
    by_load = hit_rate(lambda candidates, key: choose(candidates))
    by_prefix = hit_rate(choose)
    print(f"prompt tokens found: {by_prefix:.3f} by prefix, {by_load:.3f} by load")
    assert by_prefix > 1.5 * by_load
