"""New K and V into their slots: a pure row copy by index.

Bytes: read and write 2 * num_tokens * num_kv_heads * head_dim * itemsize each. One program copies one token's
row of K and of V; rows may be strided slices of a fused product.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import KvLayer


def store_kv(kv: KvLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k[i], v[i] to slot slots[i].

    k, v [num_tokens, num_kv_heads, head_dim], any row stride; slots int32 or int64 [num_tokens], no slot
    twice outside the dummy page. Source of the layout: requirements S1-13..S1-15.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == kv.k.stride(2) == kv.v.stride(2) == 1, "head_dim must be contiguous"
    assert k.stride(1) == v.stride(1) == kv.k.stride(1) == kv.v.stride(1) == head_dim, (
        "heads must be contiguous"
    )
    if num_tokens == 0:
        return
    width = num_heads * head_dim
    _store_kernel[(num_tokens,)](
        k,
        v,
        kv.k,
        kv.v,
        slots,
        k.stride(0),
        v.stride(0),
        kv.k.stride(0),
        kv.v.stride(0),
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        num_warps=4,
    )


@triton.jit
def _store_kernel(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    k_stride,
    v_stride,
    k_pool_stride,
    v_pool_stride,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # Slots fit int32, offsets into a big pool do not.
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, WIDTH_PADDED)
    mask = at < WIDTH
    tl.store(k_pool + slot * k_pool_stride + at, tl.load(k + token * k_stride + at, mask=mask), mask=mask)
    tl.store(v_pool + slot * v_pool_stride + at, tl.load(v + token * v_stride + at, mask=mask), mask=mask)
