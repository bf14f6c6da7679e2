"""Logits as a row's request wants them before anything is drawn: penalties, bias, masked stop tokens.

Bytes, for rows with edits only: the logits, 5 bytes of history per token and 4 of the result. Edited rows
go to lines of their own in fp32, so that logits in bf16 are not rounded again. Programs of rows without edits
end at once. Rounds like plain torch operations one after the other: no fused multiply-add.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # tokens a program
_ALIGNMENT = 4  # elements: rows of `edited` start at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class SampleEdits:
    """Edits of the rows that have any, on the device. A row owns one line while it runs, or none."""

    line: Tensor  # int32 [num_rows]: -1 where the row has no edits
    # By line:
    repetition_penalty: Tensor  # fp32 [num_lines]; 1: off; over prompt and output
    frequency_penalty: Tensor  # fp32 [num_lines]; 0: off; over output
    presence_penalty: Tensor  # fp32 [num_lines]; 0: off; over output
    first_free_end: Tensor  # int32 [num_lines]: stop tokens may be drawn from this position on
    output_counts: Tensor  # int32 [num_lines, vocab_size]: times each token was put out
    in_prompt: Tensor  # bool [num_lines, vocab_size]
    bias_ids: Tensor  # int32 [num_lines, max_bias]; -1: none; no id twice in a line
    bias_values: Tensor  # fp32 [num_lines, max_bias]
    stop_ids: Tensor  # int32 [num_lines, max_stops]; -1: none
    edited: Tensor  # fp32 [num_lines, at least vocab_size]: scratch


def make_edits(
    num_rows: int, num_lines: int, vocab_size: int, device: torch.device, *, max_bias: int, max_stops: int
) -> SampleEdits:
    """Tables without any edit. A line costs 9 bytes per token of the vocabulary."""

    def ids(size: int) -> Tensor:
        return torch.full((num_lines, size), -1, dtype=torch.int32, device=device)

    width = triton.cdiv(vocab_size, _ALIGNMENT) * _ALIGNMENT
    return SampleEdits(
        line=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
        repetition_penalty=torch.ones(num_lines, device=device),
        frequency_penalty=torch.zeros(num_lines, device=device),
        presence_penalty=torch.zeros(num_lines, device=device),
        first_free_end=torch.zeros(num_lines, dtype=torch.int32, device=device),
        output_counts=torch.zeros(num_lines, vocab_size, dtype=torch.int32, device=device),
        in_prompt=torch.zeros(num_lines, vocab_size, dtype=torch.bool, device=device),
        bias_ids=ids(max_bias),
        bias_values=torch.zeros(num_lines, max_bias, device=device),
        stop_ids=ids(max_stops),
        edited=torch.zeros(num_lines, width, device=device),
    )


@dataclass(frozen=True, slots=True)
class EditRow:
    """One sequence's edits. Ids outside of the vocabulary are left out."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    first_free_end: int = 0
    prompt_ids: Sequence[int] = ()  # for penalties, as the next
    output_ids: Sequence[int] = ()
    bias: Sequence[tuple[int, float]] = ()
    stop_ids: Iterable[int] = ()  # to be masked before first_free_end


def write_line(edits: SampleEdits, line: int, value: EditRow) -> None:
    """Sets all of a line. Raises ValueError when a list is longer than the table is wide."""
    vocab_size = edits.output_counts.shape[1]
    device = edits.output_counts.device

    def on_device(token_ids: Iterable[int]) -> Tensor:
        return torch.tensor([t for t in token_ids if 0 <= t < vocab_size], dtype=torch.int64).to(device)

    bias = [(token, added) for token, added in value.bias if 0 <= token < vocab_size]
    biased, stops = on_device(token for token, _ in bias), on_device(value.stop_ids)
    for name, ids, table in (("biased", biased, edits.bias_ids), ("stop", stops, edits.stop_ids)):
        if len(ids) > table.shape[1]:
            raise ValueError(f"{len(ids)} {name} ids in a table of {table.shape[1]}")
    edits.repetition_penalty[line] = value.repetition_penalty
    edits.frequency_penalty[line] = value.frequency_penalty
    edits.presence_penalty[line] = value.presence_penalty
    edits.first_free_end[line] = value.first_free_end
    put_out = on_device(value.output_ids)
    edits.output_counts[line] = 0
    edits.output_counts[line].index_add_(0, put_out, torch.ones_like(put_out, dtype=torch.int32))
    edits.in_prompt[line] = False
    edits.in_prompt[line].index_fill_(0, on_device(value.prompt_ids), True)
    edits.bias_ids[line] = -1
    edits.bias_ids[line, : len(biased)] = biased.int()
    edits.bias_values[line, : len(biased)] = torch.tensor([added for _, added in bias]).to(device)
    edits.stop_ids[line] = -1
    edits.stop_ids[line, : len(stops)] = stops.int()


