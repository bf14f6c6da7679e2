"""What becomes of a request: admission, limits, cancels, ends and the bill, without socket and stream."""

from collections.abc import Iterator
from time import monotonic
from types import SimpleNamespace

import pytest

from service.errors import Failure, draining
from service.handlers.choice import Finish
from service.request import (
    AbortReason,
    AddOutcome,
    AddStatus,
    FinishCode,
    FinishReason,
    KvBill,
    Output,
    Scores,
    SequenceEnd,
    SequenceStart,
    Stops,
)
from tests.run_bench import PROMPT, Bench, FakeLink, Loop, begin, lose, running_loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield from running_loop()


def test_the_place_in_the_queue_is_never_more_than_a_later_heartbeat_says(loop: Loop) -> None:
    link = FakeLink("a")
    stale = link.beat = SimpleNamespace(waiting_requests=1)
    bench = Bench(loop, link)
    bench.run.submit()
    outcome = AddOutcome(link.sent[0].sequence_id, AddStatus.ACCEPTED, queue_position=5)
    link.runs.take_outcome(outcome)
    bench.run.settle()
    assert bench.run.queue_position(outcome) == 5
    link.beat = SimpleNamespace(**vars(stale))
    assert bench.run.queue_position(outcome) == 0, "the one that waits is this one"
    link.beat = SimpleNamespace(waiting_requests=9)
    assert bench.run.queue_position(outcome) == 5
    link.beat = SimpleNamespace(waiting_requests=0)
    assert bench.run.queue_position(outcome) == 0


def test_a_request_that_all_refuse_at_first_gets_the_last_refusal(loop: Loop) -> None:
    a, b = FakeLink("a"), FakeLink("b")
    bench = Bench(loop, a, b)
    bench.run.submit()
    a.answer(AddStatus.QUEUE_FULL)
    bench.run.settle()
    assert (len(a.sent), len(b.sent)) == (1, 1)
    b.answer(AddStatus.DRAINING)
    with pytest.raises(Failure) as refused:
        bench.run.settle()
    assert refused.value.reason == "DRAINING"
    assert (len(a.sent), len(b.sent)) == (1, 1)
    bench = Bench(loop, b, a)
    bench.run.submit()
    b.answer(AddStatus.FEATURE_DISABLED)
    with pytest.raises(Failure):
        bench.run.settle()
    assert (len(a.sent), len(b.sent)) == (1, 2), "what is wrong with a request is wrong everywhere"


def test_a_cancel_ends_samples_wherever_they_are(loop: Loop) -> None:
    """One runs, one waits for a worker, and the loss of one was not heard of yet."""
    a, b = FakeLink("a"), FakeLink("b")
    bench = Bench(loop, a, samples=3)
    bench.run.submit()
    first = a.sent[0].sequence_id
    a.step(*((first + each, 65) for each in range(3)), starts=[first])
    bench.run.take()
    a.step(ends=[(first + 1, FinishCode.DRAINED)])
    bench.pool.usable = [b]
    bench.run.settle()
    bench.pool.usable = []
    a.step(ends=[(first + 2, FinishCode.DRAINED)])
    bench.run.settle()
    assert bench.run.is_homeless
    assert bench.pool.watchers
    lose(b)
    bench.run.cancel()
    bench.run.cancel()
    assert not bench.pool.watchers
    assert a.aborted == [([first], AbortReason.CANCELLED)]
    assert not b.aborted
    bench.run.settle()
    assert not bench.run.is_homeless
    a.step(ends=[(first, FinishCode.ABORTED)])
    pieces = bench.run.take()
    assert pieces is not None
    assert [(piece.sample, piece.finish and piece.finish.reason.name) for piece in pieces] == [
        (each, "CANCELLED") for each in range(3)
    ]
    assert bench.run.take() is None


