"""A step of prompts out of host memory in one message, and its results into host memory: kernels, no copies.

What such a step changes on the device (token ids, new pages, sampling columns, spans and tiles) goes by one
kernel that reads pinned memory, as a decode step's batch does (zero_copy.py): a small model's prompt takes
the device 2 ms, and copies and index operations for the same took the host as long
(docs/kernels/prompt-steps.md).

Bytes over the bus: 24 an entry in (a token, a page), 8 a sampled token and 4 a span out. Whoever launches
these keeps the host memory until the device is past them, and reads the results behind an event.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch
from kernels.sample_columns import NUM_COLUMNS
from kernels.static_prefill import MAX_SPANS, SPAN_ROOM

MESSAGE_LINES = 8
"""Lines of a message; an entry is a column of the first six."""
TOKEN_ROWS, TOKEN_POSITIONS, TOKEN_IDS, PAGE_ROWS, PAGE_INDEXES, PAGE_IDS, WORDS, REST = range(MESSAGE_LINES)
NO_ENTRY = -1
"""In TOKEN_ROWS, PAGE_ROWS and the rows of sampling columns."""
# In REST: what is sampled, then sampling columns, MAX_SPANS entries each.
SAMPLED_TOKENS, SAMPLED_ROWS, SAMPLED_ENDS, COLUMN_ROWS, COLUMNS = (part * MAX_SPANS for part in range(5))
REST_WORDS = COLUMNS + NUM_COLUMNS * MAX_SPANS
RESULT_LINES = 3
IDS, IS_FINITE, IS_BROKEN = range(RESULT_LINES)
"""Of results: token ids, and whether the logits are finite, of what is sampled; broken spans."""
BLOCK = 128
"""Entries of a program. Lines are as long as a multiple of it, so that none needs a mask."""
SPANS_PADDED = triton.next_power_of_2(SPAN_ROOM)


def message_room(num_tokens: int, num_words: int) -> int:
    """Entries of a line, for so many tokens and words of StaticPrefill."""
    return -(-max(num_tokens, num_words, REST_WORDS) // BLOCK) * BLOCK


def read_prompts(
    message: Tensor,
    page_table: Tensor,
    token_ids: Tensor,
    columns: Tensor,
    words: Tensor,
    sampled: Tensor,
    count: int,
    *,
    page_size: int,
) -> None:
    """Enters the first `count` tokens and new pages into their tables, the columns, and copies the words.

    message int32 [MESSAGE_LINES, room], pinned; `count` is rounded up to BLOCK: entries past what the step
    has are NO_ENTRY. page_table, token_ids int32 [num_rows, width]; columns int32 [NUM_COLUMNS, num_rows]:
    the matrix of SampleColumns; words int32: of StaticPrefill; sampled int32 [3, MAX_SPANS]: index of the
    token, row and position of what is to be sampled.
    """
    lines, room = message.shape
    assert lines == MESSAGE_LINES, f"message is {tuple(message.shape)}"
    assert room % BLOCK == 0, f"room for {room}, no multiple of {BLOCK}"
    assert 0 < count <= room, f"{count} entries, room for {room}"
    assert page_table.stride(0) == token_ids.stride(0), "tables of one shape"
    assert sampled.shape == (3, MAX_SPANS), f"sampled is {tuple(sampled.shape)}"
    launch(
        _read_kernel,
        (triton.cdiv(count, BLOCK),),
        (
            page_table,
            message,
            token_ids,
            columns,
            words,
            sampled,
            page_table.stride(0),
            columns.stride(0),
            words.shape[0],
            room,
        ),
        (page_size, MAX_SPANS, COLUMN_ROWS, COLUMNS, NUM_COLUMNS, BLOCK),
        num_warps=4,
    )


def prompt_inputs(
    words: Tensor,
    page_table: Tensor,
    token_ids: Tensor,
    embedding: Tensor,
    positions: Tensor,
    slots: Tensor,
    hidden: Tensor,
    *,
    dummy_slot: int,
) -> None:
    """Fills positions, slots int32 [size] and hidden [size, width] of a step's tokens; padding behind them.

    words: rows, kv_lens and q_indptr as StaticPrefill has them; page_table, token_ids int32 [num_rows,
    row_width]; embedding [vocab, width]. Padding is token 0 at position 0 and writes the dummy slot.
    """
    size, width = hidden.shape
    assert page_table.stride(0) == token_ids.stride(0), "tables of one shape"
    launch(
        _inputs_kernel,
        (size,),
        (
            words,
            page_table,
            token_ids,
            embedding,
            positions,
            slots,
            hidden,
            page_table.stride(0),
            dummy_slot,
        ),
        (SPAN_ROOM, SPANS_PADDED, width, triton.next_power_of_2(width)),
        num_warps=4,
    )


def mark_broken(hidden: Tensor, is_broken: Tensor) -> None:
    """is_broken int32, at least [size]: which tokens' hidden states [size, width] hold NaN or infinity."""
    size, width = hidden.shape
    launch(
        _broken_kernel,
        (size,),
        (hidden, is_broken),
        (width, triton.next_power_of_2(width)),
        num_warps=4,
    )


