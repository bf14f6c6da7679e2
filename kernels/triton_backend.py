"""The backend `triton`: our own kernels, the default on a GPU.

Decode spans go through the split-context kernel, prefill spans through the tiled one; both read the page
table where it lies. Owns scratch buffers that grow with the largest step seen.
"""

import torch
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch
from kernels.paged_decode import DecodePlan, make_plan, paged_decode, plan_decode, resized
from kernels.paged_prefill import list_tiles, paged_prefill
from kernels.store_kv import store_kv


class TritonBackend:
    """An AttentionBackend over Triton kernels."""

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, max_context: int) -> None:
        self._shape = (num_heads, num_kv_heads, head_dim)
        self._max_context = max_context
        self._buffers: DecodePlan | None = None  # of the largest decode batch seen
        self._decode: DecodePlan | None = None
        self._batch: PagedBatch | None = None
        self._tiles: Tensor | None = None  # int32 [num_tiles, 2]: of prefill spans

    def plan(self, batch: PagedBatch) -> None:
        """Lists the chunks of decode spans on the device and the tiles of prefill spans on the host."""
        self._batch = batch
        if batch.num_decode:
            if self._buffers is None or self._buffers.chunk_sizes.shape[0] < batch.num_decode:
                capacity = 1 << (batch.num_decode - 1).bit_length()
                self._buffers = make_plan(capacity, *self._shape, self._max_context, batch.rows.device)
            self._decode = resized(self._buffers, batch.num_decode)
            plan_decode(self._decode, batch.kv_lens[: batch.num_decode])
        heads, kv_heads, _ = self._shape
        lens = [0 if i < batch.num_decode else n for i, n in enumerate(batch.q_lens_host)]
        tiles = list_tiles(lens, heads // kv_heads)
        self._tiles = torch.tensor(tiles, dtype=torch.int32).to(batch.rows.device) if tiles else None

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Stores, then attends."""
        assert self._batch is not None, "run before plan"
        store_kv(kv, self._batch.write_slots, k, v)
        return self.attend(kv, q, scale=scale)

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float) -> Tensor:
        """Attends to what is stored: decode spans first, as the batch is ordered."""
        batch, decode = self._batch, self._decode
        assert batch is not None, "attend before plan"
        if self._tiles is None:
            assert decode is not None, "a batch without spans"
            return paged_decode(q, kv, batch.page_table, batch.rows, batch.kv_lens, decode, scale=scale)
        out = paged_prefill(q, kv, batch, self._tiles, scale=scale)
        if batch.num_decode:
            assert decode is not None, "planned above"
            first = slice(batch.num_decode)
            rows, lens = batch.rows[first], batch.kv_lens[first]
            out[first] = paged_decode(q[first], kv, batch.page_table, rows, lens, decode, scale=scale)
        return out
