"""Attention by one kernel for every span: a token has the same bits in decode, in prefill, in any company.

The decode kernel splits long contexts and merges the parts, the prefill kernel reads them from the start in
blocks of one size; both are right and their last bits differ. Where outputs must not depend on how a prompt
was cut, or on whether a sequence was preempted, only one of them can be used. Long contexts of few sequences
are slow that way: docs/kernels/deterministic.md says how slow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch
from kernels.paged_prefill import paged_prefill
from kernels.prefill_plan import list_tiles
from kernels.store_kv import store_kv


class InvariantBackend:
    """A GraphBackend over paged_prefill alone."""

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._group = num_heads // num_kv_heads
        self._batch: PagedBatch | None = None
        self._tiles: Tensor | None = None  # int32 [num_tiles, 2]

    def plan(self, batch: PagedBatch) -> None:
        """Lists the tiles of all spans."""
        self._batch = batch
        tiles = list_tiles(batch.q_lens_host, self._group)
        self._tiles = torch.tensor(tiles, dtype=torch.int32).to(batch.rows.device, non_blocking=True)

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Stores, then attends."""
        assert self._batch is not None, "run before plan"
        store_kv(kv, self._batch.write_slots, k, v)
        return self.attend(kv, q, scale=scale)

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """Attends to what is stored."""
        assert self._batch is not None, "attend before plan"
        assert self._tiles is not None, "made with the batch"
        return paged_prefill(q, kv, self._batch, self._tiles, scale=scale, out=out)

    def static_decode(
        self, page_table: Tensor, max_batch: int, *, is_beside: bool = False
    ) -> "InvariantStaticDecode":
        """See kernels.backend.GraphBackend."""
        return InvariantStaticDecode(page_table, max_batch)

    def static_prefill(self, page_table: Tensor, max_tokens: int) -> None:
        """None: its steps mix prompts and decodes in one list."""


class InvariantStaticDecode:
    """See kernels.backend.StaticDecode: each row is a span of one query, so the tiles never change."""

    def __init__(self, page_table: Tensor, max_batch: int) -> None:
        numbers = torch.arange(max_batch + 1, dtype=torch.int32, device=page_table.device)
        self._page_table = page_table
        self._q_indptr = numbers
        self._tiles = torch.stack([numbers, torch.zeros_like(numbers)], dim=1)
        self._batch: PagedBatch | None = None

    def prepare(self, size: int, kv_lens: Sequence[int]) -> None:
        """Nothing: the kernel reads the lengths where they lie."""

    def begin(self, rows: Tensor, kv_lens: Tensor) -> None:
        """Remembers where rows and lengths are."""
        size = rows.shape[0]
        self._batch = PagedBatch(
            page_table=self._page_table,
            rows=rows,
            kv_lens=kv_lens,
            q_indptr=self._q_indptr[: size + 1],
            positions=kv_lens,  # not read by the kernel
            write_slots=kv_lens,
            num_decode=0,
            max_q_len=1,
            max_kv_len=self._page_table.shape[1],
            page_size=1,
            rows_host=[],
            kv_lens_host=[],
            q_lens_host=[1] * size,
        )

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """One layer."""
        assert self._batch is not None, "attend before begin"
        return paged_prefill(q, kv, self._batch, self._tiles[: q.shape[0]], scale=scale, out=out)
