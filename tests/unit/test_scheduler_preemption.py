"""When pages run out: who stops, that everybody gets through, and that nothing shows in the answers."""

import pytest

from tests.toy_scheduler import BOTH, MODEL, alone, make, request, stop
from worker.execution.fake_runner import answer_alone, token_logprob
from worker.execution.testing import Harness
from worker.ids import SequenceId
from worker.scheduling.output import SequenceStart
from worker.scheduling.preemption import choose_victim
from worker.stats import SequenceState


def preempted(harness: Harness) -> list[int]:
    """Who was preempted, in order, until all is done."""
    found: list[int] = []
    seen: dict[int, int] = {}
    while harness.scheduler.has_work(harness.now):
        harness.turn()
        for view in harness.scheduler.sequence_views():
            if view.preemptions > seen.get(view.sequence_id, 0):
                seen[view.sequence_id] = view.preemptions
                found.append(view.sequence_id)
    return found


@BOTH
@pytest.mark.parametrize("sharing", [True, False])
def test_preemption_never_changes_tokens(sharing: bool, overlap: bool) -> None:
    """H2, M-18: output is not reserved; two growing sequences in a pool for one and a half."""
    harness = make(overlap, num_pages=9, sharing=sharing, max_context_tokens=32)
    specs = [
        request(number, range(number * 50, number * 50 + 9), max_tokens=20, temperature=1.0, seed=number)
        for number in (1, 2, 3)
    ]
    for spec in specs:
        harness.add(spec)
    harness.run()
    for spec in specs:
        assert harness.answers[spec.sequence_id].tokens == alone(spec)
    assert harness.scheduler.counts().preemptions_total > 0


def test_admission_counts_whole_pages_of_each_sequence() -> None:
    """H2: P = 64, three pages, prompts of 60 and 6 tokens: decode steps find or await their pages."""
    harness = make(num_pages=3, page_size=64, max_context_tokens=192)
    first, second = request(1, range(60), max_tokens=40), request(2, range(500, 506), max_tokens=40)
    harness.add(first)
    harness.add(second)
    harness.run()
    assert harness.answers[1].tokens == answer_alone(MODEL, range(60), first.params, 0, frozenset(), 192)
    assert len(harness.answers[2].tokens) == 40


@BOTH
def test_one_and_a_half_requests_worth_of_pages_serve_three(overlap: bool) -> None:
    """B035: all finish, within a bound of steps, and with at most two preemptions for each."""
    harness = make(overlap, num_pages=12, max_context_tokens=32)
    for number in (1, 2, 3):
        harness.add(request(number, range(number * 50, number * 50 + 4), max_tokens=28))
    turns = harness.run(max_turns=250)
    assert all(len(answer.tokens) == 28 for answer in harness.answers.values())
    counts = harness.scheduler.counts()
    assert 0 < counts.preemptions_total <= 6
    assert counts.allocation_failures_total >= counts.preemptions_total
    assert turns < 200


def test_a_prompt_that_is_not_finished_stops_for_an_older_one_that_decodes() -> None:
    harness = make(num_pages=8, max_chunk_tokens=1, sharing=False)
    harness.add(request(1, range(4), max_tokens=28))
    harness.turn()
    harness.add(request(2, range(100, 120), max_tokens=2))
    while not harness.scheduler.counts().preemptions_total:
        harness.turn()
    first, second = harness.scheduler.sequence_views()
    assert (first.state, second.state) == (SequenceState.DECODE, SequenceState.PREEMPTED)
    assert second.prefix is None
    assert harness.scheduler.counts().preempted_tokens_total < 20, "it was not finished"
    harness.run()
    assert [len(harness.answers[number].tokens) for number in (1, 2)] == [28, 2]


def test_a_page_that_is_only_held_to_be_copied_makes_a_victim_too() -> None:
    """Of a prompt shorter than a page its samples have no page of their own yet."""
    harness = make(num_pages=8)
    harness.add(request(1, range(3), max_tokens=4, sample_count=2, temperature=1.0))
    harness.turn()
    first, second = harness.scheduler.sequence_views()
    assert (len(first.page_ids), second.page_ids) == (1, ())
    victim = choose_victim(harness.scheduler._books)
    assert victim is not None
    assert victim.id == 2


