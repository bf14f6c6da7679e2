"""Decodes beside the prompts of a whole step: their attention in a graph of fixed rows.

Owns where a graph reads the rows and lengths of the decodes, padded with the dummy row, and the plan of their
attention.
"""

import torch
from torch import Tensor

from kernels.backend import GraphBackend
from kernels.batch import KvLayer, PagedBatch


class DecodesBeside:
    """Room for so many decodes, in graphs of no fewer tokens."""

    def __init__(self, backend: GraphBackend, page_table: Tensor, room: int) -> None:
        self.room = room
        self._dummy_row = page_table.shape[0] - 1
        self._decode = backend.static_decode(page_table, room)
        self._spans = torch.ones(2, room, dtype=torch.int32, device=page_table.device)  # rows, kv_lens
        self._spans[0] = self._dummy_row

    def prepare(self, batch: PagedBatch) -> None:
        """The host's part, before each replay: sends the decodes of a step."""
        count = batch.num_decode
        rows, kv_lens = batch.rows_host[:count], batch.kv_lens_host[:count]
        host = torch.ones(self._spans.shape, dtype=torch.int32, pin_memory=self._spans.is_cuda)
        host[0] = self._dummy_row
        host[:, :count] = torch.tensor([rows, kv_lens], dtype=torch.int32)
        self._spans.copy_(host, non_blocking=True)
        self._decode.prepare(self.room, kv_lens)

    def begin(self) -> None:
        """The device's part, once a step; this and the next are what a graph records."""
        self._decode.begin(*self._spans)

    def attend(self, kv: KvLayer, q: Tensor, out: Tensor, *, scale: float) -> None:
        """One layer, K and V already stored: the first `room` rows of q and out, both [size, num_heads,
        head_dim]. Those of padding get something, too: prompts come behind.
        """
        first = slice(self.room)
        self._decode.attend(kv, q[first], scale=scale, out=out[first])
