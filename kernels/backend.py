"""The attention seam: plan once per step, run per layer; and the form of it that a CUDA graph can hold."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import HostSpans, KvLayer, PagedBatch


class AttentionBackend(Protocol):
    """Stores this step's K and V, then attends through the page table. One name on the command line."""

    name: str

    def plan(self, batch: PagedBatch) -> None:
        """Does the host work of a step, before its first layer."""
        ...

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Attention of one layer, K and V stored first, so that a token attends to itself.

        q and result [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim], rows
        may be strided slices of a fused product. Causal: the query at position p sees slots of
        positions 0..p of its row and nothing past them.
        """
        ...


@runtime_checkable
class CopyOfPages(Protocol):
    """A backend with a copy of the pages in another layout."""

    def refresh_pages(self, page_ids: Tensor) -> None:
        """Takes over pages that changed other than by `run`: copied, restored, poisoned. int [num_pages]."""
        ...


class StaticDecode(Protocol):
    """Decode attention over buffers that stay where they are. `begin` and `attend` are what a graph records.

    Results of a replay follow the lengths and pages of that replay, never those of the capture.
    """

    def prepare(self, size: int, kv_lens: Sequence[int]) -> None:
        """The host's part, before each replay of the graph of `size` rows, and before its capture.

        kv_lens: tokens of the real rows, at most `size`; every row past them has one token.
        """
        ...

    def begin(self, rows: Tensor, kv_lens: Tensor) -> None:
        """The device's part, once a step. rows, kv_lens int32 [size], always the same memory."""
        ...

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """One layer, K and V already stored. q and result, which is `out` if given: [size, num_heads,
        head_dim].
        """
        ...


class StaticPrefill(Protocol):
    """Prefill attention over buffers that stay where they are, so that a graph can hold a whole step."""

    words: Tensor
    """int32, on the device: what `fill` writes belongs here, before the replay. Its first three lines of
    static_prefill.SPAN_ROOM entries are rows, kv_lens and q_indptr of the spans.
    """

    def num_words(self, size: int) -> int:
        """Of `words`, what the graph of `size` tokens reads."""
        ...

    def num_parts(self, spans: HostSpans) -> int:
        """Into how many parts a step's keys are cut, each tile's among several programs; 1: not at all, 0: it
        is not for this step, which needs `plan` and `attend` of the backend.
        """
        ...

    def fill(self, spans: HostSpans, size: int, into: NDArray[np.int32]) -> None:
        """The host's part, before each replay of the graph of `size` tokens: all of the words that it reads.
        Decode spans are left out: their tokens come first, and are attended by somebody else.
        """
        ...

    def prepare(self, batch: PagedBatch, size: int) -> None:
        """`fill`, and sends the words in a copy of their own."""
        ...

    def attend(self, kv: KvLayer, q: Tensor, out: Tensor, *, scale: float, is_split: bool) -> None:
        """One layer, K and V already stored. q, out [size, num_heads, head_dim]; rows of `out` that are of
        decode spans or past the step's tokens are left as they are. `is_split`: for steps of several parts.
        """
        ...


class GraphBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be graphs."""

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """As `run`, K and V already stored; into `out`, contiguous, if given."""
        ...

    def static_decode(self, page_table: Tensor, max_batch: int, *, is_beside: bool = False) -> StaticDecode:
        """Its decode attention for batches up to `max_batch` over this table, int32 [num_rows, width].

        is_beside: other rows' products and attention run at the same time.
        """
        ...

    def static_prefill(self, page_table: Tensor, max_tokens: int) -> StaticPrefill | None:
        """Its prefill attention for steps of up to `max_tokens` tokens, if a graph can hold it."""
        ...
