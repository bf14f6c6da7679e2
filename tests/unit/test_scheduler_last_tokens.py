"""Which token is the last: the context, EOS and stop tokens, the least and the most that were asked for."""

import pytest

from tests.toy_scheduler import BOTH, MODEL, alone, make, request
from worker.execution.fake_runner import FakeModel, answer_alone
from worker.execution.testing import Harness, small_config
from worker.scheduling.output import FinishCode
from worker.scheduling.step import StepResult


@BOTH
@pytest.mark.parametrize("length", [1, 7, 8, 9, 19])
def test_the_context_is_filled_exactly(length: int, overlap: bool) -> None:
    """B043: prompt and output together are L tokens, never L + 1, whatever the chunk."""
    for chunk in (0, 3):
        harness = make(overlap, max_context_tokens=20, max_chunk_tokens=chunk)
        harness.add(request(1, range(length), max_tokens=20))
        harness.run()
        answer = harness.answers[1]
        assert len(answer.tokens) == 20 - length
        assert answer.code == FinishCode.CONTEXT_LENGTH
        assert answer.end is not None
        assert answer.end.completion_tokens == 20 - length


@BOTH
def test_the_last_token_by_length_is_not_computed_further(overlap: bool) -> None:
    """An end that is known ahead costs no discarded token, also with a step in flight."""
    harness = make(overlap)
    harness.add(request(1, range(5), max_tokens=3))
    steps = []
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is not None:
            steps.append((step.starts[0], step.ends[0]))
    assert steps == [(0, 5), (5, 6), (6, 7)]


def test_eos_ids_are_a_union_and_can_be_ignored() -> None:
    """H11, B076: every EOS id of the model ends; ignoring them does not switch off stop ids."""
    for token_id in (5, 9):
        model = FakeModel(1000, (token_id,), eos_every=3)
        spec = request(1, [1, 2, 3], max_tokens=40)
        harness = make(model=model, eos_token_ids=frozenset({5, 9}))
        harness.add(spec)
        harness.run()
        assert harness.answers[1].code == FinishCode.EOS
        assert harness.answers[1].tokens[-1] == token_id
        assert token_id not in harness.answers[1].tokens[:-1]
        ignoring = make(model=model, eos_token_ids=frozenset({5, 9}))
        ignoring.add(request(1, [1, 2, 3], max_tokens=40, stop_at_eos=False))
        ignoring.run()
        assert ignoring.answers[1].code == FinishCode.MAX_TOKENS
        stopping = make(model=model, eos_token_ids=frozenset({5, 9}))
        stop = frozenset({token_id})
        stopping.add(request(1, [1, 2, 3], max_tokens=40, stop_at_eos=False, stop_token_ids=stop))
        stopping.run()
        assert stopping.answers[1].code == FinishCode.STOP_TOKEN
        assert stopping.answers[1].tokens == harness.answers[1].tokens


@BOTH
def test_nothing_ends_before_min_tokens(overlap: bool) -> None:
    model = FakeModel(50, (5,), eos_every=2)
    for least in (0, 1, 7):
        spec = request(1, [1, 2, 3], max_tokens=40, min_tokens=least)
        harness = make(overlap, model=model, eos_token_ids=frozenset({5}))
        harness.add(spec)
        harness.run()
        expected = answer_alone(model, [1, 2, 3], spec.params, 0, frozenset({5}), 64)
        assert harness.answers[1].tokens == expected
        assert len(expected) > least


def test_a_stop_id_below_min_tokens_is_a_token_like_any_other() -> None:
    """The sampler masks it; should one come all the same, the sequence goes on."""
    harness = make(eos_token_ids=frozenset({5}))
    harness.add(request(1, [1, 2, 3], max_tokens=9, min_tokens=3, stop_token_ids=frozenset({6})))
    for token_id in (5, 6, 5):
        step = harness.scheduler.schedule(harness.now)
        assert step is not None
        harness.scheduler.commit(step, StepResult([token_id]), harness.now)
        assert harness.scheduler.num_live == 1
    step = harness.scheduler.schedule(harness.now)
    assert step is not None
    harness.scheduler.commit(step, StepResult([6]), harness.now)
    harness.collect()
    assert harness.answers[1].tokens == [5, 6, 5, 6]
    assert harness.answers[1].code == FinishCode.STOP_TOKEN


def test_an_eos_that_is_a_stop_token_too_ends_as_eos() -> None:
    spec = request(1, range(5), max_tokens=9)
    token = alone(spec)[1]
    harness = Harness(small_config(eos_token_ids=frozenset({token})), MODEL)
    harness.add(request(1, range(5), max_tokens=9, stop_token_ids=frozenset({token})))
    harness.run()
    assert (harness.answers[1].code, len(harness.answers[1].tokens)) == (FinishCode.EOS, 2)
