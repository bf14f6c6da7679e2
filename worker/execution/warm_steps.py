"""Steps of nobody: padding rows in all sizes that occur, so that real ones find everything ready.

Knows the shape of a step, not what runs it. All spans are in the dummy row, which reads and writes the dummy
page alone.
"""

from array import array
from collections.abc import Iterator

from worker.ids import SequenceId
from worker.scheduling.step import Step

SMALLEST = 16  # tokens
DECODE_CONTEXT = 640  # more than one chunk of decode attention
MANY_PROMPTS = 256
"""Up to so many tokens that are sampled the last layer's products have kernels by powers of two."""


def warm_steps(*, max_step_tokens: int, max_running: int, max_context: int, dummy_row: int) -> list[Step]:
    """Prompts beside many decodes and beside one, prompts alone, large steps first; many prompts of a few
    tokens; last a late piece. No span is longer than `max_context`: behind it a model has no positions,
    though rows of the page table go on.

    Most decodes come first: whatever grows with their number has its size before the others run.
    """
    sizes = list(_halves(max_step_tokens))
    steps = []
    for size, num_decode in _beside_prompts(sizes, max_running):
        context = min(DECODE_CONTEXT, max_context)
        spans = [(context - 1, context)] * num_decode + _prompts(size - num_decode, max_context)
        steps.append(_step(spans, dummy_row, num_decode, max_running))
    steps += [_step(_prompts(size, max_context), dummy_row, 0, max_running) for size in sizes]
    # Of two tokens: where all tokens of a step are sampled none is left out of the last layer.
    for count in _powers(min(MANY_PROMPTS, max_step_tokens // 2, max_running)):
        steps.append(_step([(0, 2)] * count, dummy_row, 0, max_running))
    if sizes:
        steps.append(_step([_late_piece(max_context)], dummy_row, 0, max_running))
    return steps


def _beside_prompts(sizes: list[int], max_running: int) -> Iterator[tuple[int, int]]:
    """Tokens of steps that mix, and how many are decodes: all that run, so that buffers have their size, then
    some, then one. Attention of few decodes has kernels of its own, and beside prompts others than in graphs.
    """
    if sizes:
        counts = ((sizes[0], sizes[0] - 1), (sizes[-1], sizes[-1] // 2), (sizes[-1], 1))
        yield from dict.fromkeys((size, min(max_running, count)) for size, count in counts)


def _late_piece(max_context: int) -> tuple[int, int]:
    """A few tokens late in a long prompt: their keys are split, by kernels that no short prompt needs.

    Run at the start, so that the first such prompt compiles nothing while streams wait.
    """
    end = max(min(SMALLEST, max_context), max_context * 3 // 4)
    return max(0, end - SMALLEST), end


def _halves(size: int) -> Iterator[int]:
    while size >= SMALLEST:
        yield size
        size //= 2


def _powers(most: int) -> Iterator[int]:
    """`most` and the powers of two below it, from 2 on: halves of 65 would leave out 33 to 64."""
    if most >= 2:
        yield most
        yield from (1 << bit for bit in reversed(range(1, (most - 1).bit_length())))


def _prompts(num_tokens: int, longest: int) -> list[tuple[int, int]]:
    whole, rest = divmod(num_tokens, longest)
    return [(0, longest)] * whole + ([(0, rest)] if rest else [])


def _step(spans: list[tuple[int, int]], row: int, num_decode: int, max_sampled: int) -> Step:
    starts, ends = zip(*spans, strict=True)
    return Step(
        number=0,
        sequence_ids=[SequenceId(0)] * len(spans),
        rows=array("i", [row] * len(spans)),
        starts=array("i", starts),
        ends=array("i", ends),
        sampled=tuple(range(min(len(spans), max_sampled))),
        num_decode=num_decode,
    )
