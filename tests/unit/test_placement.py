"""Samples among workers that refuse them, lose them or hand them over, without a socket or a stream."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from service.errors import Failure
from service.request import (
    AbortReason,
    AddOutcome,
    AddStatus,
    FinishCode,
    LostReason,
    SequenceStart,
    Stops,
)
from tests.run_bench import PROMPT, Bench, FakeLink, Loop, begin, lose, running_loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield from running_loop()


def test_who_refuses_a_resumed_sequence_is_asked_again_after_a_while_also_beside_one_without_room(
    loop: Loop,
) -> None:
    """The smaller one kept it from counting as refused by all: it was asked at once, again and again."""
    large, small = FakeLink("large"), FakeLink("small", context=50)
    bench = Bench(loop, large, small, resume_seconds=0.6)
    begin(bench, large)
    lose(large)
    bench.run.settle()
    for number in range(2, 5):
        assert len(large.sent) == number
        large.answer(AddStatus.QUEUE_FULL)
        bench.run.settle()
        assert len(large.sent) == number, "not at once"
        loop.now += 0.19
        bench.run.settle()
        assert len(large.sent) == number, "not yet"
        loop.now += 0.01
        if number < 4:
            bench.run.settle()
    loop.now = 100.6
    large.takes_runs = False
    bench.pool.usable = [small]
    with pytest.raises(Failure) as lost:
        bench.run.settle()
    assert lost.value.reason == "WORKER_LOST", "its patience is over"
    assert not small.sent


def test_one_that_drains_and_has_not_said_so_does_not_keep_the_other_busy(loop: Loop) -> None:
    draining, full = FakeLink("draining"), FakeLink("full")
    bench = Bench(loop, draining, full)
    begin(bench, draining)
    draining.step(ends=[(draining.sent[0].sequence_id, FinishCode.DRAINED)])
    bench.run.settle()
    assert len(full.sent) == 1, "not the one that gave it up"
    for _ in range(5):
        if full.carries(full.sent[-1].sequence_id):
            full.answer(AddStatus.QUEUE_FULL)
        if draining.carries(draining.sent[-1].sequence_id):
            draining.answer(AddStatus.DRAINING)
        bench.run.settle()
    assert len(draining.sent) + len(full.sent) <= 3, "each is asked once before the pause"


def test_samples_go_together_until_one_has_started_and_then_each_by_itself(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link, samples=3)
    bench.run.submit()
    lose(link)
    bench.run.settle()
    first, again = link.sent
    assert (first.num_samples, first.attempt) == (3, 0)
    assert (again.num_samples, again.attempt, again.first_choice) == (3, 1, 0)
    assert again.sequence_id == first.sequence_id + 3
    ids = range(again.sequence_id, again.sequence_id + 3)
    link.step(*((each, 65) for each in ids), (ids[1], 66), starts=[ids[0]])
    bench.run.take()
    lose(link)
    bench.run.settle()
    alone = link.sent[2:]
    assert [run.sequence_id for run in alone] == [ids[2] + 1, ids[2] + 2, ids[2] + 3]
    assert [(run.num_samples, run.first_choice, run.attempt) for run in alone] == [
        (1, n, 2) for n in range(3)
    ]
    assert [list(run.resume_ids) for run in alone] == [[65], [65, 66], [65]]
    bench.run.close(AbortReason.CLIENT)
    assert link.aborted == [([run.sequence_id for run in alone], AbortReason.CLIENT)]
    bench = Bench(loop, link, samples=3)
    bench.run.submit()
    first_id = link.sent[-1].sequence_id
    bench.run.close(AbortReason.CLIENT)
    assert link.aborted[-1] == ([first_id, first_id + 1, first_id + 2], AbortReason.CLIENT)


def test_words_of_a_run_that_was_lost_mean_nothing(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    begin(bench, link)
    old = link.sent[0].sequence_id
    lose(link)
    bench.run.settle()
    bench.inbox.added(AddOutcome(old, AddStatus.INVALID))
    bench.inbox.started(SequenceStart(old, None, 1, 0, resumed=False))
    bench.run.settle()
    assert len(link.sent) == 2
    assert bench.run.resumes == 0, "that start was of the old run"
    link.step(starts=[link.sent[1].sequence_id])
    bench.run.settle()
    assert bench.run.resumes == 1


def test_a_worker_that_goes_while_it_is_sent_to_costs_one_attempt_for_all_samples(loop: Loop) -> None:
    gone, other = FakeLink("gone", takes_runs=False), FakeLink("other")
    bench = Bench(loop, gone, other, samples=2)
    bench.run.submit()
    bench.pool.usable = [other]
    bench.run.settle()
    assert [run.attempt for run in other.sent] == [1]
    assert [run.num_samples for run in other.sent] == [2]
    bench = Bench(loop, other)
    begin(bench, other)
    bench.pool.usable = [gone]
    lose(other)
    bench.run.settle()
    bench.pool.usable = [other]
    bench.run.settle()
    other.step(starts=[other.sent[-1].sequence_id])
    bench.run.settle()
    assert bench.metrics.registry.get_sample_value("kvatlas_resumes_total", {"reason": "partition"}) == 1


def test_a_life_that_hands_samples_over_one_by_one_is_one_attempt_and_another_life_is_one_more(
    loop: Loop,
) -> None:
    a, b = FakeLink("a"), FakeLink("b")
    bench = Bench(loop, a, b, samples=2)
    bench.run.submit()
    first = a.sent[0].sequence_id
    a.step((first, 65), (first + 1, 66), starts=[first])
    bench.run.take()
    for sequence_id in (first, first + 1):
        a.step(ends=[(sequence_id, FinishCode.DRAINED)])
        bench.run.take()
    assert [run.attempt for run in b.sent] == [1, 1]
    b.step((b.sent[0].sequence_id, 67), starts=[run.sequence_id for run in b.sent])
    bench.run.take()
    a.facts.epoch = 2  # started anew, with b's place to take
    b.step(ends=[(b.sent[0].sequence_id, FinishCode.DRAINED)])
    bench.run.take()
    assert [run.attempt for run in (*a.sent, *b.sent)].count(2) == 1
    assert [list(choice.box.tokens) for choice in bench.choices] == [[65, 67], [66]]
    last = max((*a.sent, *b.sent), key=lambda run: run.attempt)
    a.step((last.sequence_id, 68), ends=[(last.sequence_id, FinishCode.DRAINED)])
    bench.run.take()
    assert max(run.attempt for run in (*a.sent, *b.sent)) == 3, "another life of it"
    assert bench.run.resumes == 2
    assert bench.metrics.registry.get_sample_value("kvatlas_resumes_total", {"reason": "drain"}) == 2


def test_moves_are_counted_with_what_was_cached_for_them_and_how_long_they_took(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    begin(bench, link)
    lose(link, LostReason.PARTITION)
    link.takes_runs = True
    bench.pool.usable = []
    bench.run.settle()
    loop.now += 7.0
    bench.pool.usable = [link]
    bench.run.settle()
    loop.now += 1.0
    again = link.sent[-1].sequence_id
    link.runs.fan_out(
        SimpleNamespace(
            starts=[SequenceStart(again, None, reused_pages=2, queue_us=0, resumed=False)],
            prompt_scores=(),
            scores=None,
            sequence_ids=[],
            token_ids=[],
            ends=[],
        )  # type: ignore[arg-type]
    )
    bench.run.settle()
    ((what, _, numbers),) = bench.run.account.events
    assert (what, numbers) == ("moved", {"reason": "partition", "worker": "a"})
    value = bench.metrics.registry.get_sample_value
    assert value("kvatlas_resumes_total", {"reason": "partition"}) == 1
    assert value("kvatlas_resume_gap_seconds_sum") == 8.0
    assert value("kvatlas_resume_prefix_tokens_total", {"result": "hit"}) == 2 * 4
    assert value("kvatlas_resume_prefix_tokens_total", {"result": "computed"}) == len(PROMPT) + 1 - 2 * 4


def test_a_resumed_sequence_that_is_refused_for_good_is_a_lost_one(loop: Loop) -> None:
    a, b = FakeLink("a"), FakeLink("b")
    bench = Bench(loop, a, b)
    begin(bench, a)
    lose(a)
    bench.pool.usable = [b]
    bench.run.settle()
    b.answer(AddStatus.INVALID)
    with pytest.raises(Failure) as refused:
        bench.run.settle()
    assert refused.value.reason == "WORKER_LOST"


def test_who_did_not_refuse_is_asked_at_once_and_all_of_them_again_after_a_while(loop: Loop) -> None:
    a, b, lost = FakeLink("a"), FakeLink("b"), FakeLink("lost")
    bench = Bench(loop, lost, a, b)
    begin(bench, lost)
    bench.pool.usable = [a, b]
    lose(lost)
    bench.run.settle()
    for number in (1, 2):
        assert (len(a.sent), len(b.sent)) == (number, number - 1)
        a.answer(AddStatus.QUEUE_FULL)
        bench.run.settle()
        assert (len(a.sent), len(b.sent)) == (number, number)
        b.answer(AddStatus.QUEUE_FULL)
        bench.run.settle()
        assert (len(a.sent), len(b.sent)) == (number, number)
        bench.inbox._has_news = False
        loop.now += 0.2
        loop.turn()
        assert bench.inbox._has_news, "or nobody would look again"
        bench.run.settle()
    bench.pool.usable = []
    a.answer(AddStatus.NOT_READY)
    bench.run.settle()
    assert bench.run.is_homeless


def test_another_loss_asks_those_again_that_refused_before(loop: Loop) -> None:
    lost, a, b = FakeLink("lost"), FakeLink("a"), FakeLink("b")
    bench = Bench(loop, lost, a, b)
    begin(bench, lost)
    bench.pool.usable = [a, b]
    lose(lost)
    bench.run.settle()
    a.answer(AddStatus.QUEUE_FULL)
    bench.run.settle()
    b.step((b.sent[0].sequence_id, 65), starts=[b.sent[0].sequence_id])
    lose(b)
    bench.run.settle()
    assert [run.attempt for run in a.sent] == [1, 2]


def test_a_sample_that_loses_its_worker_and_ends_with_what_it_had_is_not_started_again(loop: Loop) -> None:
    """Its last tokens were not read yet, and a stop string is in them: it ran once more beside the others."""
    link = FakeLink("a")
    bench = Bench(loop, link, samples=2, stops=Stops(100, strings=("B",)))
    bench.run.submit()
    first = link.sent[0].sequence_id
    link.step((first, ord("B")), (first + 1, ord("A")), starts=[first])
    bench.pool.usable = []
    lose(link)
    pieces = bench.run.take()
    assert pieces is not None
    assert [piece.finish is not None for piece in pieces] == [True, False]
    bench.pool.usable = [link]
    bench.run.settle()
    assert [run.first_choice for run in link.sent] == [0, 1]


@pytest.mark.parametrize("status", [AddStatus.QUEUE_FULL, AddStatus.INVALID])
def test_a_sample_that_is_over_is_not_sent_again_when_its_new_worker_refuses_it(
    loop: Loop, status: AddStatus
) -> None:
    """What it had from the worker before held a stop string: the call waited for a run that nobody wanted."""
    a, b = FakeLink("a"), FakeLink("b")
    bench = Bench(loop, a, b, stops=Stops(100, strings=("B",)))
    bench.run.submit()
    first = a.sent[0].sequence_id
    a.step((first, ord("B")), starts=[first])
    bench.pool.usable = [b]
    lose(a)
    pieces = bench.run.take()
    assert pieces is not None
    assert pieces[0].finish is not None
    assert b.aborted == [([b.sent[0].sequence_id], AbortReason.STOP_STRING)]
    b.answer(status)
    assert bench.run.take() is None
    assert not bench.run.is_homeless
    assert len(b.sent) == 1


@pytest.mark.parametrize("drains", [False, True])
def test_a_request_that_loses_two_workers_before_a_token_is_given_up(loop: Loop, drains: bool) -> None:
    links = [FakeLink(name) for name in "abc"]
    bench = Bench(loop, *links)
    bench.run.submit()
    for number, link in enumerate(links[:2]):
        if drains:
            link.step(ends=[(link.sent[0].sequence_id, FinishCode.DRAINED)])
        else:
            lose(link)
        bench.pool.usable = links[number + 1 :]
        if number == 0:
            bench.run.settle()
    with pytest.raises(Failure) as lost:
        bench.run.settle()
    assert lost.value.reason == "WORKER_LOST"
    assert not links[2].sent


def test_a_sample_whose_end_came_before_the_loss_is_over(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link, samples=2)
    bench.run.submit()
    first = link.sent[0].sequence_id
    link.step((first, 65), starts=[first], ends=[(first, FinishCode.EOS)])
    lose(link)
    bench.run.take()
    assert [run.first_choice for run in link.sent] == [0, 1]
    second = link.sent[1].sequence_id
    link.step(starts=[second], ends=[(second, FinishCode.EOS)])
    bench.inbox.lost(LostReason.CRASH)
    assert bench.run.take() is not None
    assert bench.run.take() is None
    assert not bench.pool.watchers, "nothing waits for another worker"


def test_a_loss_while_others_wait_for_a_worker_is_the_same_attempt(loop: Loop) -> None:
    a, b = FakeLink("a"), FakeLink("b")
    bench = Bench(loop, a, samples=3, resume_seconds=5.0)
    bench.run.submit()
    first = a.sent[0].sequence_id
    a.step(*((first + each, 65) for each in range(3)), starts=[first])
    bench.run.take()
    bench.pool.usable = []
    a.step(ends=[(first, FinishCode.DRAINED)])
    bench.run.settle()
    loop.now += 4.0
    lose(a)
    bench.run.settle()
    bench.pool.usable = [b]
    bench.run.settle()
    assert sorted((run.first_choice, run.attempt) for run in b.sent) == [(0, 1), (1, 1), (2, 1)]
    assert not bench.pool.watchers


def test_patience_begins_with_the_loss_and_wakes_its_reader_at_its_end(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link, resume_seconds=5.0)
    begin(bench, link)
    bench.pool.usable = []
    lose(link)
    bench.run.settle()
    bench.pool.usable = [link]
    bench.run.settle()
    link.step((link.sent[-1].sequence_id, 65), starts=[link.sent[-1].sequence_id])
    bench.run.take()
    loop.now += 50.0
    bench.pool.usable = []
    lose(link)
    bench.run.settle()
    bench.inbox._has_news = False
    loop.now += 4.9
    loop.turn()
    assert not bench.inbox._has_news
    loop.now += 0.1
    loop.turn()
    assert bench.inbox._has_news
    with pytest.raises(Failure):
        bench.run.settle()
