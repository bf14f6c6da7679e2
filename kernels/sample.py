"""One token per row from its logits: the most likely, or drawn with the noise of kernels/noise.py.

Bytes: the logits once, num_rows * vocab_size * itemsize; all else is small. Every row is split over several
programs, so that one row as well as 256 fill the device, and the last program of a row to finish merges the
parts. No decision is taken on the host and no shape depends on data: the launches fit in a CUDA graph.
Parameters are read from tables on the device, by row.

Up to three launches: edits of the logits (penalties, bias, masks: sample_edits.py), the lowest logit that
top-k, top-p and min-p keep (sample_filters.py), and the draw, here.

The draw is the argmax over kept tokens of `logit / temperature - log(noise)`, the lowest id among equals. Two
logarithms a token would cost more than reading it, so they are taken only where they can matter: noise is at
least its fraction v, so the least v / exp(logit / temperature) belongs to the token whose score has the
highest bound. That one is scored first, exactly; then the next, until no bound is above the best score. A
row's token is thus the same for any batch and any split.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.sample_columns import SampleColumns
from kernels.sample_edits import SampleEdits, edit_logits
from kernels.sample_filters import CANDIDATES, lowest_kept
from kernels.sample_noise import log_noise, philox_words


@dataclass(frozen=True, slots=True)
class SampleLaunch:
    """Launch shape of the draw; timings of the choices in docs/kernels/sampling.md."""

    counters: int = 256  # of the noise generator a loop turn; each is four tokens
    warps: int = 1  # one: its reductions need no barrier
    programs_per_sm: int = 32


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Results, and what programs of one row leave for one another. Made once; lives in the CUDA graph."""

    ids: Tensor  # int32 [max_rows]
    is_finite: Tensor  # bool [max_rows]
    lowest: Tensor  # fp32 [max_rows]: lowest kept logit
    candidates: Tensor  # fp32 [max_rows, room]: put aside by the search for it
    part_scores: Tensor  # fp32 [max_rows, parts]
    part_ids: Tensor  # int32 [max_rows, parts]
    arrived: Tensor  # int32 [max_rows], zero between launches
    num_programs: int
    launch: SampleLaunch


