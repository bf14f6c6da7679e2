"""The attention seam: plan once per step, run per layer."""

from typing import Protocol

from torch import Tensor

from kernels.batch import KvLayer, PagedBatch


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
