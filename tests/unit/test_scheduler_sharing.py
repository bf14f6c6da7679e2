"""Pages that several sequences use: found in the cache, or computed twice at once and exchanged."""

from array import array

import pytest

from tests.toy_scheduler import BOTH, check_answers, make, pages, request
from worker.execution.testing import Answer, Harness
from worker.pages.events import PageEventKind, PageState
from worker.scheduling.output import PrefixCounts


def hits(answer: Answer) -> int:
    assert answer.start is not None
    assert answer.start.prefix is not None
    return answer.start.prefix.hit_tokens


def cached(harness: Harness, prompt: list[int]) -> int:
    return len(harness.scheduler.cache.lookup(array("I", prompt), b"", 100).pages)


@BOTH
def test_two_equal_prompts_in_flight_end_up_on_the_same_pages(overlap: bool) -> None:
    """H1, B001, M-11: the row of the second points at the first one's pages before its own are freed."""
    harness = make(overlap, num_pages=24)
    first = request(1, range(12), max_tokens=12)
    second = request(2, range(12), max_tokens=12)
    harness.add(first)
    harness.add(second)
    harness.turn()
    harness.settle()
    assert pages(harness, 1)[:3] == pages(harness, 2)[:3]
    pool = harness.scheduler.cache.pool
    assert pool.num_free == 24 - 3
    assert [pool.hits(page) for page in pages(harness, 1)[:3]] == [0] * 3, "nobody looked them up"
    others = [request(number, [number] * 8, max_tokens=6) for number in range(3, 8)]
    for spec in others:  # freed pages are used again while the two go on
        harness.add(spec)
    harness.turn()
    harness.audit_rows()
    harness.run()
    check_answers(harness, first, second, *others)


def test_a_page_that_was_exchanged_is_written_to_its_row_once_and_to_none_of_who_has_ended() -> None:
    harness = make(num_pages=24)
    for number, max_tokens in ((1, 4), (2, 4), (3, 1)):
        harness.add(request(number, range(12), max_tokens=max_tokens))
    harness.turn()
    steps = [harness.turn() for _ in range(3)]
    writes = [list(step.new_page_indexes) for step in steps if step is not None]
    assert writes == [[0, 1, 2, 3, 3], [], []], "of the second request; then the next page of both"