def make_scratch(
    max_rows: int,
    vocab_size: int,
    device: torch.device,
    *,
    room: int = CANDIDATES,
    launch: SampleLaunch = SampleLaunch(),
) -> SampleScratch:
    """Buffers for steps that sample at most `max_rows` rows."""
    programs = 4
    if device.type == "cuda":
        programs = launch.programs_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    parts = triton.cdiv(vocab_size, 4 * launch.counters)
    return SampleScratch(
        ids=torch.zeros(max_rows, dtype=torch.int32, device=device),
        is_finite=torch.zeros(max_rows, dtype=torch.bool, device=device),
        lowest=torch.full((max_rows,), float("-inf"), device=device),
        candidates=torch.empty(max_rows, room, device=device),
        part_scores=torch.empty(max_rows, parts, device=device),
        part_ids=torch.empty(max_rows, parts, dtype=torch.int32, device=device),
        arrived=torch.zeros(max_rows, dtype=torch.int32, device=device),
        num_programs=programs,
        launch=launch,
    )


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SampleColumns,
    scratch: SampleScratch,
    vocab_size: int,
    *,
    edits: SampleEdits | None = None,
    with_filters: bool = True,
    token_pool: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids int32 [n], 0 where not finite; is_finite bool [n]. Both are views of scratch.

    logits [n, >= vocab_size], bf16 or fp32: not changed; rows, positions int32 [n]: of the token to be drawn.
    A row is finite unless its logits hold NaN or +inf or nothing but -inf. `edits`: None when no row of this
    step has any; drawn tokens are added to its history. `with_filters`: False when no row has top-k, top-p
    or min-p. `token_pool` int32 [num_rows, width]: ids are also written to [row, position], where the next
    step reads them; past the last column to the last column of the last row.
    """
    num_sampled = rows.shape[0]
    _check(logits, rows, positions, scratch, vocab_size)
    if num_sampled == 0:
        return scratch.ids[:0], scratch.is_finite[:0]
    if edits is not None:
        edit_logits(logits, edits, rows, positions)
    if with_filters:
        filters = (columns.temperature, columns.top_k, columns.top_p, columns.log_min_p)
        lowest_kept(logits, edits, rows, *filters, vocab_size, scratch.candidates, out=scratch.lowest)
    _draw(logits, rows, positions, columns, scratch, vocab_size, edits, with_filters, token_pool)
    return scratch.ids[:num_sampled], scratch.is_finite[:num_sampled]


def _check(logits: Tensor, rows: Tensor, positions: Tensor, scratch: SampleScratch, vocab_size: int) -> None:
    num_sampled = rows.shape[0]
    assert logits.dtype in (torch.bfloat16, torch.float32), f"logits are {logits.dtype}"
    assert logits.shape[0] == num_sampled == positions.shape[0], f"{tuple(logits.shape)}, {num_sampled} rows"
    assert logits.shape[1] >= vocab_size, f"logits are {tuple(logits.shape)}, vocabulary {vocab_size}"
    assert logits.stride(1) == 1, "logits of one row must be contiguous"
    assert num_sampled <= scratch.ids.shape[0], (
        f"scratch is for {scratch.ids.shape[0]} rows, not {num_sampled}"
    )
    parts = triton.cdiv(vocab_size, 4 * scratch.launch.counters)
    assert parts <= scratch.part_ids.shape[1], f"scratch is for a vocabulary smaller than {vocab_size}"


def _draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SampleColumns,
    scratch: SampleScratch,
    vocab_size: int,
    edits: SampleEdits | None,
    with_filters: bool,
    token_pool: Tensor | None,
) -> None:
    num_sampled, launch = rows.shape[0], scratch.launch
    tiles = triton.cdiv(vocab_size, 4 * launch.counters)
    tiles_per_part = triton.cdiv(tiles * num_sampled, scratch.num_programs)
    parts = triton.cdiv(tiles, tiles_per_part)
    # Four logits in one load, where every row starts at a multiple of eight bytes.
    is_packed = (logits.data_ptr() | logits.stride(0) * logits.element_size()) % 8 == 0
    _draw_kernel[(parts, num_sampled)](
        logits,
        edits.edited if edits is not None else logits,
        edits.line if edits is not None else rows,
        edits.output_counts if edits is not None else rows,
        rows,
        positions,
        columns.temperature,
        columns.seed_low,
        columns.seed_high,
        columns.choice,
        scratch.lowest,
        scratch.part_scores,
        scratch.part_ids,
        scratch.arrived,
        scratch.ids,
        scratch.is_finite.view(torch.int8),
        token_pool if token_pool is not None else rows,
        logits.stride(0),
        edits.edited.stride(0) if edits is not None else 0,
        edits.output_counts.stride(0) if edits is not None else 0,
        scratch.part_ids.stride(0),
        token_pool.shape[0] if token_pool is not None else 0,
        token_pool.shape[1] if token_pool is not None else 0,
        vocab_size,
        triton.cdiv(vocab_size, 4),
        tiles_per_part * launch.counters,
        # Of the scratch, not of this step: one kernel for all numbers of rows.
        PARTS_PADDED=triton.next_power_of_2(scratch.part_ids.shape[1]),
        COUNTERS=launch.counters,
        IS_PACKED=is_packed and vocab_size % 4 == 0,
        HAS_EDITS=edits is not None,
        HAS_FILTERS=with_filters,
        HAS_POOL=token_pool is not None,
        **dependent_launch(logits.device),
        num_warps=launch.warps,
        enable_fp_fusion=True,
    )


@triton.jit
def _four_logits(row, counter, end, vocab_size, IS_PACKED: tl.constexpr):
    """fp32 logits of tokens 4 * counter .. + 3; -inf for counters from `end` on and past the vocabulary."""
    inside = counter < end
    if IS_PACKED:
        words = row.to(tl.pointer_type(tl.int64))
        if row.dtype.element_ty == tl.bfloat16:
            word = tl.load(words + counter, mask=inside, other=-0x7F007F007F0080)
            low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
            a, b, c, d = low << 16, low & -65536, high << 16, high & -65536
        else:
            first = tl.load(words + 2 * counter, mask=inside, other=-0x7FFFFF00800000)
            second = tl.load(words + 2 * counter + 1, mask=inside, other=-0x7FFFFF00800000)
            a, b = first.to(tl.int32), (first >> 32).to(tl.int32)
            c, d = second.to(tl.int32), (second >> 32).to(tl.int32)
        a, b = a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)
        c, d = c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True)
    else:
        at = row + 4 * counter
        left = tl.where(inside, vocab_size - 4 * counter, 0)
        a = tl.load(at, mask=left > 0, other=float("-inf")).to(tl.float32)
        b = tl.load(at + 1, mask=left > 1, other=float("-inf")).to(tl.float32)
        c = tl.load(at + 2, mask=left > 2, other=float("-inf")).to(tl.float32)
        d = tl.load(at + 3, mask=left > 3, other=float("-inf")).to(tl.float32)
    return a, b, c, d


@triton.jit
def _highest(a, b, c, d):
    """Of four logits; NaN if one is."""
    ab = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    cd = tl.maximum(c, d, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(ab, cd, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _best_of_counter(row, counter, vocab_size, temperature, lowest, key):
    """The highest score of the four tokens of a counter, exactly, and its token."""
    w0, w1, w2, w3 = philox_words(counter.to(tl.uint32), key)
    at = tl.arange(0, 4)
    token = 4 * counter + at
    logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    score = logit
    if temperature > 0.0:
        word = tl.where(at < 2, tl.where(at == 0, w0, w1), tl.where(at == 2, w2, w3))
        score = tl.div_rn(logit, temperature) - log_noise(word)
    score = tl.where(logit >= lowest, score, float("-inf"))
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)


@triton.jit
def _best_of_part(
    row,
    begin,
    end,
    vocab_size,
    temperature,
    lowest,
    key,
    COUNTERS: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Best score of counters begin .. end - 1, its token (-1: none), and whether there is a NaN or +inf."""
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], -1, tl.int32)
    is_bad = tl.zeros([COUNTERS], tl.int32)
    is_random = temperature > 0.0
    inverse = 1.0 / tl.where(is_random, temperature, 1.0)
    lane = tl.arange(0, COUNTERS)
    for first in range(begin, end, COUNTERS):
        a, b, c, d = _four_logits(row, first + lane, end, vocab_size, IS_PACKED)
        high = _highest(a, b, c, d)
        is_bad = tl.where(high < float("inf"), is_bad, 1)
        is_open = (high >= lowest) & (high > float("-inf")) & (high < float("inf"))
        top = tl.max(tl.where(is_open, high, -1.0e30), 0)
        # A counter's bound is an order: the smaller, the higher the best score its four tokens can have.
        behind = top - tl.where(is_open, high, top)
        if is_random:
            w0, w1, w2, w3 = philox_words((first + lane).to(tl.uint32), key)
            word = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
            shrink = tl.exp2(tl.minimum(behind * (inverse * 1.4426950408889634), 90.0))
            behind = (word.to(tl.float32) + 0.5) * shrink
        behind = tl.where(is_open, behind, float("inf"))
        least, place = tl.min(behind, 0, return_indices=True)
        is_searching = least < _reach(best, top, inverse, is_random)
        while is_searching:
            score, token = _best_of_counter(row, first + place, vocab_size, temperature, lowest, key)
            # Of equals the lowest id, whichever was scored first: bounds are not in the order of tokens.
            best_id = tl.where((score > best) | ((score == best) & (token < best_id)), token, best_id)
            best = tl.maximum(score, best)
            behind = tl.where(lane == place, float("inf"), behind)
            least, place = tl.min(behind, 0, return_indices=True)
            is_searching = least < _reach(best, top, inverse, is_random)
    return best, best_id, tl.max(is_bad, 0)


