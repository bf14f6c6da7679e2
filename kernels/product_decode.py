"""The form of decode attention that takes a layer's qkv product as it is."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.batch import KvLayer
from kernels.rotary_store import Rotary


@runtime_checkable
class ProductDecode(Protocol):
    """A kernels.backend.StaticDecode that can norm, rotate and store by itself: a launch less a layer."""

    def attend_product(self, kv: KvLayer, qkv: Tensor, rotary: Rotary, *, scale: float) -> Tensor:
        """One layer, K and V of the new tokens not yet stored; afterwards they are.

        qkv [size, (num_heads + 2 * num_kv_heads) * head_dim]; result [size, num_heads, head_dim].
        """
        ...

    def least_size(self, kv_lens: Sequence[int], kv: KvLayer) -> int:
        """Rows of the smallest graph to take for a batch: more than it has where padding makes it faster."""
        ...
