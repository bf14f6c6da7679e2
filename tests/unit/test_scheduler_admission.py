"""Who is let in out of the queue: whole pages, rows, order, patience, and what those who wait are told of."""

from array import array

import pytest

from tests.toy_scheduler import MODEL, make, request, state
from worker.execution.testing import Harness, small_config
from worker.stats import WaitReason


def running(harness: Harness) -> list[int]:
    return [view.sequence_id for view in harness.scheduler.sequence_views() if view.row is not None]


def test_cached_pages_that_a_request_takes_over_are_not_available_to_it() -> None:
    """B011: N = 10, six cached and unreferenced; one that hits them and needs four more waits for nine."""
    harness = make(num_pages=10, max_context_tokens=40, max_running=4)
    blocker = request(1, range(500, 502), max_tokens=30)
    prefix = list(range(24))
    harness.add(request(2, prefix, max_tokens=1))
    harness.run()
    harness.add(blocker)
    harness.turn()
    cache = harness.scheduler.cache
    assert (cache.pool.num_cached, cache.pool.num_free, cache.num_available) == (6, 3, 9)
    spec = request(3, [*prefix, *range(100, 114)], max_tokens=2)  # 40 tokens: 10 pages, 6 of them cached
    harness.add(spec)
    before = state(harness)[:3]
    harness.turn()
    assert running(harness) == [1]
    assert state(harness)[:3] == before
    assert harness.scheduler.counts().waiting_by_reason[WaitReason.PAGES] == 1
    assert harness.scheduler.counts().allocation_failures_total == 1
    harness.run()
    assert len(harness.answers[3].tokens) == 2
    assert harness.answers[3].start is not None


def test_a_pool_full_of_cached_pages_admits_a_large_request() -> None:
    """B019: one that needs N - 1 pages succeeds after eviction."""
    harness = make(num_pages=10, max_context_tokens=40)
    for number in range(1, 6):
        harness.add(request(number, range(number * 50, number * 50 + 8), max_tokens=1))
        harness.run()
    assert harness.scheduler.cache.pool.num_free == 0
    harness.add(request(9, range(900, 934), max_tokens=2))
    harness.run()
    assert len(harness.answers[9].tokens) == 2
    counts = harness.scheduler.counts()
    assert counts.capacity_evictions_total == 9
    end = harness.answers[9].end
    assert end is not None
    assert end.bill is not None
    assert end.bill.evictions_caused == 9


def test_admission_leaves_the_watermark_to_those_who_run() -> None:
    harness = make(num_pages=10, watermark_pages=3, max_context_tokens=40)
    harness.add(request(1, range(9), max_tokens=3))
    harness.add(request(2, range(100, 116), max_tokens=2))
    harness.turn()
    assert running(harness) == [1]  # 3 + 5 of 10 would leave 2
    harness.run()
    assert len(harness.answers[2].tokens) == 2


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize(("num_pages", "is_let_in"), [(22, False), (23, True)])
def test_pages_that_a_prompt_and_its_samples_will_need_are_not_given_away(
    num_pages: int, is_let_in: bool, is_together: bool
) -> None:
    harness = make(num_pages=num_pages, max_step_tokens=16)
    harness.add(request(1, range(59), max_tokens=2, sample_count=4))  # 15 pages, and one for each sample more
    if not is_together:
        harness.turn()
    harness.add(request(10, range(100, 119), max_tokens=2))  # 5
    harness.turn()
    assert (10 in running(harness)) is is_let_in
    harness.run()
    assert len(harness.answers[10].tokens) == 2


def test_pages_that_had_to_be_evicted_are_on_the_bill_of_who_came_last() -> None:
    harness = make(num_pages=8)
    harness.add(request(1, range(16), max_tokens=1))
    harness.run()
    harness.add(request(2, range(100, 112), max_tokens=1))
    harness.add(request(3, range(200, 212), max_tokens=1))
    harness.run()
    bills = [end.bill for number in (2, 3) if (end := harness.answers[number].end) is not None]
    assert [bill.evictions_caused for bill in bills if bill is not None] == [0, 2]


def test_so_many_that_wait_are_looked_at_and_no_more() -> None:
    for num_scanned, is_let_in in ((2, False), (3, True)):
        harness = make(num_pages=8, max_scanned=num_scanned)
        harness.add(request(1, range(16), max_tokens=8))
        harness.turn()
        for number in (2, 3):
            harness.add(request(number, range(100 * number, 100 * number + 20)))
        harness.add(request(4, range(400, 403)))
        harness.turn()
        assert (4 in running(harness)) is is_let_in


