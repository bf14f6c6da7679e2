"""When pages run out: who stops, that everybody gets through, and that nothing shows in the answers."""

import pytest

from worker.execution.fake_runner import FakeModel, answer_alone
from worker.execution.testing import Harness, small_config
from worker.ids import SequenceId
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.stats import SequenceState

MODEL = FakeModel(1000)
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def make(overlap: bool = False, **changes: object) -> Harness:
    return Harness(small_config(**changes), MODEL, overlap=overlap)  # type: ignore[arg-type]


def request(number: int, prompt: "list[int] | range", max_tokens: int = 4, **more: object) -> RequestSpec:
    params = {"max_tokens": max_tokens} | {k: v for k, v in more.items() if k in SamplingParams.__slots__}
    fields = {k: v for k, v in more.items() if k not in SamplingParams.__slots__}
    return RequestSpec(SequenceId(number), list(prompt), SamplingParams(**params), **fields)  # type: ignore[arg-type]


def alone(spec: RequestSpec) -> list[int]:
    return answer_alone(MODEL, spec.prompt_token_ids, spec.params, 0, frozenset(), 64)


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
