"""A decode batch in buffers that stay where they are, padded to one of a few sizes.

Owns the static index tensors that a captured graph reads, and the rule of padding: rows past the batch point
at the dummy row, which feeds token 0 and writes the dummy page. Captures nothing itself; runs on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import PagedBatch
from worker.execution.page_table import PageTable
from worker.execution.token_pool import TokenPool


def capture_sizes(max_batch: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, then every eighth, up to max_batch; the largest first.

    The largest is captured first, so that the smaller ones find their memory in its pool.
    """
    sizes = [size for size in (1, 2, 4, *range(8, max_batch + 1, 8)) if size <= max_batch]
    if max_batch not in sizes:
        sizes.append(max_batch)
    return sorted(sizes, reverse=True)


def first_sizes(sizes: Sequence[int]) -> list[int]:
    """Of `sizes`, those captured at first: the largest and the powers of two, large ones first."""
    powers = [size for size in sizes if size & (size - 1) == 0]
    return sorted({max(sizes), *powers}, reverse=True)


def padded_size(batch_size: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds the batch; None when none does."""
    return min((size for size in sizes if size >= batch_size), default=None)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One padded decode step. Slice every output to the first num_real rows."""

    batch: PagedBatch
    input_ids: Tensor  # int32 [padded size]
    num_real: int


class DecodeBuffers:
    """Static tensors of one replica's decode steps; `prepare` overwrites all of them, whatever the batch."""

    def __init__(self, page_table: PageTable, token_pool: TokenPool, *, max_batch: int) -> None:
        self._page_table = page_table
        self._token_pool = token_pool
        self._device = page_table.slots.device
        self._columns = torch.zeros(3, max_batch, dtype=torch.int32, device=self._device)
        self._q_indptr = torch.arange(max_batch + 1, dtype=torch.int32, device=self._device)
        self._write_slots = torch.zeros(max_batch, dtype=torch.int32, device=self._device)
        self._input_ids = torch.zeros(max_batch, dtype=torch.int32, device=self._device)

    def prepare(self, rows: Sequence[int], ends: Sequence[int], size: int) -> DecodeBatch:
        """Spans of one token at position ends[i] - 1 of rows[i], padded to `size`: one copy, two gathers."""
        num_real = len(rows)
        assert num_real <= size <= self._columns.shape[1], f"{num_real} rows in {size}"
        host = self._host_columns(rows, ends, size)
        columns = self._columns[:, :size]
        columns.copy_(torch.from_numpy(host), non_blocking=True)
        batch_rows, kv_lens, positions = columns
        write_slots, input_ids = self._write_slots[:size], self._input_ids[:size]
        write_slots.copy_(self._page_table.slots[batch_rows, positions])
        input_ids.copy_(self._token_pool.read(batch_rows, positions))
        batch = PagedBatch(
            page_table=self._page_table.slots,
            rows=batch_rows,
            kv_lens=kv_lens,
            q_indptr=self._q_indptr[: size + 1],
            positions=positions,
            write_slots=write_slots,
            num_decode=size,
            max_q_len=1,
            max_kv_len=int(host[1].max(initial=0)),
            page_size=self._page_table.page_size,
            rows_host=host[0].tolist(),
            kv_lens_host=host[1].tolist(),
            q_lens_host=[1] * size,
        )
        return DecodeBatch(batch, input_ids, num_real)

    def _host_columns(self, rows: Sequence[int], ends: Sequence[int], size: int) -> NDArray[np.int32]:
        """Rows, lengths, positions. Padding is a sequence of one token at position 0 of the dummy row."""
        host = np.empty((3, size), dtype=np.int32)
        host[0, len(rows) :] = self._page_table.dummy_row
        host[1, len(rows) :] = 1
        host[0, : len(rows)] = rows
        host[1, : len(rows)] = ends
        host[2] = host[1] - 1
        return host