def test_a_wait_for_pages_is_counted_once_however_long() -> None:
    harness = make(num_pages=8)
    harness.add(request(1, range(16), max_tokens=8))
    harness.turn()
    harness.add(request(2, range(100, 120)))
    for _ in range(3):
        harness.turn()
    assert harness.scheduler.counts().allocation_failures_total == 1


def test_alone_a_request_may_use_the_watermark_too() -> None:
    """H15: nobody waits for pages that nobody else will give back."""
    harness = make(num_pages=10, watermark_pages=9, max_context_tokens=40)
    harness.add(request(1, range(30), max_tokens=10))
    harness.run(max_turns=30)
    assert len(harness.answers[1].tokens) == 10


def test_the_order_is_priority_then_arrival() -> None:
    harness = make(max_running=1, max_step_tokens=9)
    harness.add(request(9, range(4), max_tokens=1))
    for number, priority in ((1, 0), (2, 5), (3, 0), (4, -1), (5, 5)):
        harness.add(request(number, range(number * 10, number * 10 + 4), max_tokens=1, priority=priority))
    order = []
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is not None:
            order += list(step.sequence_ids)
    assert order == [2, 5, 9, 1, 3, 4]


def test_waiting_makes_up_for_priority() -> None:
    """Aging: after aging_seconds an old request goes before one of the next higher priority."""
    for waited, first in ((0.5, 2), (1.5, 1)):
        harness = make(max_running=1, max_step_tokens=9, aging_seconds=1.0)
        harness.add(request(9, range(4), max_tokens=2, priority=9))
        harness.turn()
        harness.add(request(1, range(4), max_tokens=1, priority=0))
        harness.now += waited
        harness.add(request(2, range(4), max_tokens=1, priority=1))
        harness.turn()
        harness.turn()
        assert bool(harness.answers[1].tokens) == (first == 1)
        assert bool(harness.answers[2].tokens) == (first == 2)


@pytest.mark.parametrize("max_skips", [0, 2, 5])
def test_small_requests_pass_a_big_one_only_so_often(max_skips: int) -> None:
    """M-20 lets the first that does not fit stop all others; here a bounded count may pass it."""
    harness = make(num_pages=12, max_skips=max_skips, max_running=8, max_context_tokens=48)
    harness.add(request(1, range(20), max_tokens=25))
    harness.turn()
    harness.add(request(2, range(100, 140), max_tokens=2))  # needs 11 of 12 pages
    for number in range(3, 13):
        harness.add(request(number, [number], max_tokens=2))
    for _ in range(12):
        harness.turn()
    passed = [number for number in range(3, 13) if harness.answers[number].start is not None]
    assert len(passed) == max_skips
    assert harness.answers[2].start is None
    harness.run()
    assert len(harness.answers[2].tokens) == 2


def test_nobody_passes_one_that_waits_for_the_tokens_of_a_step() -> None:
    harness = make(num_pages=64, max_running=2, max_step_tokens=4, max_context_tokens=128)
    harness.add(request(1, range(50)))
    harness.add(request(2, range(100, 103)))
    step = harness.launch()
    assert step is not None
    assert list(step.sequence_ids) == [1, 2]
    harness.settle()


def test_waiting_requests_are_counted_by_reason_and_add_up() -> None:
    harness = make(num_pages=40, max_running=2)
    for number in range(1, 7):
        harness.add(request(number, range(number * 20, number * 20 + 9), max_tokens=9))
    counts = harness.scheduler.counts()
    assert (counts.waiting_requests, counts.waiting_uncached_tokens) == (6, 54)
    harness.turn()
    counts = harness.scheduler.counts()
    assert (counts.running_requests, counts.running_sequences, counts.waiting_requests) == (2, 2, 4)
    assert sum(counts.waiting_by_reason.values()) == 4
    assert counts.waiting_by_reason[WaitReason.ROWS] == 4
    assert counts.waiting_uncached_tokens == 36
    assert counts.allocation_failures_total == 0, "no page was missing"
    harness.abort(4)
    counts = harness.scheduler.counts()
    assert (counts.waiting_requests, counts.waiting_by_reason[WaitReason.ROWS]) == (3, 3)
    assert (sum(counts.waiting_by_reason.values()), min(counts.waiting_by_reason.values())) == (3, 0)
    harness.run()
    counts = harness.scheduler.counts()
    assert (counts.running_requests, counts.waiting_requests, counts.waiting_uncached_tokens) == (0, 0, 0)


