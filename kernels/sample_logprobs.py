"""Log-probability and rank of the tokens drawn, for rows that ask: of the edited logits, at temperature 1.

Bytes: the logits of those rows once, most often from the second-level cache. A row is split over programs as
in sample.py; the last to finish merges. Rows that do not ask cost programs that end at once. The best
alternatives of a row are its highest logits less `log_mass`: each program finds those of its part of the row
as keys, of which no two are equal, so that the best of all parts are the same for any batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sample_edits import SampleEdits

_TILE = 2048
_TILES_PER_PART = 4
_BEST_TILE = 4096  # tokens a program that looks for the best
_LAST_ID = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class LogprobScratch:
    """Results, and what programs of one row leave for one another; for one step after the other."""

    chosen: Tensor  # fp32 [max_rows]: log-probability of the token drawn
    ranks: Tensor  # int32 [max_rows], from 1; equals share the better one
    log_mass: Tensor  # fp32 [max_rows]: log of the sum of exp(logit)
    part_peaks: Tensor  # fp32 [max_rows, parts]
    part_masses: Tensor  # fp32 [max_rows, parts]
    part_ranks: Tensor  # int32 [max_rows, parts]
    arrived: Tensor  # int32 [max_rows], zero between launches
    best_keys: Tensor  # int64 [max_rows, parts, max_best]: logits' bits in their order, then ids downwards


def make_logprob_scratch(
    max_rows: int, vocab_size: int, device: torch.device, *, max_best: int = 32
) -> LogprobScratch:
    """Buffers for steps that sample at most `max_rows` rows, with `max_best` alternatives: a power of 2."""
    parts = triton.cdiv(vocab_size, _TILE * _TILES_PER_PART)
    return LogprobScratch(
        chosen=torch.zeros(max_rows, device=device),
        ranks=torch.zeros(max_rows, dtype=torch.int32, device=device),
        log_mass=torch.zeros(max_rows, device=device),
        part_peaks=torch.empty(max_rows, parts, device=device),
        part_masses=torch.empty(max_rows, parts, device=device),
        part_ranks=torch.empty(max_rows, parts, dtype=torch.int32, device=device),
        arrived=torch.zeros(max_rows, dtype=torch.int32, device=device),
        best_keys=torch.empty(
            max_rows, triton.cdiv(vocab_size, _BEST_TILE), max_best, dtype=torch.int64, device=device
        ),
    )


def token_logprobs(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    num_logprobs: Tensor,
    scratch: LogprobScratch,
    vocab_size: int,
    *,
    edits: SampleEdits | None = None,
) -> None:
    """Fills the first three tensors of scratch for rows that ask; the entries of others are not touched.

    logits [n, >= vocab_size], bf16 or fp32; rows, ids int32 [n]; num_logprobs int32 [num_rows]: -1 where a
    row does not ask. `edits` as they were given to `sample`.
    """
    num_sampled = rows.shape[0]
    assert logits.stride(1) == 1, "logits of one row must be contiguous"
    assert num_sampled <= scratch.ranks.shape[0], f"scratch is for {scratch.ranks.shape[0]} rows"
    parts = scratch.part_ranks.shape[1]
    assert parts == triton.cdiv(vocab_size, _TILE * _TILES_PER_PART), "scratch is for another vocabulary"
    if num_sampled == 0:
        return
    _logprob_kernel[(parts, num_sampled)](
        logits,
        edits.edited if edits is not None else logits,
        edits.line if edits is not None else rows,
        rows,
        ids,
        num_logprobs,
        scratch.chosen,
        scratch.ranks,
        scratch.log_mass,
        scratch.part_peaks,
        scratch.part_masses,
        scratch.part_ranks,
        scratch.arrived,
        logits.stride(0),
        edits.edited.stride(0) if edits is not None else 0,
        vocab_size,
        PARTS_PADDED=triton.next_power_of_2(parts),
        HAS_EDITS=edits is not None,
        TILE=_TILE,
        TILES=_TILES_PER_PART,
        num_warps=4,
        enable_fp_fusion=True,
    )


def find_best(
    logits: Tensor,
    rows: Tensor,
    num_logprobs: Tensor,
    scratch: LogprobScratch,
    vocab_size: int,
    *,
    edits: SampleEdits | None = None,
) -> None:
    """Fills `best_keys` for rows that ask, for `best_of`; arguments as for `token_logprobs`."""
    num_parts, max_best = scratch.best_keys.shape[1:]
    assert num_parts == triton.cdiv(vocab_size, _BEST_TILE), "scratch is for another vocabulary"
    _best_kernel[(num_parts, rows.shape[0])](
        logits,
        edits.edited if edits is not None else logits,
        edits.line if edits is not None else rows,
        rows,
        num_logprobs,
        scratch.best_keys,
        logits.stride(0),
        edits.edited.stride(0) if edits is not None else 0,
        vocab_size,
        MAX_BEST=max_best,
        HAS_EDITS=edits is not None,
        TILE=_BEST_TILE,
        num_warps=8,
    )


def best_of(scratch: LogprobScratch, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities fp32 and ids int32 [len(index), count] of the best tokens, lower ids first of equals.

    index: which of the rows that were sampled, all of whom asked; what a row did not ask for is undefined.
    """
    keys = scratch.best_keys[index].flatten(1).topk(count, dim=-1).values
    bits, last = (keys >> 32).int(), keys & _LAST_ID
    logits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return logits - scratch.log_mass[index][:, None], (_LAST_ID - last).int()


