"""Prefill attention that a CUDA graph can hold: spans and tiles are read from memory that stays where it is.

It leaves out decode spans, which come first. A graph's grid is fixed, so every size has tiles for as many
tokens in as many spans as it takes; those that a step does not need belong to an empty span and end at once.
Bits are those of the same kernel outside a graph.
"""

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import HostSpans, KvLayer, PagedBatch
from kernels.paged_prefill import paged_prefill
from kernels.prefill_plan import num_parts, queries_per_tile, tile_array

MAX_SPANS = 8
"""Of one step: more make its tokens many, and the host's time small beside the device's."""
ALIGNMENT = 4  # int32 entries: kernels are compiled for addresses that are multiples of 16 bytes
SPAN_ROOM = -(-(MAX_SPANS + 2) // ALIGNMENT) * ALIGNMENT  # an empty span behind the last, and q_indptr's end
TILES_AT = 3 * SPAN_ROOM


class TritonStaticPrefill:
    """See kernels.backend.StaticPrefill. Takes steps of few prompts whose keys need no split."""

    def __init__(self, page_table: Tensor, shape: tuple[int, int, int], max_tokens: int) -> None:
        """shape: num_heads, num_kv_heads, head_dim."""
        num_heads, self._num_kv_heads, _ = shape
        self._group = num_heads // self._num_kv_heads
        self._queries = queries_per_tile(self._group)
        self._page_table = page_table
        # rows, kv_lens, q_indptr, tiles. Zeros: one empty span, so that a capture computes nothing.
        room = self.num_words(max_tokens)
        self.words = torch.zeros(room, dtype=torch.int32, device=page_table.device)

    def num_words(self, size: int) -> int:
        """See StaticPrefill."""
        return TILES_AT + 2 * self._capacity(size)

    def fill(self, spans: HostSpans, size: int, into: NDArray[np.int32]) -> bool:
        """See StaticPrefill."""
        first = spans.num_decode
        rows, kv_lens, q_lens = spans.rows_host[first:], spans.kv_lens_host[first:], spans.q_lens_host[first:]
        count = len(q_lens)
        if not 0 < count <= MAX_SPANS:
            return False
        tiles = tile_array(q_lens, self._group)
        if num_parts(len(tiles), self._num_kv_heads, max(kv_lens), self._page_table.device) > 1:
            return False
        ends, unused = list(accumulate(q_lens, initial=first)), [0] * (SPAN_ROOM - count)
        words = [*rows, *unused, *kv_lens, *unused, *ends]
        words += ends[-1:] * (TILES_AT - len(words))
        into[:TILES_AT] = words
        listed = into[TILES_AT : self.num_words(size)].reshape(-1, 2)
        listed[: len(tiles)], listed[len(tiles) :] = tiles, (count, 0)
        return True

    def prepare(self, batch: PagedBatch, size: int) -> bool:
        """See StaticPrefill."""
        # A fresh pinned buffer each step: torch hands it out again only after the copy that reads it.
        is_pinned = self._page_table.device.type == "cuda"
        host = torch.empty(self.num_words(size), dtype=torch.int32, pin_memory=is_pinned)
        if not self.fill(batch, size, host.numpy()):
            return False
        self.words[: len(host)].copy_(host, non_blocking=True)
        return True

    def attend(self, kv: KvLayer, q: Tensor, out: Tensor, *, scale: float) -> None:
        """One layer."""
        size = q.shape[0]
        tiles = self.words[TILES_AT : self.num_words(size)].view(-1, 2)
        paged_prefill(q, kv, self._batch(size), tiles, scale=scale, out=out)

    def _batch(self, size: int) -> PagedBatch:
        rows, kv_lens, q_indptr = self.words[:TILES_AT].view(3, SPAN_ROOM)
        return PagedBatch(
            page_table=self._page_table,
            rows=rows,
            kv_lens=kv_lens,
            q_indptr=q_indptr,
            positions=kv_lens,  # not read by the kernel
            write_slots=kv_lens,
            num_decode=0,
            max_q_len=size,
            max_kv_len=self._page_table.shape[1],
            page_size=1,
            rows_host=[],
            kv_lens_host=[],
            q_lens_host=[],
        )

    def _capacity(self, size: int) -> int:
        """Tiles of a step of `size` tokens in MAX_SPANS spans, at most."""
        return size // self._queries + MAX_SPANS
