"""Every sequence ends exactly once, in whatever phase, and gives back what it had exactly once."""

from array import array
from collections.abc import Callable

import pytest

from tests.toy_scheduler import BOTH, MODEL, alone, make, request
from worker.execution.fake_runner import FakeModel, answer_alone, token_logprob
from worker.execution.testing import Harness, small_config
from worker.ids import SequenceId
from worker.scheduling.output import NO_TOKEN, FailureReason, FinishCode
from worker.scheduling.request import AbortReason, AddStatus
from worker.scheduling.step import StepResult


def assert_whole(harness: Harness) -> None:
    """Nothing is held, and after a flush everything is free."""
    pool = harness.scheduler.cache.pool
    assert (pool.num_active, pool.num_references) == (0, 0)
    harness.scheduler.flush(harness.now, include_active=True)
    assert pool.num_free == pool.num_pages
    harness.audit()


@BOTH
@pytest.mark.parametrize("how", ["length", "eos", "stop"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_page_comes_back_exactly_once(page_size: int, how: str, overlap: bool) -> None:
    """B002: page size 1 and 4, chunks of 4, ending by length, by EOS and by a stop id."""
    model = FakeModel(1000, (5,), eos_every=20 if how != "length" else 0)
    eos = frozenset({5}) if how == "eos" else frozenset[int]()
    stop = frozenset({5}) if how == "stop" else frozenset[int]()
    harness = make(
        overlap, model, num_pages=256 // page_size, page_size=page_size, max_chunk_tokens=4,
        max_context_tokens=256, eos_token_ids=eos,
    )  # fmt: skip
    harness.add(request(1, range(6), max_tokens=200, stop_token_ids=stop))
    harness.run()
    expected = {"length": FinishCode.MAX_TOKENS, "eos": FinishCode.EOS, "stop": FinishCode.STOP_TOKEN}
    assert harness.answers[1].code == expected[how]
    assert_whole(harness)


@BOTH
@pytest.mark.parametrize("turns", range(8))
def test_abort_in_every_phase_returns_every_page(turns: int, overlap: bool) -> None:
    """M-21, H3a, H3b: waiting, between chunks, in prefill, running; pages come back one step later."""
    harness = make(overlap, max_chunk_tokens=3)
    spec = request(1, range(10), max_tokens=20)
    harness.add(spec)
    for _ in range(turns):
        harness.turn()
    harness.abort(1)
    answer = harness.answers[1]
    assert answer.code == FinishCode.ABORTED
    assert answer.end is not None
    assert answer.end.completion_tokens == len(answer.tokens)
    assert answer.tokens == alone(spec)[: len(answer.tokens)]
    harness.settle()
    assert harness.scheduler.cache.pool.num_active == 0
    assert not harness.scheduler.has_work(harness.now)
    assert_whole(harness)


def test_abort_while_the_last_token_is_in_flight_frees_once() -> None:
    """H3a: the step that samples EOS or reaches the length is under way when the abort comes."""
    for max_tokens in (1, 3):
        harness = make()
        harness.add(request(1, range(6), max_tokens=max_tokens))
        for _ in range(max_tokens - 1):
            harness.turn()
        assert harness.launch() is not None
        harness.abort(1)
        harness.abort(1)
        harness.settle()
        assert harness.answers[1].code == FinishCode.ABORTED
        assert len(harness.answers[1].tokens) == max_tokens - 1
        assert_whole(harness)


def test_abort_while_the_prompt_is_in_flight_leaves_nothing_in_the_cache() -> None:
    """H3b: what the step computes is not entered any more."""
    harness = make()
    harness.add(request(1, range(12)))
    assert harness.launch() is not None
    harness.abort(1)
    pool = harness.scheduler.cache.pool
    assert pool.num_active == 3  # the step still writes them
    harness.settle()
    assert (pool.num_active, pool.num_cached) == (0, 0)
    assert_whole(harness)


def test_row_and_pages_wait_for_the_step_in_flight() -> None:
    """H6: with one row and a full pool, the next sequence starts only when the step before is over."""
    harness = make(overlap=True, num_pages=4, max_running=1, max_context_tokens=16)
    harness.add(request(1, range(12), max_tokens=4))
    second = request(2, range(50, 62), max_tokens=4)
    harness.add(second)
    assert harness.launch() is not None
    harness.abort(1)
    assert harness.launch() is None
    assert harness.scheduler.wants_commit
    harness.commit()
    step = harness.launch()
    assert step is not None
    assert list(step.sequence_ids) == [2]
    harness.settle()
    harness.run()
    assert harness.answers[2].tokens == alone(second)


def test_a_stop_seen_late_costs_one_discarded_token() -> None:
    """H6: the step after the one that sampled EOS is in flight: its token is dropped, pages wait."""
    model = FakeModel(1000, (5,), eos_every=6)
    harness = make(True, model, eos_token_ids=frozenset({5}))
    spec = request(1, range(3), max_tokens=50)
    harness.add(spec)
    computed = 0
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        computed += len(step.sampled) if step is not None else 0
    expected = answer_alone(model, range(3), spec.params, 0, frozenset({5}), 64)
    assert harness.answers[1].tokens == expected
    assert harness.answers[1].code == FinishCode.EOS
    assert computed == len(expected) + 1
    assert_whole(harness)


def test_pages_of_an_ended_sequence_come_back_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """M-13: frees inside commit are batched by sequence, not made page by page."""
    harness = make(num_pages=64, max_context_tokens=128)
    pool = harness.scheduler.cache.pool
    calls: list[int] = []
    release = pool.release

    def counted(pages: list[int], owner: int) -> list[int]:
        calls.append(len(pages))
        return release(pages, owner)

    monkeypatch.setattr(pool, "release", counted)
    for number in (1, 2):
        harness.add(request(number, range(200 * number, 200 * number + 90), max_tokens=1))
    harness.run()
    assert calls == [23, 23]


def test_unknown_and_ended_ids_are_ignored() -> None:
    harness = make()
    harness.add(request(1, range(6), max_tokens=1))
    harness.run()
    assert harness.scheduler.abort([1, 2, 999], AbortReason.CLIENT, harness.now) == 0
    assert harness.scheduler.take_outputs() == {}


def test_an_end_without_a_step_stands_in_the_columns_like_any_other() -> None:
    harness = make()
    harness.scheduler.add(request(1, range(6), source="a"), 1.0)
    harness.scheduler.abort([1], AbortReason.CLIENT, 1.0)
    columns = harness.scheduler.take_outputs()["a"]
    assert list(columns.sequence_ids) == [1]
    assert list(columns.token_ids) == [NO_TOKEN]
    assert list(columns.finish_codes) == [FinishCode.ABORTED]
    assert [end.code for end in columns.ends] == [FinishCode.ABORTED]
    assert columns.ends[0].bill is not None


# Failures.


def fails_at(number: int, position: int) -> Callable[[SequenceId, int], str | None]:
    return lambda sequence_id, end: "NaN" if (sequence_id, end) == (number, position) else None


@BOTH
@pytest.mark.parametrize("position", [8, 10, 12])
def test_only_the_sequence_that_failed_ends_and_its_pages_are_not_published(
    position: int, overlap: bool
) -> None:
    """B057, B102: in a batch of four; what it computed in that step is not in the cache, the rest goes on."""
    harness = Harness(small_config(num_pages=40), MODEL, overlap=overlap, fail=fails_at(2, position))
    specs = [request(number, range(100 * number, 100 * number + 8), max_tokens=12) for number in range(1, 5)]
    for spec in specs:
        harness.add(spec)
    harness.run()
    for spec in specs:
        if spec.sequence_id != 2:
            assert harness.answers[spec.sequence_id].tokens == alone(spec)
    answer = harness.answers[2]
    assert answer.end is not None
    assert (answer.code, answer.end.failure) == (FinishCode.FAILED, FailureReason.INTERNAL)
    assert answer.end.message == "NaN"
    assert answer.tokens == alone(specs[1])[: position - 8]
    harness.add(request(9, [*specs[1].prompt_token_ids, *alone(specs[1])], max_tokens=1))
    harness.run()
    start = harness.answers[9].start
    assert start is not None
    assert start.reused_pages == {8: 0, 10: 2, 12: 2}[position]


def test_sequences_can_be_failed_from_outside() -> None:
    harness = make()
    harness.add(request(1, range(6)))
    harness.add(request(2, range(20, 26)))
    harness.turn()
    failed = harness.scheduler.fail([1, 77], FailureReason.INTERNAL, "broken", harness.now)
    assert failed == 1
    harness.run()
    assert harness.answers[1].code == FinishCode.FAILED
    assert harness.answers[2].tokens == alone(request(2, range(20, 26)))
    assert_whole(harness)


@BOTH
def test_a_step_that_came_to_nothing_takes_its_sequences_along(overlap: bool) -> None:
    harness = make(overlap)
    harness.add(request(1, range(6)))
    step = harness.launch()
    assert step is not None
    harness.add(request(2, range(20, 26)))
    harness.abandon(FailureReason.DEVICE_OUT_OF_MEMORY, "no memory")
    answer = harness.answers[1]
    assert answer.end is not None
    assert (answer.code, answer.end.failure) == (FinishCode.FAILED, FailureReason.DEVICE_OUT_OF_MEMORY)
    harness.run()
    assert harness.answers[2].tokens == alone(request(2, range(20, 26)))
    assert_whole(harness)


def test_a_result_of_the_wrong_length_is_caught() -> None:
    harness = make()
    harness.add(request(1, range(6)))
    step = harness.launch()
    assert step is not None
    with pytest.raises(AssertionError, match="1 tokens expected, 2 came"):
        harness.scheduler.commit(step, StepResult([1, 2]), harness.now)


def test_steps_are_committed_in_order() -> None:
    harness = make(overlap=True)
    harness.add(request(1, range(6)))
    first, second = harness.launch(), harness.launch()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="step 2 committed before 1"):
        harness.scheduler.commit(second, StepResult([1]), harness.now)


# Times.


def test_a_deadline_ends_a_request_in_every_phase() -> None:
    for turns in (0, 1, 3):
        harness = make(max_running=1, max_step_tokens=9)
        harness.add(request(1, range(6), max_tokens=30, deadline=harness.now + 1.0))
        harness.add(request(2, range(6), max_tokens=2, sample_count=1, deadline=harness.now + 1.0))
        for _ in range(turns):
            harness.turn()
        harness.now += 1.0
        harness.turn()
        assert harness.answers[1].code == FinishCode.TIMED_OUT
        assert harness.answers[2].code == FinishCode.TIMED_OUT
        harness.run()
        assert_whole(harness)


def test_a_queue_timeout_ends_only_what_was_not_admitted() -> None:
    harness = make(max_running=1)
    harness.add(request(1, range(6), max_tokens=30, queue_deadline=harness.now + 0.1))
    harness.add(request(2, range(6), max_tokens=30, queue_deadline=harness.now + 0.1))
    harness.turn()
    harness.now += 0.2
    harness.run()
    assert harness.answers[1].code == FinishCode.MAX_TOKENS
    assert harness.answers[2].code == FinishCode.QUEUE_TIMEOUT


def test_the_longest_duration_counts_from_admission() -> None:
    harness = make(max_running=1)
    harness.add(request(1, range(6), max_tokens=20))
    harness.add(request(2, range(6), max_tokens=58, max_duration_seconds=0.1))
    harness.run()
    answer = harness.answers[2]
    assert answer.code == FinishCode.TIME_LIMIT
    assert 3 <= len(answer.tokens) <= 15
    assert answer.tokens == alone(request(2, range(6), max_tokens=58))[: len(answer.tokens)]


def test_an_idle_scheduler_knows_until_when_it_may_sleep() -> None:
    harness = make(num_pages=4, max_running=1, max_context_tokens=16)
    scheduler = harness.scheduler
    assert not scheduler.has_work(harness.now)
    assert scheduler.next_deadline(harness.now) is None
    harness.add(request(1, range(6), max_tokens=2, deadline=50.0, queue_deadline=40.0))
    assert scheduler.has_work(harness.now)
    assert scheduler.next_deadline(harness.now) == 40.0
    harness.run()
    assert not scheduler.has_work(harness.now)
    assert scheduler.has_work(60.0)  # to throw entries away
    harness.now = 60.0
    harness.turn()
    assert scheduler.next_deadline(harness.now) is None


def test_timers_of_ended_requests_do_not_pile_up() -> None:
    harness = Harness(small_config(), MODEL, audit=False)
    for number in range(1, 2000):
        harness.add(request(number, [1, 2], max_tokens=1, deadline=1e9, queue_deadline=1e9))
        harness.run()
    assert len(harness.scheduler._books.timers._heap) < 200


# Services, drains.


def test_a_lost_service_ends_silently() -> None:
    harness = make()
    for number, source in ((1, "a"), (2, "b"), (3, "a")):
        harness.add(request(number, range(number * 10, number * 10 + 6), max_tokens=9, source=source))
    harness.turn()
    assert harness.scheduler.num_live_of("a") == 2
    assert harness.scheduler.drop_source("a", harness.now) == 2
    assert not harness.scheduler.is_live(1)
    assert harness.scheduler.take_outputs() == {}
    harness.run()
    assert harness.answers[1].end is None
    assert harness.answers[2].code == FinishCode.MAX_TOKENS
    assert_whole(harness)


def test_what_a_lost_service_was_not_told_yet_is_forgotten_with_it() -> None:
    harness = make()
    scheduler, runner = harness.scheduler, harness.runner
    for number, source in ((1, "a"), (2, "b")):
        scheduler.add(request(number, range(6), source=source), 1.0)
    step = scheduler.schedule(1.0)
    assert step is not None
    scheduler.commit(step, runner.launch(step).result(), 1.0)
    scheduler.drop_source("a", 1.0)
    assert scheduler.take_outputs().keys() == {"b"}


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    harness = make()
    harness.add(request(1, range(6)))
    harness.scheduler.set_draining(True)
    assert harness.add(request(2, range(6))).status == AddStatus.DRAINING
    harness.run()
    assert harness.answers[1].code == FinishCode.MAX_TOKENS
    harness.scheduler.set_draining(False)
    assert harness.add(request(2, range(6))).status == AddStatus.ACCEPTED


@BOTH
def test_what_a_drain_does_not_wait_for_is_resumed_elsewhere(overlap: bool) -> None:
    """DRAINED with the tokens so far; another worker goes on with the same tokens."""
    spec = request(1, range(6), max_tokens=20, temperature=1.0, seed=9)
    harness = make(overlap)
    harness.add(spec)
    for _ in range(6):
        harness.turn()
    assert harness.scheduler.drain_rest(harness.now) == 1
    harness.collect()
    harness.settle()
    answer = harness.answers[1]
    assert answer.code == FinishCode.DRAINED
    assert_whole(harness)
    other = make()
    other.add(
        request(
            1, range(6), max_tokens=20, temperature=1.0, seed=9, resume_token_ids=answer.tokens, attempt=1
        )
    )
    other.run()
    assert answer.tokens + other.answers[1].tokens == alone(spec)


@BOTH
def test_a_prompt_whose_first_token_ends_it_leaves_its_pages_in_the_cache(overlap: bool) -> None:
    """Its pages are sealed before they are given back, though first tokens of others go out before that."""
    harness = make(overlap)
    for number, stops in ((1, False), (2, True), (3, False)):
        prompt = range(100 * number, 100 * number + 9)
        (token,) = alone(request(1, prompt, max_tokens=1))
        stop_ids = frozenset({token}) if stops else frozenset()
        harness.add(request(number, prompt, max_tokens=5, stop_token_ids=stop_ids))
    harness.run()
    assert [len(harness.answers[number].tokens) for number in (1, 2, 3)] == [5, 1, 5]
    assert harness.answers[2].code == FinishCode.STOP_TOKEN
    assert len(harness.scheduler.cache.lookup(array("I", range(200, 209)), b"", 2).pages) == 2
    assert_whole(harness)


def test_scores_stay_with_their_tokens_when_a_step_leaves_others_out() -> None:
    """Of sequences that ended since the launch, and of those that failed in it; for each service its own."""
    harness = Harness(
        small_config(num_pages=64),
        MODEL,
        overlap=True,
        fail=lambda sequence_id, end: "broken" if (sequence_id, end) == (4, 9) else None,
    )
    for number in range(1, 7):
        prompt = range(100 * number, 100 * number + 6)
        source = "one" if number % 3 else "two"
        harness.add(request(number, prompt, max_tokens=9, logprobs=0, source=source))
    for _ in range(3):
        harness.turn()
    harness.abort(1)
    harness.run()
    assert harness.answers[4].code == FinishCode.FAILED
    for number, answer in harness.answers.items():
        ids = [*range(100 * number, 100 * number + 6), *answer.tokens]
        assert answer.logprobs == [token_logprob(ids[:at], ids[at]) for at in range(6, len(ids))]
        assert len(answer.tokens) == {1: 2, 4: 3}.get(number, 9)