def test_no_live_table_holds_a_free_page() -> None:
    """B001: after every operation the tables and the free list are disjoint."""
    harness = make(num_pages=20, max_running=4)
    for number in range(1, 25):
        harness.add(request(number, [number % 2] * 9, max_tokens=5, temperature=1.0, seed=number))
    while harness.scheduler.has_work(harness.now):
        harness.turn()
        free = {slot // 4 for slot in harness.scheduler.cache.pool.free_slots()}
        for view in harness.scheduler.sequence_views():
            assert not free & set(view.page_ids)


@BOTH
def test_pages_can_be_hit_as_soon_as_they_are_computed(overlap: bool) -> None:
    """M-12: a prompt enters the index when it was computed, not when its sequence ends."""
    harness = make(overlap, num_pages=24)
    first, second = request(1, range(12), max_tokens=20), request(2, [*range(12), 77], max_tokens=5)
    harness.add(first)
    harness.turn()
    harness.settle()
    harness.add(second)
    harness.turn()
    harness.settle()
    assert hits(harness.answers[2]) == 12
    assert pages(harness, 1)[:3] == pages(harness, 2)[:3]
    harness.run()
    check_answers(harness, first, second)


def test_a_page_is_not_found_before_it_was_computed() -> None:
    """B010, H3b: between two chunks only the pages of the chunks that are over can be hit."""
    harness = make(num_pages=32, max_chunk_tokens=6, max_running=2)
    first = request(1, range(20))
    harness.add(first)
    harness.launch()
    assert cached(harness, list(range(20))) == 0
    harness.settle()
    assert cached(harness, list(range(20))) == 1
    harness.launch()
    assert cached(harness, list(range(20))) == 1
    second = request(2, range(20))
    harness.add(second)
    harness.settle()
    harness.run()
    assert hits(harness.answers[2]) == 12
    check_answers(harness, first, second)


@pytest.mark.parametrize("chunk", range(5))
@BOTH
def test_a_prompt_aborted_between_chunks_leaves_only_what_is_whole(chunk: int, overlap: bool) -> None:
    """B012, H3b: cancel after each chunk, recycle the pages, send the same prompt again."""
    harness = make(overlap, num_pages=12, max_chunk_tokens=5, max_running=2)
    harness.add(request(1, range(24), max_tokens=3))
    for _ in range(chunk):
        harness.turn()
    harness.abort(1)
    harness.settle()
    assert harness.scheduler.cache.pool.num_active == 0
    for number in range(2, 6):
        filler = request(number, range(100 * number, 100 * number + 30), max_tokens=3)
        harness.add(filler)
        harness.run()
        check_answers(harness, filler)
    again = request(9, range(24), max_tokens=3)
    harness.add(again)
    harness.run()
    check_answers(harness, again)


@pytest.mark.parametrize("length", range(1, 17))
def test_at_least_one_token_is_always_computed(length: int) -> None:
    """B015, M-07: lengths 1 .. 4P, twice; computed the second time is 1 .. P, and an extension hits."""
    harness = make(num_pages=32)
    harness.add(request(1, range(length), max_tokens=1))
    harness.run()
    before = harness.scheduler.counts().prompt_tokens_computed_total
    harness.add(request(2, range(length), max_tokens=1))
    harness.run()
    computed = harness.scheduler.counts().prompt_tokens_computed_total - before
    assert 1 <= computed <= 4
    assert hits(harness.answers[2]) == length - computed
    assert harness.answers[1].tokens == harness.answers[2].tokens
    longer = request(3, [*range(length), *range(500, 512)], max_tokens=2)
    harness.add(longer)
    harness.run()
    assert hits(harness.answers[3]) == length // 4 * 4
    check_answers(harness, longer)


@BOTH
def test_the_last_sampled_token_is_not_taken_for_stored(overlap: bool) -> None:
    """B023: 4 prompt tokens and 2 new ones at P = 1: five have KV, the sixth was never computed."""
    harness = make(overlap, page_size=1, num_pages=32)
    first = request(1, range(4), max_tokens=2)
    harness.add(first)
    harness.run()
    whole = [*range(4), *harness.answers[1].tokens]
    assert harness.scheduler.cache.pool.num_cached == 5
    harness.add(request(2, [*whole, 99], max_tokens=1))
    harness.run()
    assert hits(harness.answers[2]) == 5


def test_a_hit_is_part_of_the_row_before_the_first_step() -> None:
    """M-10, M-09: hit pages are referenced and written to the row together with the fresh ones."""
    harness = make(num_pages=24)
    harness.add(request(1, range(12), max_tokens=1))
    harness.run()
    harness.add(request(2, [*range(12), 50, 51], max_tokens=3))
    step = harness.launch()
    assert step is not None
    assert (step.starts[0], step.ends[0]) == (12, 14)
    assert list(step.new_page_indexes) == [0, 1, 2, 3]
    assert list(step.row_starts[0].token_ids) == [*range(12), 50, 51]
    pool = harness.scheduler.cache.pool
    assert [pool.references(page) for page in step.new_page_ids] == [1, 1, 1, 1]
    harness.settle()
    harness.run()


def test_a_lock_is_on_every_page_up_to_the_root() -> None:
    """M-08, B006: a hit references what it matched and nothing else; nothing stays locked."""
    harness = make(num_pages=32)
    harness.add(request(1, range(16), max_tokens=1))
    harness.run()
    harness.add(request(2, [*range(8), 99, 98], max_tokens=9))
    harness.turn()
    pool, index = harness.scheduler.cache.pool, harness.scheduler.cache
    chain = index.lookup(array("I", range(16)), b"", 4).pages
    assert [pool.references(page) for page in chain] == [1, 1, 0, 0]
    assert pool.num_cached == 2
    harness.run()
    assert pool.num_references == 0
    harness.scheduler.cache.evict(pool.num_cached)
    assert pool.num_free == 32


def test_requests_that_may_not_read_or_write_the_cache_do_not() -> None:
    harness = make(num_pages=32)
    harness.add(request(1, range(12), max_tokens=1, cache_write=False))
    harness.run()
    assert harness.scheduler.cache.pool.num_cached == 0
    harness.add(request(2, range(12), max_tokens=1))
    harness.run()
    harness.add(request(3, range(12), max_tokens=1, cache_read=False))
    harness.run()
    start = harness.answers[3].start
    assert start is not None
    assert (start.prefix, start.reused_pages) == (None, 0)
    assert harness.scheduler.cache.pool.num_cached == 3


@BOTH
@pytest.mark.parametrize("length", [2, 6])
def test_the_output_of_one_that_may_not_write_the_cache_stays_out_of_it(length: int, overlap: bool) -> None:
    """Also beside one that may, which fills its pages in the same steps; the first one, too."""
    harness = make(overlap, num_pages=32)
    harness.add(request(1, range(length), max_tokens=26 - length, cache_write=False))
    harness.add(request(2, range(50, 50 + length), max_tokens=26 - length))
    harness.run()
    assert harness.fold.counts[PageEventKind.SEALED] == harness.scheduler.cache.pool.num_cached == 6
    assert cached(harness, [*range(length), *harness.answers[1].tokens]) == 0
    assert cached(harness, [*range(50, 50 + length), *harness.answers[2].tokens]) == 6


def test_what_a_resumed_request_finds_of_its_output_is_no_hit_of_its_prompt() -> None:
    harness = make(num_pages=32)
    harness.add(request(1, range(9), max_tokens=16))
    harness.run()
    output = harness.answers[1].tokens
    assert cached(harness, [*range(9), *output]) == 6
    assert harness.scheduler.pin("p", [*range(9), *output], b"", None, harness.now).pinned_pages == 6
    harness.add(request(2, range(9), max_tokens=30, resume_token_ids=output))
    harness.run()
    start = harness.answers[2].start
    assert start is not None
    assert (start.prefix, start.reused_pages) == (PrefixCounts(8, 0, 0, 1), 6)
    counts = harness.scheduler.counts()
    assert (counts.hit_tokens_total, counts.miss_cold_tokens_total, counts.unaligned_tokens_total) == (
        8,
        8,
        2,
    )
    assert harness.scheduler.list_pins()[0].hit_tokens == 8


def test_prefix_counts_add_up_and_tell_evicted_from_cold() -> None:
    harness = make(num_pages=8, max_context_tokens=32)
    harness.add(request(1, range(17), max_tokens=1))
    harness.run()
    harness.scheduler.cache.evict(2)
    harness.add(request(2, [*range(17), 90, 91, 92, 93], max_tokens=1))
    harness.run()
    start = harness.answers[2].start
    assert start is not None
    prefix = start.prefix
    assert prefix is not None
    assert (prefix.hit_tokens, prefix.miss_evicted_tokens) == (8, 8)
    assert (prefix.miss_cold_tokens, prefix.unaligned_tokens) == (4, 1)
    counts = harness.scheduler.counts()
    totals = (counts.hit_tokens_total, counts.miss_evicted_tokens_total, counts.miss_cold_tokens_total)
    assert totals == (8, 8, 4 + 16)
    assert counts.unaligned_tokens_total == 2


def test_hit_pages_become_active_again_and_are_cached_at_the_end() -> None:
    harness = make(num_pages=24)
    harness.add(request(1, range(8), max_tokens=1))
    harness.run()
    chain = harness.scheduler.cache.lookup(array("I", range(8)), b"", 2).pages
    pool = harness.scheduler.cache.pool
    assert [pool.state(page) for page in chain] == [PageState.CACHED] * 2
    harness.add(request(2, [*range(8), 7], max_tokens=3))
    harness.turn()
    assert [pool.state(page) for page in chain] == [PageState.ACTIVE] * 2
    harness.run()
    assert [pool.state(page) for page in chain] == [PageState.CACHED] * 2


@BOTH
def test_a_duplicate_holds_up_nobody_who_fills_a_page_in_the_same_step(overlap: bool) -> None:
    """H1: of two equal answers one page is kept; the page after them is found from that step on, too."""
    harness = make(overlap)
    for number, first in enumerate((7, 7, 9), 1):
        harness.add(request(number, [first, 2, 3], max_tokens=8))
    pool = harness.scheduler.cache.pool
    harness.turn()
    while not pool.is_sealed(pages(harness, 1)[0]):
        harness.turn()
    assert pages(harness, 1)[0] == pages(harness, 2)[0]
    assert pool.is_sealed(pages(harness, 3)[0])
    harness.run()
    check_answers(
        harness, *[request(number, [first, 2, 3], max_tokens=8) for number, first in ((1, 7), (2, 7), (3, 9))]
    )
