"""A step that raised, run again span by span, to find out whose sequence breaks it.

Writing K and V twice gives the same K and V, so every span may run again. What a runner keeps of a row
besides (counts of its tokens, where it stands in its constraint) may hold tokens of the steps that are void:
each row is begun anew from what was committed. Each piece carries what the runner needs for its own row and
nothing else. Owns nothing.
"""

from array import array
from collections.abc import Callable

from worker.execution.runner import Runner
from worker.ids import SequenceId
from worker.scheduling.step import RowStart, Step, StepResult, TokenLogprob

NO_TOKEN_ID = -1
"""Stands for the token of a span that failed; nobody reads it."""

OUT_OF_MEMORY_NAMES = frozenset({"OutOfMemoryError", "MemoryError"})
OUT_OF_MEMORY_TEXTS = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
"""Of what is no allocation of torch's: a graph, pinned memory, a kernel that is loaded."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device is full: by name, since the engine imports no torch, or by text. Also where that
    broke off something, as a graph's capture, whose end then raised an error of its own.
    """
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if names & OUT_OF_MEMORY_NAMES or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def one_span(step: Step, span: int, start: RowStart | None) -> Step:
    """The part of a step that concerns one span, and what concerns none: writing that twice is fine.

    `start`: how its row is as of the commit before this step; None: its sequence has ended.
    """
    row = step.rows[span]
    others = set(step.rows) - {row}
    entries = [entry for entry, other in enumerate(step.new_page_rows) if other not in others]
    pages = {step.new_page_ids[entry] for entry in entries}
    length = step.ends[span] - step.starts[span]
    return Step(
        number=step.number,
        sequence_ids=(step.sequence_ids[span],),
        rows=step.rows[span : span + 1],
        starts=step.starts[span : span + 1],
        ends=step.ends[span : span + 1],
        sampled=(0,) if span in set(step.sampled) else (),
        num_decode=1 if span < step.num_decode and length == 1 else 0,
        row_starts=[each for each in step.row_starts if each.row == row] if start is None else [start],
        page_copies=[copy for copy in step.page_copies if copy.target in pages],
        new_page_rows=array("i", [step.new_page_rows[entry] for entry in entries]),
        new_page_indexes=array("i", [step.new_page_indexes[entry] for entry in entries]),
        new_page_ids=array("i", [step.new_page_ids[entry] for entry in entries]),
    )


def run_span_by_span(
    runner: Runner,
    step: Step,
    start_of: Callable[[SequenceId], RowStart | None],
    on_failure: Callable[[Step, int, BaseException], None],
) -> StepResult:
    """The result of a step whose spans run alone; who raises is in `failed`. Lets out-of-memory through.

    All steps before it must be committed: `start_of` says how rows are then.
    """
    tokens: dict[int, int] = {}
    logprobs: dict[int, TokenLogprob] = {}
    prompt_logprobs = {}
    failed: dict[int, str] = {}
    dead_ends: set[int] = set()
    seconds = 0.0
    for span in range(len(step.rows)):
        try:
            result = runner.launch(one_span(step, span, start_of(step.sequence_ids[span]))).result()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failed[span] = f"{type(error).__name__} in the step of this sequence"
            on_failure(step, span, error)
            continue
        seconds += result.seconds
        if result.token_ids:
            tokens[span] = result.token_ids[0]
        if 0 in result.logprobs:
            logprobs[span] = result.logprobs[0]
        if 0 in result.prompt_logprobs:
            prompt_logprobs[span] = result.prompt_logprobs[0]
        if 0 in result.failed:
            failed[span] = result.failed[0]
        if 0 in result.dead_ends:
            dead_ends.add(span)
    ids = [tokens.get(span, NO_TOKEN_ID) for span in step.sampled]
    return StepResult(ids, logprobs, prompt_logprobs, failed, seconds, dead_ends)
