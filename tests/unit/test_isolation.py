"""A step that raised, run span by span: each piece has what is its own, and only who breaks it fails."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from worker.ids import PageId, Row, SequenceId
from worker.isolation import NO_TOKEN_ID, is_out_of_memory, one_span, run_span_by_span
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import PageCopy, RowStart, Step, StepResult, TokenLogprob

IDS = tuple(map(SequenceId, (50, 20, 70)))


def row_start(row: int, number: int = 0) -> RowStart:
    return RowStart(Row(row), SequenceId(10 * row), number, (1, 2), 2, SamplingParams(), frozenset())


def step_of(**changes: object) -> Step:
    """A decode in row 5, a piece of a prompt in row 2, the last token of a prompt in row 7.

    A page goes to row 9, which is in no span any more.
    """
    step = Step(
        number=7,
        sequence_ids=IDS,
        rows=array("i", (5, 2, 7)),
        starts=array("i", (8, 0, 4)),
        ends=array("i", (9, 4, 5)),
        sampled=(0, 2),
        num_decode=1,
        row_starts=(row_start(2), row_start(7)),
        page_copies=(PageCopy(PageId(1), PageId(30)), PageCopy(PageId(2), PageId(32))),
        new_page_rows=array("i", (5, 2, 9, 2)),
        new_page_indexes=array("i", (2, 0, 4, 1)),
        new_page_ids=array("i", (30, 31, 32, 33)),
    )
    return step._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("span", "is_decode", "is_sampled", "indexes", "ids", "copies"),
    [
        (0, True, True, [2, 4], [30, 32], [30, 32]),
        (1, False, False, [0, 4, 1], [31, 32, 33], [32]),
        (2, False, True, [4], [32], [32]),
    ],
)
def test_a_piece_has_what_its_row_needs_and_what_concerns_none(
    span: int, is_decode: bool, is_sampled: bool, indexes: list[int], ids: list[int], copies: list[int]
) -> None:
    step, start = step_of(), row_start(1, 9)
    piece = one_span(step, span, start)
    assert (piece.number, list(piece.sequence_ids)) == (7, [IDS[span]])
    assert list(piece.rows) == [step.rows[span]]
    assert (list(piece.starts), list(piece.ends)) == ([step.starts[span]], [step.ends[span]])
    assert (list(piece.sampled), piece.num_decode) == ([0] * is_sampled, int(is_decode))
    assert list(piece.row_starts) == [start], "as of the commit before"
    assert set(piece.new_page_rows) <= {step.rows[span], 9}
    assert (list(piece.new_page_indexes), list(piece.new_page_ids)) == (indexes, ids)
    assert [copy.target for copy in piece.page_copies] == copies


def test_a_row_whose_sequence_has_ended_begins_as_the_step_said() -> None:
    assert list(one_span(step_of(), 1, None).row_starts) == [row_start(2)]
    assert list(one_span(step_of(), 0, None).row_starts) == []


def test_only_a_leading_span_of_one_token_is_a_decode() -> None:
    assert one_span(step_of(ends=array("i", (9, 1, 5))), 1, None).num_decode == 0
    assert one_span(step_of(starts=array("i", (7, 0, 4))), 0, None).num_decode == 0


@dataclass
class Launched:
    """A handle whose result is there."""

    found: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Runner:
    """Gives for each sequence what the test says."""

    def __init__(self, *results: StepResult | Exception, breaks_at_launch: Sequence[int] = ()) -> None:
        self._results = dict(zip(IDS, results, strict=True))
        self._breaks_at_launch = breaks_at_launch
        self.launched: list[Step] = []

    def launch(self, step: Step) -> Launched:
        self.launched.append(step)
        (sequence_id,) = step.sequence_ids
        if sequence_id in self._breaks_at_launch:
            raise KeyError("at launch")
        return Launched(self._results[sequence_id])


def run(
    runner: Runner, on_failure: Callable[[Step, int, BaseException], None] = lambda *_: None
) -> StepResult:
    return run_span_by_span(
        runner,  # type: ignore[arg-type]
        step_of(),
        lambda sequence_id: None if sequence_id == 50 else row_start(3, sequence_id),
        on_failure,
    )


LOGPROB, PROMPT = TokenLogprob(-1.0, 1), (TokenLogprob(-2.0, 2),)


def test_results_stand_where_those_of_the_whole_step_would() -> None:
    runner = Runner(
        StepResult([11], {0: LOGPROB}, seconds=0.25),
        StepResult([], {}, {0: PROMPT}, seconds=0.5),
        StepResult([13], {}, {}, {0: "not finite"}, 1.0, {0}),
    )
    result = run(runner)
    assert list(result.token_ids) == [11, 13]
    assert (dict(result.logprobs), dict(result.prompt_logprobs)) == ({0: LOGPROB}, {1: PROMPT})
    assert (dict(result.failed), set(result.dead_ends)) == ({2: "not finite"}, {2})
    assert result.seconds == 1.75
    assert [list(piece.sequence_ids) for piece in runner.launched] == [[50], [20], [70]]
    assert [[start.choice_index for start in piece.row_starts] for piece in runner.launched] == [
        [],
        [20],
        [70],
    ]


@pytest.mark.parametrize("at_launch", [False, True])
def test_who_breaks_it_fails_alone_and_is_told_of(at_launch: bool) -> None:
    told: list[tuple[int, int, str]] = []
    runner = Runner(
        ValueError("this one"),
        StepResult([], seconds=0.5),
        StepResult([13], {0: LOGPROB}, seconds=1.0),
        breaks_at_launch=(50,) if at_launch else (),
    )
    result = run(runner, lambda step, span, error: told.append((step.number, span, type(error).__name__)))
    name = "KeyError" if at_launch else "ValueError"
    assert dict(result.failed) == {0: f"{name} in the step of this sequence"}
    assert told == [(7, 0, name)]
    assert list(result.token_ids) == [NO_TOKEN_ID, 13], "in its place, and read by nobody"
    assert (dict(result.logprobs), result.seconds) == ({2: LOGPROB}, 1.5)
    assert not result.dead_ends


def test_a_device_that_is_full_is_no_sequence_s_fault() -> None:
    told: list[int] = []
    runner = Runner(StepResult([11]), MemoryError(), StepResult([13]))
    with pytest.raises(MemoryError):
        run(runner, lambda step, span, error: told.append(span))
    assert (told, len(runner.launched)) == ([], 2)


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


class OfTorch(OutOfMemoryError):
    """A kind of it."""


def raised_by(cause: BaseException | None, context: BaseException | None = None) -> Exception:
    error = RuntimeError("capture failed")
    error.__cause__, error.__context__ = cause, context
    return error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (None, False),
        (MemoryError(), True),
        (OfTorch("x"), True),
        (RuntimeError("CUDA error: out of memory\n"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access"), False),
        (raised_by(MemoryError()), True),
        (raised_by(None, OfTorch("x")), True),
        (raised_by(raised_by(None, MemoryError())), True),
        (raised_by(KeyError("x"), KeyError("y")), False),
    ],
)
def test_a_full_device_is_known_by_name_or_text_and_behind_other_errors(
    error: BaseException | None, is_full: bool
) -> None:
    assert is_out_of_memory(error) is is_full