@triton.jit
def _reach(best, top, inverse, is_random):
    """What a counter's bound must be below, if one of its tokens is to score higher than `best`."""
    ahead = top - best
    if is_random:
        scaled = top * inverse
        # The last terms: more than all rounding errors of bounds and scores.
        ahead = (scaled - best) * 1.4426950408889634 + 32.0 + 1e-3 + tl.abs(scaled) * 1e-5
        ahead = tl.exp2(tl.minimum(ahead, 125.0))
    return ahead


@triton.jit
def _draw_kernel(
    logits,
    edited,
    line_of_row,
    output_counts,
    rows,
    positions,
    temperatures,
    seed_lows,
    seed_highs,
    choices,
    lowests,
    part_scores,
    part_ids,
    arrived,
    ids,
    is_finite,
    token_pool,
    logits_stride,
    edited_stride,
    counts_stride,
    parts_stride,
    pool_rows,
    pool_width,
    vocab_size,
    num_counters,
    part_size,
    PARTS_PADDED: tl.constexpr,
    COUNTERS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    HAS_POOL: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + i)
    position = tl.load(positions + i)
    temperature = tl.load(temperatures + row)
    lowest = tl.full([], float("-inf"), tl.float32)
    if HAS_FILTERS:
        lowest = tl.load(lowests + i)
    begin = part * part_size
    end = tl.minimum(begin + part_size, num_counters)
    seed_low = tl.load(seed_lows + row).to(tl.uint32)
    seed_high = tl.load(seed_highs + row).to(tl.uint32)
    choice = tl.load(choices + row).to(tl.uint32)
    line = tl.full([], -1, tl.int64)
    if HAS_EDITS:
        line = tl.load(line_of_row + row).to(tl.int64)
    plain = logits + i * logits_stride
    changed = edited + line * edited_stride
    key = (position.to(tl.uint32), choice, seed_low, seed_high)
    if line >= 0:
        best, best_id, is_bad = _best_of_part(
            changed, begin, end, vocab_size, temperature, lowest, key, COUNTERS, IS_PACKED
        )
    else:
        best, best_id, is_bad = _best_of_part(
            plain, begin, end, vocab_size, temperature, lowest, key, COUNTERS, IS_PACKED
        )
    best_id = tl.where(is_bad != 0, -2, best_id)
    is_last = tl.full([], 1, tl.int1)
    if PARTS_PADDED > 1:
        tl.store(part_scores + i * parts_stride + part, best)
        tl.store(part_ids + i * parts_stride + part, best_id)
        # The last program to arrive merges: the barrier orders this program's stores before the count.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + i, 1, sem="acq_rel")
        is_last = before == tl.num_programs(0) - 1
        if is_last:
            tl.debug_barrier()
            at = tl.arange(0, PARTS_PADDED)
            real = at < tl.num_programs(0)
            score = tl.load(
                part_scores + i * parts_stride + at, mask=real, other=float("-inf"), cache_modifier=".cg"
            )
            token = tl.load(part_ids + i * parts_stride + at, mask=real, other=-1, cache_modifier=".cg")
            is_bad = tl.max((token == -2).to(tl.int32), 0)
            # Parts are in the order of their tokens: the first of equals has the lowest id.
            best = tl.max(score, 0)
            best_id = tl.min(tl.where((score == best) & (token >= 0), token, 0x7FFFFFFF), 0)
            best_id = tl.where((best > float("-inf")) & (is_bad == 0), best_id, -1)
            tl.store(arrived + i, 0)
    if is_last:
        is_good = best_id >= 0
        best_id = tl.maximum(best_id, 0)
        tl.store(ids + i, best_id)
        tl.store(is_finite + i, is_good.to(tl.int8))
        if HAS_EDITS:
            tl.atomic_add(output_counts + line * counts_stride + best_id, 1, mask=line >= 0)
        if HAS_POOL:
            fits = position < pool_width
            to_row = tl.where(fits, row, pool_rows - 1).to(tl.int64)
            tl.store(token_pool + to_row * pool_width + tl.where(fits, position, pool_width - 1), best_id)