def test_a_refusal_that_crosses_a_cancel_is_its_end(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    bench.run.submit()
    bench.run.cancel()
    link.answer(AddStatus.QUEUE_FULL)
    pieces = bench.run.take()
    assert pieces is not None
    assert pieces[0].finish is not None
    assert bench.run.is_admitted
    assert bench.run.take() is None
    assert len(link.sent) == 1


def test_closing_stops_what_runs_and_forgets_it_and_says_why(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    begin(bench, link)
    bench.run.close(AbortReason.DEADLINE)
    bench.run.close(AbortReason.CLIENT)
    first = link.sent[0].sequence_id
    assert link.aborted == [([first], AbortReason.DEADLINE)]
    assert not link.carries(first)
    bench.choices[0].box.put(66)
    assert not bench.choices[0].box.tokens, "nobody reads what still comes"
    bench = Bench(loop, link)
    begin(bench, link)
    bench.pool.usable = []
    lose(link)
    bench.run.settle()
    bench.run.close(AbortReason.CLIENT)
    assert not bench.pool.watchers
    assert not bench.run.is_homeless


def test_a_run_that_was_failed_is_stopped_for_that_reason(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    begin(bench, link)
    bench.inbox._has_news = False
    failure = draining()
    bench.run.fail(failure, AbortReason.OPERATOR)
    bench.run.fail(draining(), AbortReason.SERVICE_ERROR)
    assert bench.inbox._has_news
    with pytest.raises(Failure) as raised:
        bench.run.settle()
    assert raised.value is failure
    bench.run.close(AbortReason.CLIENT)
    assert [reason for _, reason in link.aborted] == [AbortReason.OPERATOR]


def test_a_place_in_the_queue_can_be_told_without_a_worker_and_before_a_heartbeat(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    bench.run.submit()
    outcome = AddOutcome(link.sent[0].sequence_id, AddStatus.ACCEPTED, queue_position=5)
    link.runs.take_outcome(outcome)
    bench.run.settle()
    assert bench.run.outcome is outcome
    assert bench.run.queue_position(outcome) == 5
    assert not bench.run.is_admitted
    bench.pool.usable = []
    lose(link)
    bench.run.settle()
    assert bench.run.queue_position(outcome) == 5


def test_without_a_worker_a_request_is_refused_first_and_last(loop: Loop) -> None:
    bench = Bench(loop)
    with pytest.raises(Failure) as refused:
        bench.run.submit()
    assert refused.value.reason == "NOT_READY"
    link = FakeLink("a")
    bench = Bench(loop, link)
    bench.run.submit()
    bench.pool.usable = []
    link.answer(AddStatus.QUEUE_FULL)
    with pytest.raises(Failure) as refused:
        bench.run.settle()
    assert refused.value.reason == "QUEUE_FULL"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (FinishCode.TIMED_OUT, "DEADLINE_PASSED"),
        (FinishCode.QUEUE_TIMEOUT, "QUEUE_TIMEOUT"),
        (FinishCode.FAILED, "INTERNAL"),
        (FinishCode.ABORTED, "INTERNAL"),
    ],
)
def test_ends_that_are_none_of_a_model_end_the_call(loop: Loop, code: FinishCode, reason: str) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    begin(bench, link)
    link.step(ends=[(link.sent[0].sequence_id, code)])
    with pytest.raises(Failure) as failed:
        bench.run.take()
    assert failed.value.reason == reason


def test_a_sample_handed_over_after_a_cancel_is_cancelled(loop: Loop) -> None:
    link, other = FakeLink("a"), FakeLink("b")
    bench = Bench(loop, link, other)
    begin(bench, link)
    bench.inbox._has_news = False
    bench.run.cancel()
    assert bench.inbox._has_news
    link.step(ends=[(link.sent[0].sequence_id, FinishCode.DRAINED)])
    pieces = bench.run.take()
    assert pieces is not None
    assert pieces[0].finish == Finish(FinishReason.CANCELLED)
    assert not other.sent


def test_a_stop_string_stops_its_sample_alone_and_the_bill_is_waited_for(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link, samples=2, stops=Stops(100, strings=("B",)))
    bench.run.submit()
    first = link.sent[0].sequence_id
    link.step((first, ord("B")), (first + 1, ord("A")), starts=[first])
    pieces = bench.run.take()
    assert pieces is not None
    assert [piece.finish and piece.finish.stop_string for piece in pieces] == ["B", None]
    assert link.aborted == [([first], AbortReason.STOP_STRING)]
    bill = KvBill(page_seconds=1.0)
    link.runs.forget(first + 1)
    bench.choices[1].box.finish(SequenceEnd(first + 1, FinishCode.EOS, bill=bill))
    assert bench.run.take() is not None
    assert bench.run.take() == [], "one of two bills is still to come"
    bench.choices[0].box.finish(SequenceEnd(first, FinishCode.ABORTED, bill=bill))
    assert bench.run.take() is None
    assert bench.run.bill.page_seconds == 2.0


def test_a_stop_string_of_a_sample_whose_worker_is_gone_waits_for_nobody(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link, stops=Stops(100, strings=("B",)))
    bench.run.submit()
    first = link.sent[0].sequence_id
    link.step((first, ord("B")), starts=[first])
    link.runs.forget(first)
    assert bench.run.take() is not None
    assert bench.run.take() is None
    assert not link.aborted


def test_limits_of_a_run_are_what_is_left_of_them(loop: Loop) -> None:
    received = monotonic() - 10.0
    link = FakeLink("a")
    more = {"queue_timeout_ms": 60_000, "stops": Stops(100, max_duration_ms=90_000)}
    bench = Bench(loop, link, deadline=received + 130.0, **more)
    bench.run.account.received = received
    bench.run.submit()
    run = link.sent[0]
    assert 119_000 <= run.timeout_ms <= 120_000
    assert 49_000 <= run.queue_timeout_ms <= 50_000
    assert run.max_duration_ms == 90_000, "it begins with the admission"
    link.step(starts=[run.sequence_id])
    bench.run.settle()
    bench.run.account.admitted_at = received + 3.0
    lose(link)
    bench.run.settle()
    run = link.sent[1]
    assert run.queue_timeout_ms == 0, "it has left the queue once"
    assert 82_000 <= run.max_duration_ms <= 83_000
    bench.run.account.received = bench.run.account.admitted_at = received - 500.0
    link.step((run.sequence_id, 65))
    lose(link)
    bench.run.settle()
    assert link.sent[2].max_duration_ms == 1, "0 would be no limit"


def test_a_run_without_limits_has_none_and_one_whose_time_is_over_has_a_millisecond(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    begin(bench, link)
    lose(link)
    bench.run.settle()
    limits = [(run.timeout_ms, run.queue_timeout_ms, run.max_duration_ms) for run in link.sent]
    assert limits == [(0, 0, 0)] * 2
    late = Bench(loop, link, deadline=monotonic() - 1.0, queue_timeout_ms=5)
    late.run.submit()  # received at 0 of that clock
    assert (link.sent[2].timeout_ms, link.sent[2].queue_timeout_ms) == (1, 1)


def test_scores_of_the_prompt_are_asked_for_once_and_of_the_first_sample(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link, samples=2, output=Output(prompt_logprobs=3))
    bench.run.submit()
    first = link.sent[0].sequence_id
    link.step(starts=[first])
    bench.run.settle()
    lose(link)
    bench.run.settle()
    assert [run.prompt_logprobs for run in link.sent] == [3, 3, None]
    bench.inbox.prompt_scored(Scores())
    link.step((link.sent[1].sequence_id, 65))
    lose(link)
    bench.run.settle()
    assert [run.prompt_logprobs for run in link.sent[3:]] == [None, None]


def test_admission_is_told_once_and_when_the_worker_says_it_was(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    bench.run.submit()
    first, sent_at = link.sent[0].sequence_id, bench.run._placement.sent_at
    assert bench.run.worker_id == "a"
    assert 0.0 <= monotonic() - sent_at < 60.0
    bench.inbox.started(SequenceStart(first + 7, None, 1, queue_us=0, resumed=False))
    bench.run.settle()
    assert not bench.run.is_admitted, "that was none of its runs"
    bench.run._placement.sent_at = sent_at = sent_at - 5.0
    bench.inbox.started(SequenceStart(first, None, 1, queue_us=2_000_000, resumed=False))
    bench.run.settle()
    assert bench.run.account.admitted_at == sent_at + 2.0
    bench.inbox.started(SequenceStart(first, None, 1, queue_us=3_000_000, resumed=True))
    bench.run.settle()
    assert bench.run.account.admitted_at == sent_at + 2.0
    ((what, _, numbers),) = bench.run.account.events
    assert (what, numbers) == ("readmitted", {"waited_seconds": 3.0})
    value = bench.metrics.registry.get_sample_value
    assert value("kvatlas_prompt_tokens_total") == len(PROMPT)
