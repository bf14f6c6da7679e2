"""Samples of one prompt: computed once, shared page by page, copied where they part, ended one by one."""

import pytest

from tests.toy_scheduler import BOTH, alone, check_answers, make, pages, request
from worker.execution.testing import Harness
from worker.pages.events import PageEventKind
from worker.scheduling.output import FinishCode
from worker.scheduling.step import Step


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
    check_answers(harness, spec)
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
    check_answers(harness, spec)


@BOTH
def test_samples_live_on_when_the_first_one_ends_at_once(overlap: bool) -> None:
    """Its pages stay until the others have copied what they need."""
    for max_tokens in (1, 2):
        harness = make(overlap, num_pages=40)
        spec = request(1, range(7), max_tokens=max_tokens, sample_count=3, temperature=1.0)
        harness.add(spec)
        harness.run()
        check_answers(harness, spec)
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
            assert answer.tokens == alone(spec, choice=choice)[: len(answer.tokens)]
        else:
            assert answer.tokens == alone(spec, choice=choice)
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
    check_answers(harness, spec)


def test_the_only_sequence_left_gives_up_a_copy_that_does_not_fit() -> None:
    """H15: a pool of three pages, all of them prompt; the sample that is left cannot hold a fourth."""
    harness = make(num_pages=3, max_context_tokens=12, sharing=False)
    spec = request(1, range(11), max_tokens=1, sample_count=3, temperature=1.0)
    harness.add(spec)
    harness.run(max_turns=200)
    check_answers(harness, spec)
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