def edit_logits(logits: Tensor, edits: SampleEdits, rows: Tensor, positions: Tensor) -> None:
    """Fills `edits.edited` for the rows of this step that have a line.

    logits [num_sampled, >= vocab_size]; rows, positions int32 [num_sampled]: of the token to be drawn.
    """
    vocab_size = edits.output_counts.shape[1]
    assert logits.stride(1) == 1, "logits of one row must be contiguous"
    assert logits.shape[1] >= vocab_size, f"logits are {tuple(logits.shape)}, vocabulary {vocab_size}"
    max_bias, max_stops = edits.bias_ids.shape[1], edits.stop_ids.shape[1]
    _edit_kernel[(triton.cdiv(vocab_size, _TILE), rows.shape[0])](
        logits,
        rows,
        positions,
        edits.line,
        edits.repetition_penalty,
        edits.frequency_penalty,
        edits.presence_penalty,
        edits.first_free_end,
        edits.output_counts,
        edits.in_prompt.view(torch.uint8),
        edits.bias_ids,
        edits.bias_values,
        edits.stop_ids,
        edits.edited,
        logits.stride(0),
        edits.edited.stride(0),
        vocab_size,
        MAX_BIAS=max_bias,
        BIAS_PADDED=triton.next_power_of_2(max(1, max_bias)),
        MAX_STOPS=max_stops,
        STOPS_PADDED=triton.next_power_of_2(max(1, max_stops)),
        TILE=min(_TILE, triton.next_power_of_2(vocab_size)),
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _edit_kernel(
    logits,
    rows,
    positions,
    line_of_row,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    first_free_end,
    output_counts,
    in_prompt,
    bias_ids,
    bias_values,
    stop_ids,
    edited,
    logits_stride,
    edited_stride,
    vocab_size,
    MAX_BIAS: tl.constexpr,
    BIAS_PADDED: tl.constexpr,
    MAX_STOPS: tl.constexpr,
    STOPS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    begin = tl.program_id(0) * TILE
    end = tl.minimum(begin + TILE, vocab_size)
    i = tl.program_id(1).to(tl.int64)
    line = tl.load(line_of_row + tl.load(rows + i)).to(tl.int64)
    if line >= 0:
        token = begin + tl.arange(0, TILE)
        mask = token < end
        logit = tl.load(logits + i * logits_stride + token, mask=mask, other=0.0).to(tl.float32)
        repetition = tl.load(repetition_penalty + line)
        frequency = tl.load(frequency_penalty + line)
        presence = tl.load(presence_penalty + line)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            count = tl.load(output_counts + line * vocab_size + token, mask=mask, other=0)
            prompt = tl.load(in_prompt + line * vocab_size + token, mask=mask, other=0)
            scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
            logit = tl.where((count > 0) | (prompt != 0), scaled, logit)
            logit = logit - frequency * count.to(tl.float32)
            logit = tl.where(count > 0, logit - presence, logit)
        to = edited + line * edited_stride
        tl.store(to + token, logit, mask=mask)
        if MAX_BIAS > 0:
            entry = tl.arange(0, BIAS_PADDED)
            biased = tl.load(bias_ids + line * MAX_BIAS + entry, mask=entry < MAX_BIAS, other=-1)
            here = (biased >= begin) & (biased < end)
            value = tl.load(bias_values + line * MAX_BIAS + entry, mask=here, other=0.0)
            tl.debug_barrier()
            tl.store(to + biased, tl.load(to + biased, mask=here, other=0.0) + value, mask=here)
        is_early = tl.load(positions + i) < tl.load(first_free_end + line)
        if (MAX_STOPS > 0) & is_early:
            listed = tl.arange(0, STOPS_PADDED)
            stop = tl.load(stop_ids + line * MAX_STOPS + listed, mask=listed < MAX_STOPS, other=-1)
            tl.debug_barrier()
            tl.store(to + stop, float("-inf"), mask=(stop >= begin) & (stop < end))
