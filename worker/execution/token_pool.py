"""Token ids by row on the device: a sampled id feeds the next step without passing the host.

Owns the matrix, shaped like the page table. Knows nothing of sequences.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from worker.scheduling.step import RowStart


class TokenPool:
    """Entry [row, position] is the id of that token. Zeros at first: the dummy row feeds token 0."""

    def __init__(self, *, num_rows: int, width: int, device: torch.device) -> None:
        self.ids = torch.zeros(num_rows, width, dtype=torch.int32, device=device)

    def start_rows(self, starts: Sequence[RowStart]) -> None:
        """Writes the known tokens of sequences that enter a row: one scatter for all of them."""
        lengths = [len(start.token_ids) for start in starts]
        num_entries = sum(lengths)
        if num_entries == 0:
            return
        host = torch.empty(3, num_entries, dtype=torch.int64, pin_memory=self.ids.device.type == "cuda")
        into = host.numpy()
        into[0] = np.repeat([start.row for start in starts], lengths)
        into[1] = np.concatenate([np.arange(length) for length in lengths])
        into[2] = np.fromiter(chain.from_iterable(s.token_ids for s in starts), np.int64, num_entries)
        rows, columns, ids = host.to(self.ids.device, non_blocking=True)
        self.ids[rows, columns] = ids.to(torch.int32)

    def read(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Ids at [rows[i], positions[i]], int32 [num_tokens]."""
        return self.ids[rows, positions]

    def write(self, rows: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Puts a sampled id where the next step reads it.

        A token past the last column has no next step; it lands in the last column of the dummy row, which
        nobody reads.
        """
        num_rows, width = self.ids.shape
        fits = positions < width
        rows = torch.where(fits, rows, num_rows - 1)
        self.ids[rows, torch.where(fits, positions, width - 1)] = ids.to(torch.int32)
