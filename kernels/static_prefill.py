"""Prefill attention that a CUDA graph can hold: spans and tiles are read from memory that stays where it is.

It leaves out decode spans, which come first. A graph's grid is fixed, so every size has tiles for as many
tokens in as many spans as it takes; those that a step does not need belong to an empty span and end at once.
A graph of steps whose keys are split has as many programs as run at once, and reads into how many parts. Bits
are those of the same kernel outside a graph.
"""

from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import HostSpans, KvLayer, PagedBatch
from kernels.paged_prefill import paged_prefill
from kernels.prefill_plan import list_tiles, make_split, num_parts, queries_per_tile, resident_programs

MAX_SPANS = 8
"""Of one step: more make its tokens many, and the host's time small beside the device's."""
ALIGNMENT = 4  # int32 entries: kernels are compiled for addresses that are multiples of 16 bytes
SPAN_ROOM = -(-(MAX_SPANS + 2) // ALIGNMENT) * ALIGNMENT  # an empty span behind the last, and q_indptr's end
PARTS_AT = 3 * SPAN_ROOM
TILES_AT = PARTS_AT + ALIGNMENT


class TritonStaticPrefill:
    """See kernels.backend.StaticPrefill. Takes steps of few prompts."""

    def __init__(self, page_table: Tensor, shape: tuple[int, int, int], max_tokens: int) -> None:
        """shape: num_heads, num_kv_heads, head_dim."""
        num_heads, self._num_kv_heads, head_dim = shape
        self._group = num_heads // self._num_kv_heads
        self._queries = queries_per_tile(self._group)
        self._page_table = page_table
        device = page_table.device
        num_programs = resident_programs(device)
        self._split_tiles = -(-num_programs // self._num_kv_heads)  # the kernel's bound, see paged_prefill
        # rows, kv_lens, q_indptr, parts, tiles. Zeros: one empty span, so that a capture computes nothing.
        self.words = torch.zeros(self.num_words(max_tokens), dtype=torch.int32, device=device)
        self._split = make_split(self.words[PARTS_AT : PARTS_AT + 1], num_programs, head_dim)

    def num_words(self, size: int) -> int:
        """See StaticPrefill."""
        return TILES_AT + 2 * max(self._capacity(size), self._split_tiles)

    def num_parts(self, spans: HostSpans) -> int:
        """See StaticPrefill."""
        first = spans.num_decode
        kv_lens, q_lens = spans.kv_lens_host[first:], spans.q_lens_host[first:]
        if not 0 < len(q_lens) <= MAX_SPANS:
            return 0
        num_tiles = sum(-(-length // self._queries) for length in q_lens)
        return num_parts(num_tiles, self._num_kv_heads, max(kv_lens), self._page_table.device)

    def fill(self, spans: HostSpans, size: int, into: NDArray[np.int32]) -> None:
        """See StaticPrefill."""
        first = spans.num_decode
        rows, kv_lens, q_lens = spans.rows_host[first:], spans.kv_lens_host[first:], spans.q_lens_host[first:]
        count, num_words = len(q_lens), self.num_words(size)
        ends, unused = list(accumulate(q_lens, initial=first)), [0] * (SPAN_ROOM - count)
        words = [*rows, *unused, *kv_lens, *unused, *ends]
        words += ends[-1:] * (PARTS_AT - len(words)) + [self.num_parts(spans)] * ALIGNMENT
        words += chain.from_iterable(list_tiles(q_lens, self._group))
        words += [count, 0] * ((num_words - len(words)) // 2)
        into[:num_words] = words

    def prepare(self, batch: PagedBatch, size: int) -> None:
        """See StaticPrefill."""
        # A fresh pinned buffer each step: torch hands it out again only after the copy that reads it.
        is_pinned = self._page_table.device.type == "cuda"
        host = torch.empty(self.num_words(size), dtype=torch.int32, pin_memory=is_pinned)
        self.fill(batch, size, host.numpy())
        self.words[: len(host)].copy_(host, non_blocking=True)

    def attend(self, kv: KvLayer, q: Tensor, out: Tensor, *, scale: float, is_split: bool) -> None:
        """One layer."""
        size = q.shape[0]
        count = self._split_tiles if is_split else self._capacity(size)
        tiles = self.words[TILES_AT : TILES_AT + 2 * count].view(-1, 2)
        split = self._split if is_split else None
        paged_prefill(q, kv, self._batch(size), tiles, scale=scale, split=split, out=out)

    def _batch(self, size: int) -> PagedBatch:
        rows, kv_lens, q_indptr = self.words[:PARTS_AT].view(3, SPAN_ROOM)
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
