"""A decode step's batch out of host memory, and its results into host memory, by kernels instead of copies.

Pinned memory has the same address on the device (CUDA programming guide, "Unified Virtual Address Space"),
so a kernel can read and write it where it lies. A few hundred bytes are not worth a turn of the copy engine:
the device waits longer for its change between the two than for the bytes (docs/kernels/decode-steps.md).

Bytes over the bus: 20 a span in, 8 out. Whoever launches these keeps the host memory until the device is past
them, and reads the results behind an event.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch

BATCH_COLUMNS = 5
"""Of a batch: row and kv_len of each span; then row, page index and page id of each new page."""
ROWS, KV_LENS, PAGE_ROWS, PAGE_INDEXES, PAGE_IDS = range(BATCH_COLUMNS)
NO_PAGE = -1
"""In PAGE_ROWS: no entry."""
RESULT_COLUMNS = 2
IDS, IS_FINITE = range(RESULT_COLUMNS)
BLOCK = 32
"""Entries of a program. Columns are as long as a multiple of it, so that none needs a mask."""


def padded_room(count: int) -> int:
    """Entries of a column that holds `count`."""
    return -(-count // BLOCK) * BLOCK


def read_batch(
    batch: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, count: int, *, page_size: int
) -> None:
    """Copies the first `count` rows and kv_lens to the device and enters the first `count` new pages.

    batch int32 [BATCH_COLUMNS, room], pinned; rows, kv_lens int32 [room]; page_table int32 [num_rows, width],
    in whose row PAGE_ROWS[j] the page at PAGE_INDEXES[j] becomes the slots of page PAGE_IDS[j]. `count` is
    rounded up to BLOCK: entries past what the step has are NO_PAGE, and columns nobody reads.
    """
    room = rows.shape[0]
    assert batch.shape == (BATCH_COLUMNS, room), f"batch is {tuple(batch.shape)}, room for {room}"
    assert batch.dtype == rows.dtype == kv_lens.dtype == page_table.dtype == torch.int32, "all int32"
    assert room % BLOCK == 0, f"room for {room}, no multiple of {BLOCK}"
    assert count <= room, f"{count} entries, room for {room}"
    launch(
        _read_batch_kernel,
        (triton.cdiv(count, BLOCK),),
        (page_table, batch, rows, kv_lens, page_table.stride(0), room),
        (page_size, BLOCK),
        num_warps=1,
    )


def write_results(ids: Tensor, is_finite: Tensor, results: Tensor, count: int) -> None:
    """Copies the first `count` ids and flags to the host; more, up to BLOCK, of what is there.

    ids int32, is_finite int8 [max_rows]; results int32 [RESULT_COLUMNS, room], pinned.
    """
    max_rows, room = ids.shape[0], results.shape[1]
    assert count <= max_rows <= room, f"{count} of {max_rows} rows, room for {room}"
    assert ids.dtype == results.dtype == torch.int32, f"ids are {ids.dtype}, results {results.dtype}"
    assert is_finite.dtype == torch.int8, f"flags are {is_finite.dtype}"
    launch(
        _write_results_kernel,
        (triton.cdiv(count, BLOCK),),
        (ids, is_finite, results, max_rows, room),
        (BLOCK,),
        num_warps=1,
    )


@triton.jit
def _read_batch_kernel(
    page_table, batch, rows, kv_lens, row_width, room, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(batch + at)
    kv_len = tl.load(batch + room + at)
    page_row = tl.load(batch + 2 * room + at)
    page_index = tl.load(batch + 3 * room + at)
    page_id = tl.load(batch + 4 * room + at)
    tl.store(rows + at, row)
    tl.store(kv_lens + at, kv_len)
    entry = page_table + page_row.to(tl.int64) * row_width + page_index * PAGE_SIZE
    for offset in range(PAGE_SIZE):
        tl.store(entry + offset, page_id * PAGE_SIZE + offset, mask=page_row >= 0)


@triton.jit
def _write_results_kernel(ids, is_finite, results, max_rows, room, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < max_rows
    tl.store(results + at, tl.load(ids + at, mask=real), mask=real)
    flag = tl.load(is_finite + at, mask=real, other=0)
    tl.store(results + room + at, flag.to(tl.int32), mask=real)