def write_prompt_results(
    ids: Tensor, is_finite: Tensor, is_broken: Tensor, words: Tensor, results: Tensor
) -> None:
    """Ids and flags of what was sampled, at most MAX_SPANS, and which spans are broken, to the host.

    ids int32, is_finite int8 [max_rows]; is_broken int32 [room]: by token; words of StaticPrefill: its
    q_indptr; results int32 [RESULT_LINES, MAX_SPANS], pinned.
    """
    assert results.shape == (RESULT_LINES, MAX_SPANS), f"results are {tuple(results.shape)}"
    assert is_finite.dtype == torch.int8, f"flags are {is_finite.dtype}"
    launch(
        _results_kernel,
        (1,),
        (ids, is_finite, is_broken, words, results, ids.shape[0], is_broken.shape[0]),
        (MAX_SPANS, SPAN_ROOM, triton.next_power_of_2(is_broken.shape[0])),
        num_warps=4,
    )


@triton.jit
def _read_kernel(
    page_table,
    message,
    token_ids,
    columns,
    words,
    sampled,
    row_width,
    column_width,
    num_words,
    room,
    PAGE_SIZE: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    COLUMN_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(message + at)
    position = tl.load(message + room + at)
    token = tl.load(message + 2 * room + at)
    page_row = tl.load(message + 3 * room + at)
    page_index = tl.load(message + 4 * room + at)
    page_id = tl.load(message + 5 * room + at)
    word = tl.load(message + 6 * room + at)
    tl.store(token_ids + row.to(tl.int64) * row_width + position, token, mask=row >= 0)
    entry = page_table + page_row.to(tl.int64) * row_width + page_index * PAGE_SIZE
    for offset in range(PAGE_SIZE):
        tl.store(entry + offset, page_id * PAGE_SIZE + offset, mask=page_row >= 0)
    tl.store(words + at, word, mask=at < num_words)
    if tl.program_id(0) == 0:
        rest = message + 7 * room
        lane = tl.arange(0, MAX_SPANS)
        for part in tl.static_range(3):
            tl.store(sampled + part * MAX_SPANS + lane, tl.load(rest + part * MAX_SPANS + lane))
        column_row = tl.load(rest + COLUMN_ROWS + lane)
        for number in tl.static_range(NUM_COLUMNS):
            value = tl.load(rest + COLUMNS + number * MAX_SPANS + lane)
            tl.store(columns + number * column_width + column_row, value, mask=column_row >= 0)


@triton.jit
def _inputs_kernel(
    words,
    page_table,
    token_ids,
    embedding,
    positions,
    slots,
    hidden,
    row_width,
    dummy_slot,
    SPAN_ROOM: tl.constexpr,
    SPANS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    indptr = words + 2 * SPAN_ROOM
    lane = tl.arange(0, SPANS_PADDED)
    # Behind the last span q_indptr repeats its end: for a token of the step none of those is at or below it.
    ends = tl.load(indptr + 1 + lane, mask=lane < SPAN_ROOM - 1, other=2147483647)
    span = tl.sum((ends <= token).to(tl.int32), 0)
    is_real = token < tl.load(indptr + SPAN_ROOM - 1)
    span = tl.where(is_real, span, 0)
    position = tl.load(words + SPAN_ROOM + span) - tl.load(indptr + span + 1) + token
    position = tl.where(is_real, position, 0)
    at = tl.load(words + span).to(tl.int64) * row_width + position
    tl.store(positions + token, position)
    tl.store(slots + token, tl.where(is_real, tl.load(page_table + at), dummy_slot))
    token_id = tl.where(is_real, tl.load(token_ids + at), 0).to(tl.int64)
    dims = tl.arange(0, WIDTH_PADDED)
    mask = dims < WIDTH
    to = hidden + token.to(tl.int64) * WIDTH + dims
    tl.store(to, tl.load(embedding + token_id * WIDTH + dims, mask=mask), mask=mask)


@triton.jit
def _broken_kernel(hidden, is_broken, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH_PADDED)
    values = tl.load(hidden + token * WIDTH + dims, mask=dims < WIDTH, other=0.0).to(tl.float32)
    tl.store(is_broken + token, tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1), 0))


@triton.jit
def _results_kernel(
    ids,
    is_finite,
    is_broken,
    words,
    results,
    max_rows,
    num_tokens,
    MAX_SPANS: tl.constexpr,
    SPAN_ROOM: tl.constexpr,
    TOKENS_PADDED: tl.constexpr,
):
    lane = tl.arange(0, MAX_SPANS)
    real = lane < max_rows
    tl.store(results + lane, tl.load(ids + lane, mask=real, other=0))
    tl.store(results + MAX_SPANS + lane, tl.load(is_finite + lane, mask=real, other=0).to(tl.int32))
    token = tl.arange(0, TOKENS_PADDED)
    flags = tl.load(is_broken + token, mask=token < num_tokens, other=0)
    for span in tl.static_range(MAX_SPANS):
        first = tl.load(words + 2 * SPAN_ROOM + span)
        end = tl.load(words + 2 * SPAN_ROOM + span + 1)
        found = tl.max(tl.where((token >= first) & (token < end), flags, 0), 0)
        tl.store(results + 2 * MAX_SPANS + span, found)
