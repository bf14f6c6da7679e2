"""The index tensors of one step, and K and V of one layer. Knows shapes, not sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class HostSpans(Protocol):
    """What a step's spans are, as far as the host plans with them; names as in PagedBatch."""

    @property
    def rows_host(self) -> Sequence[int]:
        """[num_spans]."""
        ...

    @property
    def kv_lens_host(self) -> Sequence[int]:
        """[num_spans]."""
        ...

    @property
    def q_lens_host(self) -> Sequence[int]:
        """[num_spans]."""
        ...

    @property
    def num_decode(self) -> int:
        """Leading spans of one token."""
        ...


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step as index tensors, on the device. Built once, read by every layer.

    Spans are ordered decode first: the first num_decode spans have exactly one query token each.
    """

    page_table: Tensor  # int32 [max_running + 1, width]: slots; the last row is the dummy row
    rows: Tensor  # int32 [num_spans]: padding points at the dummy row
    kv_lens: Tensor  # int32 [num_spans]: tokens to attend to, this step's included
    q_indptr: Tensor  # int32 [num_spans + 1]: rows of q of each span
    positions: Tensor  # int32 [num_tokens]: absolute position of each query token
    write_slots: Tensor  # int32 [num_tokens]: where this step's K and V go
    num_decode: int
    max_q_len: int
    max_kv_len: int
    page_size: int
    # The same columns on the host, for backends that plan there.
    rows_host: list[int]
    kv_lens_host: list[int]
    q_lens_host: list[int]


@dataclass(frozen=True, slots=True)
class LastQueries:
    """The tokens of a step that are read behind the last layer, where it has others as well.

    Of the others the last layer needs K and V alone. Each is a decode span of its own in `batch`, over the
    same slots as in the step; its K and V are stored, so `batch.write_slots` is not read.
    """

    tokens: Tensor  # int32 [num_spans]: index of each token in the step, ascending
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class KvLayer:
    """K and V of one layer, viewed by slot: no copies of the pool's memory.

    A pool of float8_e4m3fn holds K / k_scale and V / v_scale, rounded and kept within the type's range; in
    every other dtype it holds K and V themselves and both scales are 1.
    """

    k: Tensor  # [num_slots, num_kv_heads, head_dim]
    v: Tensor  # [num_slots, num_kv_heads, head_dim]
    k_scale: float = 1.0
    v_scale: float = 1.0
