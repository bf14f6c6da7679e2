"""Pages that several sequences use: found in the cache, computed twice at once, or samples of one prompt."""

from array import array

import pytest

from tests.toy_scheduler import BOTH, MODEL, make, request
from worker.execution.fake_runner import answer_alone
from worker.execution.testing import Answer, Harness
from worker.ids import SequenceId
from worker.pages.events import PageEventKind, PageState
from worker.scheduling.output import FinishCode, PrefixCounts
from worker.scheduling.request import RequestSpec
from worker.scheduling.step import Step


def alone(spec: RequestSpec, choice: int = 0) -> list[int]:
    return answer_alone(MODEL, spec.prompt_token_ids, spec.params, choice, frozenset(), 64)


def check(harness: Harness, *specs: RequestSpec) -> None:
    for spec in specs:
        for choice in range(spec.sample_count):
            assert harness.answers[spec.sequence_id + choice].tokens == alone(spec, choice)


def pages(harness: Harness, sequence_id: int) -> list[int]:
    views = {view.sequence_id: view for view in harness.scheduler.sequence_views()}
    return list(views[SequenceId(sequence_id)].page_ids)


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
    check(harness, first, second, *others)


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
    check(harness, first, second)


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
    check(harness, first, second)


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
        check(harness, filler)
    again = request(9, range(24), max_tokens=3)
    harness.add(again)
    harness.run()
    check(harness, again)


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
    check(harness, longer)


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
def test_the_output_of_one_that_may_not_write_the_cache_stays_out_of_it(overlap: bool) -> None:
    """Also beside one that may, which fills its pages in the same steps."""
    harness = make(overlap, num_pages=32)
    harness.add(request(1, range(6), max_tokens=20, cache_write=False))
    harness.add(request(2, range(50, 56), max_tokens=20))
    harness.run()
    assert harness.fold.counts[PageEventKind.SEALED] == harness.scheduler.cache.pool.num_cached == 6
    assert cached(harness, [*range(6), *harness.answers[1].tokens]) == 0
    assert cached(harness, [*range(50, 56), *harness.answers[2].tokens]) == 6


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


# Samples of one prompt.


def first_step_with(harness: Harness, sequence_id: int) -> Step:
    for _ in range(20):
        step = harness.turn()
        if step is not None and sequence_id in step.sequence_ids:
            return step
    raise AssertionError(f"sequence {sequence_id} never ran")


@BOTH
@pytest.mark.parametrize("sharing", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 11, 12])
def test_samples_share_the_prompt_and_differ_behind_it(length: int, sharing: bool, overlap: bool) -> None:
    """S1-37: whole pages before the last prompt token are shared, with and without the prefix cache."""
    harness = make(overlap, num_pages=40, sharing=sharing)
    spec = request(1, range(length), max_tokens=6, sample_count=4, temperature=1.0, seed=3)
    harness.add(spec)
    step = first_step_with(harness, 3)
    harness.settle()
    at = list(step.sequence_ids).index(3)
    assert (step.starts[at], step.ends[at]) == (length - 1, length)
    num_shared = (length - 1) // 4
    lists = [pages(harness, sequence_id) for sequence_id in (1, 2, 3, 4)]
    assert all(mine[:num_shared] == lists[0][:num_shared] for mine in lists)
    harness.run()
    check(harness, spec)
    assert len({tuple(harness.answers[1 + choice].tokens) for choice in range(4)}) == 4
    assert harness.scheduler.counts().prompt_tokens_computed_total == length + 3


@BOTH
@pytest.mark.parametrize(("length", "copies"), [(1, 0), (5, 0), (6, 3), (8, 3), (9, 0)])
def test_a_page_that_holds_other_prompt_tokens_is_copied(length: int, copies: int, overlap: bool) -> None:
    """Only where the last prompt token is not the first of its page; each is an event, and on the bill."""
    harness = make(overlap, num_pages=40)
    spec = request(1, range(length), max_tokens=6, sample_count=4, temperature=1.0)
    harness.add(spec)
    harness.run()
    assert harness.runner.num_copies == copies
    assert harness.fold.counts[PageEventKind.COPIED] == copies
    bills = [harness.answers[1 + choice].end for choice in range(4)]
    assert [end.bill.copied_pages for end in bills if end is not None and end.bill is not None] == [copies]
    check(harness, spec)


