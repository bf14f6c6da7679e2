"""K and V as the historical kernel lays them out, from and to rows by slot. Copies, nothing else.

By slot (this program): k, v [num_blocks * block_size, num_kv_heads, head_size].
By block (the kernel): k_cache [num_blocks, num_kv_heads, head_size / x, block_size, x],
v_cache [num_blocks, num_kv_heads, head_size, block_size], with x elements in 16 bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.paged_cuda.shape import FETCH_BYTES

Array = NDArray[Any]


def key_cache(k: Array, block_size: int) -> Array:
    """K by slot → k_cache."""
    num_slots, num_kv_heads, head_size = k.shape
    x = FETCH_BYTES // k.itemsize
    split = k.reshape(num_slots // block_size, block_size, num_kv_heads, head_size // x, x)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4))


def value_cache(v: Array, block_size: int) -> Array:
    """V by slot → v_cache."""
    num_slots, num_kv_heads, head_size = v.shape
    split = v.reshape(num_slots // block_size, block_size, num_kv_heads, head_size)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1))


def keys_by_slot(cache: Array) -> Array:
    """k_cache → K by slot; undoes key_cache without loss."""
    num_blocks, num_kv_heads, num_splits, block_size, x = cache.shape
    rows = cache.transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(rows).reshape(num_blocks * block_size, num_kv_heads, num_splits * x)


def values_by_slot(cache: Array) -> Array:
    """v_cache → V by slot; undoes value_cache without loss."""
    num_blocks, num_kv_heads, head_size, block_size = cache.shape
    rows = cache.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(rows).reshape(num_blocks * block_size, num_kv_heads, head_size)