def test_the_first_is_no_victim_where_it_alone_holds_pages() -> None:
    """B035: those behind it, which wait for its prompt, have nothing to give."""
    harness = make(num_pages=16, max_chunk_tokens=4)
    harness.add(request(1, range(20), max_tokens=4, sample_count=2, temperature=1.0))
    harness.turn()
    assert [len(view.page_ids) for view in harness.scheduler.sequence_views()] == [1, 0]
    assert choose_victim(harness.scheduler._books) is None


def test_the_youngest_goes_first_and_the_oldest_never() -> None:
    harness = make(num_pages=12, max_context_tokens=40)
    for number in (1, 2, 3):
        harness.add(request(number, range(number * 50, number * 50 + 4), max_tokens=30))
        harness.now += 0.5
    order = preempted(harness)
    assert order[0] == 3
    assert 1 not in order


def test_lower_priority_goes_before_younger() -> None:
    harness = make(num_pages=12, max_context_tokens=40)
    for number, priority in ((1, 0), (2, -1), (3, 0)):
        harness.add(request(number, range(number * 50, number * 50 + 4), max_tokens=30, priority=priority))
    order = preempted(harness)
    assert order[0] == 2
    assert 1 not in order


def test_a_preempted_sequence_keeps_its_place_before_later_ones() -> None:
    """C.7: it goes back to where its arrival puts it, not behind those that came after."""
    harness = make(num_pages=12, max_context_tokens=40, max_running=2, max_step_tokens=40)
    for number in (1, 2):
        harness.add(request(number, range(number * 50, number * 50 + 4), max_tokens=30))
    while not harness.scheduler.counts().preemptions_total:
        harness.turn()
    harness.add(request(3, range(200, 230), max_tokens=2))
    harness.run()
    ends: list[int] = []
    assert harness.answers[2].num_starts == 2
    for number, answer in harness.answers.items():
        assert answer.end is not None
        ends.append(number)
    assert harness.answers[3].start is not None
    assert harness.answers[3].start.queue_seconds > 0.1


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    """B009: looked up first, then what is left is computed: scheduled tokens and hit add up to its length."""
    harness = make(num_pages=10, max_context_tokens=36, max_running=2, max_step_tokens=40)
    specs = [request(number, range(number * 50, number * 50 + 9), max_tokens=24) for number in (1, 2)]
    for spec in specs:
        harness.add(spec)
    resumed = 0
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        for start in step.row_starts if step is not None else ():
            if len(start.token_ids) > 9:
                assert step is not None
                at = list(step.rows).index(start.row)
                assert step.starts[at] % 4 == 0
                assert step.starts[at] < len(start.token_ids)
                resumed += 1
    assert resumed > 0
    for spec in specs:
        assert harness.answers[spec.sequence_id].tokens == alone(spec)


def test_the_cost_of_a_preemption_is_on_the_bill_and_never_counted_as_a_hit() -> None:
    harness = make(num_pages=9, max_context_tokens=32)
    for number in (1, 2):
        harness.add(request(number, range(number * 50, number * 50 + 9), max_tokens=20))
    harness.run()
    counts = harness.scheduler.counts()
    bills = [answer.end.bill for answer in harness.answers.values() if answer.end is not None]
    assert sum(bill.preemptions for bill in bills if bill is not None) == counts.preemptions_total > 0
    # Beside the prompts: what is computed again, and the newest token of each, whose turn it was.
    again = counts.prompt_tokens_computed_total - 18 - counts.preemptions_total
    assert sum(bill.recomputed_tokens for bill in bills if bill is not None) == again > 0
    found = counts.preempted_tokens_total - again
    assert sum(bill.saved_tokens for bill in bills if bill is not None) == found > 0
    assert counts.hit_tokens_total == 0
    looked_up = counts.miss_cold_tokens_total + counts.miss_evicted_tokens_total
    assert looked_up + counts.unaligned_tokens_total == 18


