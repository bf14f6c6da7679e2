"""One token per row from its logits: the most likely, or drawn with the noise of kernels/noise.py.

Bytes: the logits once, num_rows * vocab_size * itemsize; all else is small. Every row is split over several
programs, so that one row as well as 256 fill the device, and the last program of a row to finish merges the
parts. No decision is taken on the host and no shape depends on data: the launches fit in a CUDA graph.
Parameters are read from tables on the device, by row.

Up to three launches: edits of the logits (penalties, bias, masks: sample_edits.py), the lowest logit that
top-k, top-p and min-p keep (sample_filters.py), and the draw, here.

The draw is the argmax over kept tokens of `logit / temperature - log(noise)`, the lowest id among equals. Two
logarithms a token would cost more than reading it, so they are taken only where they can matter
(sample_best.py). A row's token is the same for any batch and any split.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.sample_best import NOTHING, best_of_part
from kernels.sample_columns import SampleColumns
from kernels.sample_edits import SampleEdits, edit_logits
from kernels.sample_filters import CANDIDATES, lowest_kept


@dataclass(frozen=True, slots=True)
class SampleLaunch:
    """Launch shape of the draw; timings of the choices in docs/kernels/sampling.md."""

    counters: int = 256  # of the noise generator a loop turn; each is four tokens
    warps: int = 1  # one: its reductions need no barrier
    programs_per_sm: int = 32
    registers: int = 64  # of a thread at most: so many programs run at once


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
    best: Tensor  # int32 [max_rows], NOTHING between launches: the best score of any part so far, in order
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
        best=torch.full((max_rows,), NOTHING.value, dtype=torch.int32, device=device),
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
        scratch.best,
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
        **({"maxnreg": launch.registers} if logits.is_cuda else {}),
    )


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
    row_bests,
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
        best, best_id, is_bad = best_of_part(
            changed,
            begin,
            end,
            vocab_size,
            temperature,
            lowest,
            key,
            row_bests + i,
            COUNTERS,
            IS_PACKED,
            HAS_FILTERS,
        )
    else:
        best, best_id, is_bad = best_of_part(
            plain,
            begin,
            end,
            vocab_size,
            temperature,
            lowest,
            key,
            row_bests + i,
            COUNTERS,
            IS_PACKED,
            HAS_FILTERS,
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
        tl.store(row_bests + i, NOTHING)
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
