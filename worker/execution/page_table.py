"""The page table on the device: an int32 matrix of slots, a row per running sequence and the dummy row.

Owns the matrix. Knows nothing of who holds a row or a page; both are decided by the scheduler.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.execution.on_the_way import OnTheWay

ROW_ALIGNMENT = 32  # entries: rows start at multiples of 128 bytes


def table_width(*, max_context: int, num_pages: int, page_size: int) -> int:
    """Entries of a row: whole pages for the longest sequence, rounded up to a multiple of 32 entries.

    A row can never address more tokens than the pool has. Rows are written by whole pages, so the width
    must be a multiple of page_size as well: with 32 alone, page 64 and 150 tokens need column 191 of 160.
    """
    longest = min(max_context, num_pages * page_size)
    return _round_up(longest, math.lcm(ROW_ALIGNMENT, page_size))


def slots_of_pages(pages: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
    """All slots of the pages whose first slots are given, in order; the very same array at page size 1."""
    if page_size == 1:
        return pages
    offsets = np.arange(page_size, dtype=np.int32)
    return (pages[:, None] + offsets).reshape(-1)


class PageTable:
    """Entry [row, position] is the slot of that token: no arithmetic is left to the reader."""

    def __init__(
        self, *, max_running: int, max_context: int, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        assert (num_pages + 1) * page_size < 2**31, "slots are int32"
        width = table_width(max_context=max_context, num_pages=num_pages, page_size=page_size)
        self.page_size = page_size
        self.dummy_row = max_running
        self.dummy_slot = num_pages * page_size
        self.slots = torch.zeros(max_running + 1, width, dtype=torch.int32, device=device)
        self.slots[self.dummy_row].fill_(self.dummy_slot)

    def write_pages(self, rows: Sequence[int], page_indexes: Sequence[int], page_ids: Sequence[int]) -> None:
        """Page page_ids[j] becomes page number page_indexes[j] of row rows[j]: one scatter a step."""
        num_entries = len(page_ids) * self.page_size
        if num_entries == 0:
            return
        host = self._staging(num_entries)
        into = host.numpy()
        first_slots = np.asarray(page_ids, dtype=np.int32) * self.page_size
        first_columns = np.asarray(page_indexes, dtype=np.int32) * self.page_size
        slots = slots_of_pages(first_slots, self.page_size)
        assert len(slots) == num_entries, f"{len(slots)} slots for {num_entries} entries of the page table"
        into[0] = np.repeat(np.asarray(rows, dtype=np.int64), self.page_size)
        into[1] = slots_of_pages(first_columns, self.page_size)
        into[2] = slots
        row_index, column_index, values = host.to(self.slots.device, non_blocking=True)
        self.slots[row_index, column_index] = values.to(torch.int32)

    def read_rows(self, rows: Sequence[int], num_slots: Sequence[int]) -> list[list[int]]:
        """Copies the first num_slots[i] entries of rows[i] back to the host."""
        if not rows:
            return []
        index = torch.tensor(rows, dtype=torch.int64, device=self.slots.device)
        copied = self.slots[index, : max(num_slots)].cpu()
        return [copied[i, :count].tolist() for i, count in enumerate(num_slots)]

    def begin_read(self, spans: Sequence[tuple[int, int, int]]) -> "RowsOnTheWay":
        """Copies slots [first, first + count) of each (row, first, count), one at least; never waits."""
        return RowsOnTheWay(self.slots, spans)

    def _staging(self, num_entries: int) -> Tensor:
        # A fresh pinned buffer each step: torch's host allocator hands it out again only after the copy
        # that reads it is over, so nothing here has to wait.
        is_pinned = self.slots.device.type == "cuda"
        return torch.empty(3, num_entries, dtype=torch.int64, pin_memory=is_pinned)


class RowsOnTheWay:
    """Parts of the page table, copied to the host behind whatever the device was given before."""

    def __init__(self, table: Tensor, spans: Sequence[tuple[int, int, int]]) -> None:
        parts = [table[row, first : first + count] for row, first, count in spans]
        self._ends = list(accumulate(len(part) for part in parts))
        self._copy = OnTheWay(*parts)

    def is_ready(self) -> bool:
        """Whether the copies have arrived."""
        return self._copy.is_ready()

    def result(self) -> list[list[int]]:
        """The slots of each span; waits for the copies."""
        slots = self._copy.arrived().tolist()
        return [slots[first:end] for first, end in pairwise([0, *self._ends])]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