@BOTH
def test_side_arrays_of_a_preempted_sequence_come_once(overlap: bool) -> None:
    """B038: after restarts there are as many log-probabilities as tokens, and one of each prompt token."""
    harness = make(overlap, num_pages=9, max_context_tokens=32, max_chunk_tokens=3)
    specs = [
        request(number, range(number * 50, number * 50 + 12), max_tokens=18, logprobs=0, prompt_logprobs=0)
        for number in (1, 2, 3)
    ]
    for spec in specs:
        harness.add(spec)
    harness.run()
    assert harness.scheduler.counts().preemptions_total > 0
    for spec in specs:
        answer = harness.answers[spec.sequence_id]
        assert answer.tokens == alone(spec)
        assert len(answer.logprobs) == 18
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == 12


def test_a_prompt_cut_short_of_pages_lets_the_oldest_go_on() -> None:
    """The first of all is a long prompt in chunks; one that decodes gives way to it, so it loses no step."""
    harness = make(num_pages=16, max_context_tokens=48, max_chunk_tokens=4, max_running=3)
    harness.add(request(2, range(100, 104), max_tokens=20))
    harness.add(request(3, range(200, 204), max_tokens=20))
    harness.turn()
    harness.add(request(1, range(40), max_tokens=4, priority=1))
    for _ in range(10):
        harness.turn()
    assert len(harness.answers[1].tokens) == 1
    assert harness.scheduler.counts().allocation_failures_total == 2, "a preemption, and its wait"
    harness.run(max_turns=300)
    for number, count, preemptions in ((1, 4, 0), (2, 20, 0), (3, 20, 1)):
        answer = harness.answers[number]
        assert len(answer.tokens) == count
        assert answer.end is not None
        assert answer.end.bill is not None
        assert answer.end.bill.preemptions == preemptions


def test_with_a_step_in_flight_nobody_is_preempted() -> None:
    """The caller is told to commit first; then the victim's pages are free at once."""
    harness = make(overlap=True, num_pages=5, max_context_tokens=20)
    harness.add(request(1, range(6), max_tokens=14))
    harness.add(request(2, range(50, 56), max_tokens=14))
    asked = 0
    while harness.scheduler.has_work(harness.now):
        before = harness.scheduler.counts().preemptions_total
        in_flight = harness.scheduler.num_in_flight
        step = harness.launch()
        if harness.scheduler.counts().preemptions_total > before:
            assert in_flight == 0
        if step is None:
            assert harness.scheduler.wants_commit
            asked += 1
            harness.settle()
        elif harness.scheduler.num_in_flight > 1:
            harness.commit()
    assert asked > 0
    assert harness.scheduler.counts().preemptions_total > 0
    for number, first in ((1, 0), (2, 50)):
        assert harness.answers[number].tokens == alone(request(number, range(first, first + 6), 14))


def test_a_preempted_sequence_waits_without_row_owner_or_pages() -> None:
    harness = make(num_pages=9, max_context_tokens=32)
    for number in (1, 2):
        harness.add(request(number, range(number * 50, number * 50 + 9), max_tokens=20))
    while not harness.scheduler.counts().preemptions_total:
        harness.turn()
    view = next(v for v in harness.scheduler.sequence_views() if v.state == SequenceState.PREEMPTED)
    assert (view.owner, view.row, view.page_ids, view.token_count) == (0, None, (), 0)
    assert view.preemptions == 1
    assert view.needed_pages > 0
    harness.run()