@triton.jit
def _best_kernel(
    logits,
    edited,
    line_of_row,
    rows,
    num_logprobs,
    best_keys,
    logits_stride,
    edited_stride,
    vocab_size,
    MAX_BEST: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + i)
    count = tl.load(num_logprobs + row)
    if count > 0:
        token = tl.program_id(0) * TILE + tl.arange(0, TILE)
        line = tl.full([], -1, tl.int64)
        if HAS_EDITS:
            line = tl.load(line_of_row + row).to(tl.int64)
        if line >= 0:
            x = tl.load(edited + line * edited_stride + token, mask=token < vocab_size, other=0.0)
            x = x.to(tl.float32)
        else:
            x = tl.load(logits + i * logits_stride + token, mask=token < vocab_size, other=0.0)
            x = x.to(tl.float32)
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # both zeros are one logit
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        none = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
        keys = (bits.to(tl.int64) << 32) + (0x7FFFFFFF - token).to(tl.int64)
        keys = tl.where(token < vocab_size, keys, none)
        place = tl.arange(0, MAX_BEST)
        found = tl.zeros([MAX_BEST], tl.int64) + none
        for turn in range(tl.minimum(count, MAX_BEST)):
            best = tl.max(keys, 0)
            found = tl.where(place == turn, best, found)
            keys = tl.where(keys == best, none, keys)
        at = (i * tl.num_programs(0) + tl.program_id(0)) * MAX_BEST
        tl.store(best_keys + at + place, found)


@triton.jit
def _weigh_part(row, begin, vocab_size, chosen, TILE: tl.constexpr, TILES: tl.constexpr):
    """Of one part: highest logit, sum of exp(logit - highest), and how many are above the chosen one's."""
    peak = tl.full([TILE], -1.0e30, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    above = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(TILES):
        at = begin + tile * TILE + tl.arange(0, TILE)
        x = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, x)
        mass = mass * tl.exp(peak - new_peak) + tl.exp(x - new_peak)
        peak = new_peak
        above += (x > chosen).to(tl.int32)
    top = tl.max(peak, 0)
    return top, tl.sum(mass * tl.exp(peak - top), 0), tl.sum(above, 0)


@triton.jit
def _logprob_kernel(
    logits,
    edited,
    line_of_row,
    rows,
    ids,
    num_logprobs,
    chosen_out,
    ranks,
    log_mass,
    part_peaks,
    part_masses,
    part_ranks,
    arrived,
    logits_stride,
    edited_stride,
    vocab_size,
    PARTS_PADDED: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + i)
    if tl.load(num_logprobs + row) >= 0:
        token = tl.load(ids + i)
        begin = tl.program_id(0) * TILE * TILES
        line = tl.full([], -1, tl.int64)
        if HAS_EDITS:
            line = tl.load(line_of_row + row).to(tl.int64)
        if line >= 0:
            chosen = tl.load(edited + line * edited_stride + token).to(tl.float32)
            peak, mass, rank = _weigh_part(
                edited + line * edited_stride, begin, vocab_size, chosen, TILE, TILES
            )
        else:
            chosen = tl.load(logits + i * logits_stride + token).to(tl.float32)
            peak, mass, rank = _weigh_part(logits + i * logits_stride, begin, vocab_size, chosen, TILE, TILES)
        at = i * tl.num_programs(0) + tl.program_id(0)
        tl.store(part_peaks + at, peak)
        tl.store(part_masses + at, mass)
        tl.store(part_ranks + at, rank)
        # The last program to arrive merges: the barrier orders this program's stores before the count.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + i, 1, sem="acq_rel")
        if before == tl.num_programs(0) - 1:
            tl.debug_barrier()
            part = tl.arange(0, PARTS_PADDED)
            real = part < tl.num_programs(0)
            at_part = i * tl.num_programs(0) + part
            peaks = tl.load(part_peaks + at_part, mask=real, other=-1.0e30, cache_modifier=".cg")
            masses = tl.load(part_masses + at_part, mask=real, other=0.0, cache_modifier=".cg")
            above = tl.load(part_ranks + at_part, mask=real, other=0, cache_modifier=".cg")
            top = tl.max(peaks, 0)
            # Parts are added in their order: whoever comes last, the sum is the same.
            total = top + tl.log(tl.sum(masses * tl.exp(peaks - top), 0))
            tl.store(log_mass + i, total)
            tl.store(chosen_out + i, chosen - total)
            tl.store(ranks + i, tl.sum(above, 0) + 1)
            tl.store(arrived + i, 0)
