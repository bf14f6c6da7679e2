"""Who is taken and who is let in: limits at arrival, whole pages at admission, order, patience."""

from array import array

import pytest

from tests.toy_scheduler import MODEL, make, request
from worker.execution.testing import Harness, small_config
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AddStatus, RequestSpec
from worker.stats import WaitReason


def state(harness: Harness) -> tuple[object, ...]:
    cache = harness.scheduler.cache
    return (
        cache.events.number,
        cache.pool.counts_by_state(),
        list(cache.pool.free_slots()),
        harness.scheduler.counts().waiting_requests,
    )


def running(harness: Harness) -> list[int]:
    return [view.sequence_id for view in harness.scheduler.sequence_views() if view.row is not None]


# At arrival.


@pytest.mark.parametrize(
    ("length", "status"),
    [(31, AddStatus.ACCEPTED), (32, AddStatus.TOO_LONG), (33, AddStatus.TOO_LONG), (500, AddStatus.TOO_LONG)],
)
def test_an_over_long_prompt_gets_an_answer_with_both_numbers(length: int, status: AddStatus) -> None:
    """H7, B044: a prompt that leaves no room for a token is refused in words, nothing is cut."""
    harness = make(max_context_tokens=32)
    outcome = harness.add(request(1, range(length)))
    assert outcome.status == status
    if status == AddStatus.TOO_LONG:
        assert str(length) in outcome.message
        assert "context of 32" in outcome.message
        assert harness.scheduler.num_live == 0


def test_output_to_resume_from_takes_room_in_the_context() -> None:
    for length, status in ((11, AddStatus.ACCEPTED), (12, AddStatus.TOO_LONG)):
        harness = make(max_context_tokens=32)
        resumed = request(1, range(20), max_tokens=1000, resume_token_ids=list(range(length)))
        assert harness.add(resumed).status == status


def test_more_output_than_the_context_holds_is_clamped_not_refused() -> None:
    """B044: the prompt fits; the answer ends as CONTEXT_LENGTH."""
    harness = make(max_context_tokens=32)
    assert harness.add(request(1, range(20), max_tokens=1000)).status == AddStatus.ACCEPTED
    harness.run()
    assert len(harness.answers[1].tokens) == 12
    assert harness.answers[1].code == FinishCode.CONTEXT_LENGTH


@pytest.mark.parametrize("num_pages", [8, 16])
def test_a_request_that_can_never_fit_the_pool_fails_at_once(num_pages: int) -> None:
    """H15, B033, S1-03: usable pages are N, not N + 1; the numbers are in the answer."""
    harness = make(num_pages=num_pages, max_context_tokens=1000)
    fits = num_pages * 4
    before = state(harness)
    refused = harness.add(request(1, range(8), max_tokens=fits - 7))
    assert (refused.status, refused.needed_pages) == (AddStatus.NEVER_FITS, num_pages + 1)
    assert refused.total_pages == num_pages
    assert state(harness) == before
    assert harness.add(request(1, range(8), max_tokens=fits - 8)).status == AddStatus.ACCEPTED
    harness.run()
    assert len(harness.answers[1].tokens) == fits - 8


def test_the_queue_has_an_end() -> None:
    harness = make(max_running=1, max_queued_requests=2)
    for number in (1, 2):
        assert harness.add(request(number, range(4))).status == AddStatus.ACCEPTED
    full = harness.add(request(3, range(4)))
    assert (full.status, full.queue_position) == (AddStatus.QUEUE_FULL, 2)
    harness.turn()
    assert harness.add(request(3, range(4))).status == AddStatus.ACCEPTED


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (request(1, []), "prompt is empty"),
        (request(1, range(3), max_tokens=0), "max_tokens is 0"),
        (request(1, range(3), sample_count=0), "0 samples"),
        (request(1, range(3), sample_count=9), "9 samples, possible are 1 .. 8"),
        (request(1, range(3), sample_count=2, resume_token_ids=[1]), "only a single sample"),
        (request(1, range(3), max_tokens=2, resume_token_ids=[1, 2]), "2 tokens to resume from"),
    ],
)
def test_a_value_that_the_service_should_have_refused_is_named(spec: RequestSpec, message: str) -> None:
    outcome = make().add(spec)
    assert outcome.status == AddStatus.INVALID
    assert message in outcome.message


def test_a_sequence_id_that_is_live_is_refused() -> None:
    harness = make()
    harness.add(request(1, range(3), sample_count=3))
    assert harness.scheduler.add(request(3, range(3)), 1.0).status == AddStatus.INVALID
    assert harness.scheduler.add(request(0, range(3), sample_count=2), 1.0).status == AddStatus.INVALID
    assert harness.scheduler.add(request(4, range(3)), 1.0).status == AddStatus.ACCEPTED


def test_the_answer_says_what_all_samples_need_at_most() -> None:
    """The page with the last prompt token is each sample's own, also where the prompt ends with it."""
    harness = make(num_pages=40)
    outcome = harness.add(request(1, range(9), max_tokens=7, sample_count=3))
    assert outcome.needed_pages == 2 + 3 * 2
    assert outcome.total_pages == 40
    second = harness.add(request(4, range(8), max_tokens=8, sample_count=3))
    assert (second.needed_pages, second.queue_position) == (1 + 3 * 3, 1)


def test_a_full_queue_does_not_hide_that_a_request_never_fits() -> None:
    """The one may be tried again, the other never."""
    harness = make(num_pages=4, max_running=1, max_queued_requests=1)
    harness.add(request(1, range(4)))
    assert harness.add(request(2, range(4))).status == AddStatus.QUEUE_FULL
    assert harness.add(request(2, range(4), max_tokens=13)).status == AddStatus.NEVER_FITS


# Out of the queue.


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