@BOTH
def test_samples_live_on_when_the_first_one_ends_at_once(overlap: bool) -> None:
    """Its pages stay until the others have copied what they need."""
    for max_tokens in (1, 2):
        harness = make(overlap, num_pages=40)
        spec = request(1, range(7), max_tokens=max_tokens, sample_count=3, temperature=1.0)
        harness.add(spec)
        harness.run()
        check(harness, spec)
        assert harness.runner.num_copies == 2


@BOTH
@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_any_sample_may_be_aborted_at_any_time(victim: int, turns: int, overlap: bool) -> None:
    """M-21: also the one that computes the prompt for the others; another one takes over."""
    harness = make(overlap, num_pages=40, max_chunk_tokens=4)
    spec = request(1, range(11), max_tokens=6, sample_count=3, temperature=1.0)
    harness.add(spec)
    for _ in range(turns):
        harness.turn()
    harness.abort(victim)
    harness.run()
    for choice in range(3):
        answer = harness.answers[1 + choice]
        if 1 + choice == victim and answer.code == FinishCode.ABORTED:
            assert answer.tokens == alone(spec, choice)[: len(answer.tokens)]
        else:
            assert answer.tokens == alone(spec, choice)
    assert harness.scheduler.cache.pool.num_active == 0


def test_samples_are_admitted_together_with_one_start() -> None:
    harness = make(num_pages=40, max_running=4)
    harness.add(request(1, range(4), max_tokens=8, temperature=1.0))
    harness.add(request(2, range(50, 57), max_tokens=8, sample_count=4, temperature=1.0))
    harness.turn()
    assert harness.answers[1].start is not None
    assert harness.answers[2].start is None  # three rows are free, it needs four
    harness.run()
    assert [harness.answers[number].num_starts for number in (2, 3, 4, 5)] == [1, 0, 0, 0]


def test_samples_need_not_all_fit_at_once() -> None:
    """H15: what does not fit beside the others is computed after them."""
    harness = make(num_pages=4, max_context_tokens=16)
    spec = request(1, range(11), max_tokens=5, sample_count=4, temperature=1.0)
    harness.add(spec)
    harness.run(max_turns=400)
    check(harness, spec)


def test_the_only_sequence_left_gives_up_a_copy_that_does_not_fit() -> None:
    """H15: a pool of three pages, all of them prompt; the sample that is left cannot hold a fourth."""
    harness = make(num_pages=3, max_context_tokens=12, sharing=False)
    spec = request(1, range(11), max_tokens=1, sample_count=3, temperature=1.0)
    harness.add(spec)
    harness.run(max_turns=200)
    check(harness, spec)
    counts, end = harness.scheduler.counts(), harness.answers[3].end
    assert end is not None
    assert end.bill is not None
    spared = 3 * 11 + counts.recomputed_tokens_total - counts.prompt_tokens_computed_total
    assert end.bill.saved_tokens == spared, "what was to be copied and was computed is not spared"
    totals = harness.scheduler._books.totals
    charged = totals.billed_page_seconds + totals.unbilled_page_seconds
    assert charged == pytest.approx(harness.fold.active_seconds), "nor is its page paid for any longer"


def test_peak_pages_count_each_page_once() -> None:
    harness = make(num_pages=40)
    spec = request(1, range(9), max_tokens=4, sample_count=3, temperature=1.0)
    harness.add(spec)
    harness.run()
    bills = [harness.answers[number].end for number in (1, 2, 3)]
    found = [end.bill for end in bills if end is not None and end.bill is not None]
    assert len(found) == 1
    assert found[0].peak_pages == 2 + 3  # two shared, and one each
    assert found[0].saved_tokens == 2 * 8  # that the first sample computed for the others
    assert found[0].tail_waste_slots == 0  # 12 of 12 slots hold a token: 9 + 4 - 1


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
    check(
        harness, *[request(number, [first, 2, 3], max_tokens=8) for number, first in ((1, 7), (2, 7), (3, 9))]
    )
