"""Logits as a row's request wants them before anything is drawn: penalties, bias, masked stop tokens, a mask.

Bytes, for rows with edits only: the logits, 5 bytes of history per token and 4 of the result. Edited rows
go to lines of their own in fp32, so that logits in bf16 are not rounded again. Programs of rows without edits
end at once. Rounds like plain torch operations one after the other: no fused multiply-add.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_TILE = 4096  # tokens a program
_ALIGNMENT = 4  # elements: rows of `edited` start at multiples of 16 bytes
_WORD = 32  # tokens of a word of `allowed`


@dataclass(slots=True)
class SampleEdits:
    """Edits of the rows that have any, on the device. A row owns one line while it runs, or none."""

    line: Tensor  # int32 [num_rows]: -1 where the row has no edits
    # By line:
    penalties: Tensor  # fp32 [num_lines, 3], as the first three of EditRow
    first_free_end: Tensor  # int32 [num_lines]: stop tokens may be drawn from this position on
    output_counts: Tensor  # int32 [num_lines, vocab_size]: times each token was put out
    in_prompt: Tensor  # bool [num_lines, vocab_size]
    bias_ids: Tensor  # int32 [num_lines, max_bias]; -1: none; no id twice in a line
    bias_values: Tensor  # fp32 [num_lines, max_bias]
    stop_ids: Tensor  # int32 [num_lines, max_stops]; -1: none
    allowed: Tensor  # int32 [num_lines, vocab_size / 32, rounded up]: bit t of a line is token t
    edited: Tensor  # fp32 [num_lines, at least vocab_size]: scratch


def make_edits(
    num_rows: int, num_lines: int, vocab_size: int, device: torch.device, *, max_bias: int, max_stops: int
) -> SampleEdits:
    """Tables: no row has a line yet; who gets one has it written first. It takes 9.1 bytes a token."""
    num_words = triton.cdiv(vocab_size, _WORD)

    def table(dtype: torch.dtype, *width: int) -> Tensor:
        return torch.zeros(num_lines, *width, dtype=dtype, device=device)

    return SampleEdits(
        line=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
        penalties=table(torch.float32, 3),
        first_free_end=table(torch.int32),
        output_counts=table(torch.int32, vocab_size),
        in_prompt=table(torch.bool, vocab_size),
        bias_ids=table(torch.int32, max_bias),
        bias_values=table(torch.float32, max_bias),
        stop_ids=table(torch.int32, max_stops),
        allowed=table(torch.int32, num_words),
        edited=table(torch.float32, triton.cdiv(vocab_size, _ALIGNMENT) * _ALIGNMENT),
    )


def grow_edits(edits: SampleEdits, num_lines: int, max_bias: int, max_stops: int) -> None:
    """Makes tables larger, all or none if the device is full; what lines held they hold."""
    widths = {"bias_ids": max_bias, "bias_values": max_bias, "stop_ids": max_stops}
    larger: dict[str, Tensor] = {}
    for name in (each.name for each in fields(edits) if each.name != "line"):
        table: Tensor = getattr(edits, name)
        width = table.shape[1:] if name not in widths else (widths[name],)
        larger[name] = table.new_full((num_lines, *width), -1 if name.endswith("_ids") else 0)
        larger[name][tuple(map(slice, table.shape))] = table
    for name, table in larger.items():
        setattr(edits, name, table)


@dataclass(frozen=True, slots=True)
class EditRow:
    """One sequence's edits. Ids outside of the vocabulary are left out."""

    repetition_penalty: float = 1.0  # 1: off; over prompt and output
    frequency_penalty: float = 0.0  # 0: off; over output, as the next
    presence_penalty: float = 0.0
    first_free_end: int = 0
    prompt_ids: Sequence[int] = ()  # for penalties, as the next
    output_ids: Sequence[int] = ()
    bias: Sequence[tuple[int, float]] = ()
    stop_ids: Collection[int] = ()  # to be masked before first_free_end


def write_line(edits: SampleEdits, line: int, value: EditRow) -> None:
    """Sets all of a line; every token is allowed. Never waits for the device.

    Raises ValueError when a list is longer than the table is wide.
    """
    vocab_size = edits.output_counts.shape[1]
    bias = [(token, added) for token, added in value.bias if 0 <= token < vocab_size]
    stops = [token for token in value.stop_ids if 0 <= token < vocab_size]
    for name, ids, table in (("biased", bias, edits.bias_ids), ("stop", stops, edits.stop_ids)):
        if len(ids) > table.shape[1]:
            raise ValueError(f"{len(ids)} {name} ids in a table of {table.shape[1]}")
    edits.first_free_end[line] = value.first_free_end
    factors = (value.repetition_penalty, value.frequency_penalty, value.presence_penalty)
    lists = (
        np.array(factors, np.float32).view(np.int32),
        _known_ids(value.prompt_ids, vocab_size),
        _known_ids(value.output_ids, vocab_size),
        np.array([token for token, _ in bias], np.int32),
        np.array([added for _, added in bias], np.float32).view(np.int32),
        np.array(stops, np.int32),
    )
    penalties, prompt, put_out, biased, values, masked = _on_device(lists, edits.line.device)
    edits.penalties[line] = penalties.view(torch.float32)
    edits.output_counts[line] = 0
    edits.output_counts[line].index_add_(0, put_out, torch.ones_like(put_out))
    edits.in_prompt[line] = False
    edits.in_prompt[line].index_fill_(0, prompt.long(), True)
    edits.bias_ids[line] = -1
    edits.bias_ids[line, : len(biased)] = biased
    edits.bias_values[line, : len(biased)] = values.view(torch.float32)
    edits.stop_ids[line] = -1
    edits.stop_ids[line, : len(masked)] = masked
    edits.allowed[line] = -1


def _known_ids(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)].astype(np.int32)


def _on_device(lists: Sequence[NDArray[np.int32]], device: torch.device) -> Sequence[Tensor]:
    """Moved in one copy that nobody waits for, and cut apart there."""
    host = torch.from_numpy(np.concatenate(lists))
    if device.type == "cuda":
        host = host.pin_memory()
    return torch.split(host.to(device, non_blocking=True), [len(each) for each in lists])


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
        edits.penalties,
        edits.first_free_end,
        edits.output_counts,
        edits.in_prompt.view(torch.uint8),
        edits.bias_ids,
        edits.bias_values,
        edits.stop_ids,
        edits.allowed,
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
    penalties,
    first_free_end,
    output_counts,
    in_prompt,
    bias_ids,
    bias_values,
    stop_ids,
    allowed,
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
        repetition = tl.load(penalties + 3 * line)
        frequency = tl.load(penalties + 3 * line + 1)
        presence = tl.load(penalties + 3 * line + 2)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            count = tl.load(output_counts + line * vocab_size + token, mask=mask, other=0)
            prompt = tl.load(in_prompt + line * vocab_size + token, mask=mask, other=0)
            scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
            logit = tl.where((count > 0) | (prompt != 0), scaled, logit)
            logit = logit - frequency * count.to(tl.float32)
            logit = tl.where(count > 0, logit - presence, logit)
        words = allowed + line * tl.cdiv(vocab_size, 32)
        word = tl.load(words + token // 32, mask=mask, other=0)
        logit = tl.where((word >> (token % 32)) & 1 != 0, logit, float("-inf"))  # a bias leaves it there
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