def test_a_resumed_request_whose_output_is_still_cached_waits_with_what_is_left_to_compute() -> None:
    """Hits may reach past its prompt: what it had generated is in the cache of the worker that it left."""
    harness = make(num_pages=40, max_running=1)
    harness.add(request(1, range(9), max_tokens=15))
    harness.run()
    known = harness.answers[1].tokens
    harness.add(request(2, range(100, 105), max_tokens=9))
    harness.turn()  # it has the only row
    harness.add(request(3, range(9), max_tokens=20, resume_token_ids=known, attempt=1))
    counts = harness.scheduler.counts()
    size, num_known = harness.scheduler.config.page_size, 9 + len(known)
    assert counts.waiting_uncached_tokens == num_known - (num_known - 1) // size * size
    assert counts.waiting_uncached_tokens < len(known)
    harness.run()
    assert harness.scheduler.counts().waiting_uncached_tokens == 0


def test_a_request_that_waits_for_pages_is_not_looked_up_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt at the head of the queue costs nothing while it cannot fit; now and then it is tried."""
    harness = make(num_pages=12, max_context_tokens=48, max_running=4)
    harness.add(request(1, range(20), max_tokens=28))
    harness.turn()
    harness.add(request(2, range(100, 140), max_tokens=2))
    index, lookups = harness.scheduler.cache.index, 0
    match = index.match

    def counted(tokens: "array[int]", salt: bytes, most: int) -> list[int]:
        nonlocal lookups
        lookups += 1
        return match(tokens, salt, most)

    monkeypatch.setattr(index, "match", counted)
    version = index.version
    for _ in range(20):
        harness.turn()
    assert index.version > version + 3, "what it looked up would have to be looked up again"
    assert lookups == 1


def test_one_that_waits_for_pages_is_let_in_as_soon_as_they_come_back() -> None:
    harness = make(num_pages=12, max_context_tokens=48, max_running=4)
    harness.add(request(1, range(20), max_tokens=28))
    harness.add(request(2, range(50, 66), max_tokens=3))
    harness.turn()
    harness.add(request(3, range(100, 112), max_tokens=2))
    harness.turn()
    assert running(harness) == [1, 2]
    while harness.answers[2].end is None:
        harness.turn()
    harness.turn()
    assert running(harness) == [1, 3]


def test_pages_that_an_aborted_prompt_was_promised_are_there_for_others_at_once() -> None:
    harness = make(num_pages=20, max_chunk_tokens=4, sharing=False)
    harness.add(request(1, range(4), max_tokens=30))
    harness.turn()
    harness.add(request(2, range(100, 159), max_tokens=2))  # 15 pages, of which it takes one a step
    harness.add(request(3, range(200, 219), max_tokens=2))  # 5
    harness.turn()
    assert running(harness) == [1, 2]
    harness.abort(2)
    harness.turn()
    assert running(harness) == [1, 3]


@pytest.mark.parametrize(("num_pages", "is_let_in"), [(7, False), (8, True)])
def test_samples_are_let_in_with_a_page_for_each_that_goes_on_alone(num_pages: int, is_let_in: bool) -> None:
    harness = make(num_pages=num_pages)
    harness.add(request(1, range(8), max_tokens=8))
    harness.turn()  # it has two pages, and takes the third with the next step
    harness.add(request(10, range(100, 109), max_tokens=2, sample_count=3))  # 3 pages and 2
    harness.turn()
    assert (10 in running(harness)) is is_let_in
    harness.run()
    assert [len(harness.answers[number].tokens) for number in (10, 11, 12)] == [2, 2, 2]


def test_the_start_of_a_request_is_told_with_its_first_id_though_that_sample_has_ended() -> None:
    harness = make(max_running=3)
    harness.add(request(1, range(4), max_tokens=3))
    harness.turn()
    harness.add(request(2, range(50, 54), max_tokens=2, sample_count=3))
    harness.abort(2)
    harness.run()
    assert [harness.answers[number].num_starts for number in (2, 3, 4)] == [1, 0, 0]
    assert [len(harness.answers[number].tokens) for number in (3, 4)] == [2, 2]


def test_four_thousand_small_requests_are_admitted_in_one_step_quickly() -> None:
    """Admission is linear: no quadratic walk over those already let in."""
    harness = Harness(
        small_config(num_pages=9000, max_running=4096, max_step_tokens=20_000, max_queued_requests=5000),
        MODEL,
        audit=False,
    )
    for number in range(1, 4097):
        harness.scheduler.add(request(number, [number, 7], max_tokens=2), 1.0)
    step = harness.scheduler.schedule(1.0)
    assert step is not None
    assert len(step.rows) == 4096
