"""Steps that warm a runner up: every size class, within the limits of real steps, in the dummy row alone."""

import pytest

from worker.execution.warm_steps import SMALLEST, warm_steps


def test_prompts_alone_halve_from_the_largest_step_down() -> None:
    steps = warm_steps(max_step_tokens=500, max_running=4, max_context=128, dummy_row=4)
    alone = [step for step in steps[:-1] if step.num_decode == 0 and max(step.ends) > 2]
    assert [sum(step.ends) - sum(step.starts) for step in alone] == [500, 250, 125, 62, 31]
    assert min(sum(step.ends) for step in alone) >= SMALLEST


def test_the_largest_step_comes_with_all_decodes_and_the_smallest_with_some_and_with_one() -> None:
    """Attention of few decodes beside prompts has kernels that no other step has."""
    steps = warm_steps(max_step_tokens=500, max_running=300, max_context=128, dummy_row=300)
    mixed = [step for step in steps if step.num_decode]
    assert [(step.num_decode, sum(step.ends) - sum(step.starts)) for step in mixed] == [
        (300, 500),
        (15, 31),
        (1, 31),
    ]
    for step in mixed:
        lens = [end - start for start, end in zip(step.starts, step.ends, strict=True)]
        assert lens[: step.num_decode] == [1] * step.num_decode


def test_no_step_has_more_decodes_than_rows_or_tokens() -> None:
    steps = warm_steps(max_step_tokens=64, max_running=2, max_context=128, dummy_row=2)
    assert [step.num_decode for step in steps if step.num_decode] == [2, 2, 1]
    steps = warm_steps(max_step_tokens=64, max_running=90, max_context=128, dummy_row=90)
    assert [step.num_decode for step in steps if step.num_decode] == [63, 8, 1]


@pytest.mark.parametrize(
    ("max_step_tokens", "max_running", "counts"),
    [
        (900, 256, [256, 128, 64, 32, 16, 8, 4, 2]),
        (500, 4, [4, 2]),
        (20, 300, [10, 8, 4, 2]),
        (500, 65, [65, 64, 32, 16, 8, 4, 2]),
        (500, 1, []),
    ],
)
def test_as_many_tokens_are_sampled_as_have_kernels_of_their_own(
    max_step_tokens: int, max_running: int, counts: list[int]
) -> None:
    """The last layer runs for them alone, which a first large batch had to wait for (0.9 s with fp8)."""
    limits = {"max_step_tokens": max_step_tokens, "max_running": max_running}
    steps = warm_steps(**limits, max_context=128, dummy_row=max_running)
    many = [step for step in steps if step.num_decode == 0 and max(step.ends) == 2]
    assert [len(step.sampled) for step in many] == counts
    assert all(step.num_tokens > len(step.sampled) for step in many), "the last layer is for all of them"


def test_the_last_step_is_a_piece_late_in_a_long_prompt() -> None:
    """Its keys are split over programs, which takes kernels that no short prompt compiles."""
    last = warm_steps(max_step_tokens=500, max_running=4, max_context=4096, dummy_row=4)[-1]
    assert (list(last.starts), list(last.ends), last.num_decode) == ([3056], [3072], 0)


def test_no_span_leaves_the_dummy_row() -> None:
    """S1-31: nobody's pages are read or written; a row is never longer than the table is wide."""
    for step in warm_steps(max_step_tokens=300, max_running=8, max_context=64, dummy_row=8):
        assert set(step.rows) == {8}
        assert max(step.ends) <= 64
        assert len(step.sampled) <= 8
