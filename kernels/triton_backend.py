"""The backend `triton`: our own kernels, the default on a GPU.

Decode spans go through the split-context kernel, prefill spans through the tiled one; both read the page
table where it lies. Owns scratch buffers that grow with the largest step seen.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch
from kernels.cluster_launch import LONGEST, cluster_launch
from kernels.decode_plan import BESIDE, WIDE_BYTES, DecodePlan, make_plan, plan_decode
from kernels.paged_decode import paged_decode, paged_decode_product
from kernels.paged_prefill import paged_prefill
from kernels.prefill_plan import PrefillSplit, list_tiles, make_split, num_parts
from kernels.rotary_store import Rotary
from kernels.static_prefill import TritonStaticPrefill
from kernels.store_kv import store_kv

HEADER = 2
"""Pairs before the tiles on the device, the first with the number of parts: kernels want tiles at a multiple
of 16 bytes.
"""


class TritonBackend:
    """An AttentionBackend over Triton kernels."""

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, max_context: int) -> None:
        self._shape = (num_heads, num_kv_heads, head_dim)
        self._max_context = max_context
        self._decode: DecodePlan | None = None  # large enough for the largest decode batch seen
        self._batch: PagedBatch | None = None
        self._tiles: Tensor | None = None  # int32 [num_tiles, 2]: of prefill spans
        self._split: PrefillSplit | None = None

    def plan(self, batch: PagedBatch) -> None:
        """Lists the chunks of decode spans on the device and the tiles of prefill spans on the host."""
        self._batch = batch
        if batch.num_decode:
            if self._decode is None or self._decode.arrived.shape[0] < batch.num_decode:
                capacity = 1 << (batch.num_decode - 1).bit_length()
                self._decode = make_plan(capacity, *self._shape, self._max_context, batch.rows.device)
            plan_decode(self._decode, batch.rows[: batch.num_decode], batch.kv_lens[: batch.num_decode])
        heads, kv_heads, head_dim = self._shape
        lens = [0 if i < batch.num_decode else n for i, n in enumerate(batch.q_lens_host)]
        tiles = list_tiles(lens, heads // kv_heads)
        self._tiles = self._split = None
        if tiles:
            device, longest = batch.rows.device, max(batch.kv_lens_host[batch.num_decode :])
            parts = num_parts(len(tiles), kv_heads, longest, device)
            sent = _sent([(parts, 0)] * HEADER + tiles, device)
            self._tiles = sent[HEADER:]
            if parts > 1:
                self._split = make_split(sent[0, :1], len(tiles) * kv_heads * parts, head_dim)

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Stores, then attends."""
        assert self._batch is not None, "run before plan"
        store_kv(kv, self._batch.write_slots, k, v)
        return self.attend(kv, q, scale=scale)

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """Attends to what is stored: decode spans first, as the batch is ordered."""
        batch, decode = self._batch, self._decode
        assert batch is not None, "attend before plan"
        if self._tiles is None:
            assert decode is not None, "a batch without spans"
            return paged_decode(q, kv, batch.page_table, decode, scale=scale, out=out)
        out = paged_prefill(q, kv, batch, self._tiles, scale=scale, split=self._split, out=out)
        if batch.num_decode:
            assert decode is not None, "planned above"
            first = slice(batch.num_decode)
            paged_decode(q[first], kv, batch.page_table, decode, scale=scale, out=out[first])
        return out

    def static_decode(
        self, page_table: Tensor, max_batch: int, *, is_beside: bool = False
    ) -> "TritonStaticDecode":
        """See kernels.backend.GraphBackend."""
        is_wide = 2 * self._shape[2] > WIDE_BYTES
        launch = BESIDE if is_beside and not is_wide else None
        width, device = page_table.shape[1], page_table.device
        return TritonStaticDecode(
            make_plan(max_batch, *self._shape, width, device, launch=launch), page_table
        )

    def static_prefill(self, page_table: Tensor, max_tokens: int) -> TritonStaticPrefill:
        """See kernels.backend.GraphBackend."""
        return TritonStaticPrefill(page_table, self._shape, max_tokens)


class TritonStaticDecode:
    """See kernels.backend.StaticDecode and kernels.product_decode. Chunks are listed on the device, so a
    replay needs no host plan.
    """

    def __init__(self, plan: DecodePlan, page_table: Tensor) -> None:
        self._plan = plan
        self._lone = replace(plan, most_tokens=min(plan.most_tokens, LONGEST))  # see least_size
        self._page_table = page_table
        self._results: Tensor | None = None

    def prepare(self, size: int, kv_lens: Sequence[int]) -> None:
        """Nothing: the kernels read the lengths where they lie."""

    def begin(self, rows: Tensor, kv_lens: Tensor) -> None:
        """Lists the chunks."""
        plan_decode(self._plan, rows, kv_lens, dummy_row=self._page_table.shape[0] - 1)

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """One layer."""
        out = self._room(q) if out is None else out
        return paged_decode(q, kv, self._page_table, self._plan_of(q), scale=scale, out=out)

    def attend_product(self, kv: KvLayer, qkv: Tensor, rotary: Rotary, *, scale: float) -> Tensor:
        """See kernels.product_decode.ProductDecode."""
        where = (self._page_table, self._plan_of(qkv), rotary)
        return paged_decode_product(qkv, kv, *where, scale=scale, out=self._room(qkv))

    def _room(self, step: Tensor) -> Tensor:
        """For results, the same for all layers: those of padding, which nothing writes, are numbers."""
        if self._results is None or self._results.dtype != step.dtype:
            (spans, _), (_, *shape) = self._plan.arrived.shape, self._plan.partial.shape
            self._results = torch.zeros(spans, *shape, dtype=step.dtype, device=step.device)
        return self._results[: step.shape[0]]

    def least_size(self, kv_lens: Sequence[int], kv: KvLayer) -> int:
        """See kernels.product_decode.ProductDecode: the fastest for a lone sequence is not for a long one."""
        if len(kv_lens) != 1 or kv_lens[0] <= LONGEST:
            return 1
        num_heads = self._plan.partial.shape[1]
        return 1 if cluster_launch(1, num_heads, kv.k.dtype, kv, LONGEST) is None else 2

    def _plan_of(self, step: Tensor) -> DecodePlan:
        return self._lone if step.shape[0] == 1 else self._plan


def _sent(tiles: list[tuple[int, int]], device: torch.device) -> Tensor:
    """The tiles on the device; from pinned memory, so that the host need not wait for the stream."""
    host = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