def test_a_prompt_of_which_others_have_computed_more_meanwhile_costs_nothing_again() -> None:
    """Recomputed tokens are what was lost and not found; finding more than that is no gain on the bill."""
    harness = make(num_pages=40, max_chunk_tokens=4, max_running=2, max_step_tokens=40)
    for number in (1, 2):
        harness.add(request(number, range(24), max_tokens=4))
    harness.turn()
    stop(harness, 2)
    harness.add(request(3, range(100, 104), max_tokens=8, priority=1))
    harness.run()
    counts, end = harness.scheduler.counts(), harness.answers[2].end
    assert end is not None
    assert end.bill is not None
    assert (counts.preempted_tokens_total, counts.recomputed_tokens_total) == (4, 0)
    assert (end.bill.preemptions, end.bill.recomputed_tokens) == (1, 0)
    assert (end.bill.reused_pages, end.bill.saved_tokens) == (5, 20)


def test_the_scores_of_a_prompt_that_is_computed_twice_are_told_once_each() -> None:
    """B038: those that are known stay, what follows on them is added."""
    harness = make(max_chunk_tokens=4)
    prompt = list(range(14))
    harness.add(request(1, prompt, prompt_logprobs=0))
    for _ in range(2):
        harness.turn()
    stop(harness, 1)
    harness.run()
    of_prompt = [token_logprob(prompt[:at], prompt[at]) for at in range(1, 14)]
    assert harness.answers[1].prompt_logprobs == [None, *of_prompt]


def test_a_second_start_says_that_it_is_one_and_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make(num_pages=40)
    starts: list[SequenceStart] = []
    outbox = harness.scheduler._books.outbox
    add_start = outbox.add_start
    monkeypatch.setattr(
        outbox, "add_start", lambda source, start: (starts.append(start), add_start(source, start))
    )
    for number in (1, 10):
        harness.add(request(number, range(9), max_tokens=9, sample_count=2, temperature=1.0))
        harness.run()  # the second one finds the prompt
    harness.add(request(20, range(9), max_tokens=9, sample_count=2, temperature=1.0))
    for _ in range(3):
        harness.turn()
    stop(harness, 21)
    harness.now += 3.0
    harness.run()
    first, again = starts[-2:]
    assert (first.sequence_id, first.resumed, first.reused_pages) == (20, False, 2)
    assert first.prefix is not None
    assert first.queue_seconds > 0
    assert again == SequenceStart(SequenceId(21), None, 2, again.queue_seconds, resumed=True)
    assert 3.0 < again.queue_seconds < 3.1, "since it was preempted"
    end = harness.answers[20].end
    bill = end.bill if end is not None and end.bill is not None else harness.answers[21].end.bill  # type: ignore[union-attr]
    assert bill is not None
    assert bill.reused_pages == 4, "of both starts"
    assert bill.saved_tokens == 3 * 8, "the other sample's prompt, too"
    assert bill.preemptions == 1


def test_a_prompt_whose_scores_are_told_is_looked_up_after_a_preemption_like_any_other() -> None:
    harness = make(num_pages=40)
    harness.add(request(1, range(9), max_tokens=9, prompt_logprobs=0))
    for _ in range(4):
        harness.turn()
    stop(harness, 1)
    harness.run()
    assert harness.scheduler.counts().recomputed_tokens_total == 0
    assert len(harness.answers[1].tokens) == 9


def test_a_sample_that_was_preempted_waits_for_one_row_and_not_for_those_of_all() -> None:
    harness = make(num_pages=40, max_running=3)
    harness.add(request(1, range(9), max_tokens=9, sample_count=3, temperature=1.0))
    for _ in range(3):
        harness.turn()
    stop(harness, 3)
    harness.turn()
    assert [view.row is not None for view in harness.scheduler.sequence_views()] == [True] * 3


def test_a_prompt_goes_on_in_the_smallest_steps_behind_one_that_has_no_room() -> None:
    """The rest of a step is kept for one of higher priority only behind a prompt that goes on."""
    harness = make(num_pages=12, max_running=2, max_step_tokens=4, max_context_tokens=48)
    harness.add(request(1, range(30), max_tokens=3))
    harness.turn()
    harness.add(request(2, range(100, 140), max_tokens=3, priority=1))
    harness.run(max_turns=60)
    assert [len(harness.answers[number].tokens) for number in (1, 2)] == [3, 3]
