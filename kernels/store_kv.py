"""New K and V into their slots: a row copy by index, scaled and rounded where the pool is of e4m3.

Bytes: read 2 * num_tokens * num_kv_heads * head_dim elements, write as many of the pool's type. A program
copies the rows of K and of V of a few tokens; rows may be strided slices of a fused product.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer
from kernels.dependent_launch import dependent_launch

MANY_TOKENS = 1024
"""From here on a program takes four tokens: more bytes in flight for each program that starts."""


def store_kv(kv: KvLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k[i], v[i] to slot slots[i].

    k, v [num_tokens, num_kv_heads, head_dim], any row stride; slots int32 or int64 [num_tokens], no slot
    twice outside the dummy page. A pool of e4m3 gets k / k_scale and v / v_scale, see kernels.fp8. Source of
    the layout: requirements S1-13..S1-15.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == kv.k.stride(2) == kv.v.stride(2) == 1, "head_dim must be contiguous"
    assert k.stride(1) == v.stride(1) == kv.k.stride(1) == kv.v.stride(1) == head_dim, (
        "heads must be contiguous"
    )
    if num_tokens == 0:
        return
    width = num_heads * head_dim
    tokens = 4 if num_tokens >= MANY_TOKENS else 1
    _store_kernel[(triton.cdiv(num_tokens, tokens),)](
        k,
        v,
        kv.k,
        kv.v,
        slots,
        1.0 / kv.k_scale,
        1.0 / kv.v_scale,
        num_tokens,
        k.stride(0),
        v.stride(0),
        kv.k.stride(0),
        kv.v.stride(0),
        TOKENS=tokens,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        num_warps=4,
        **dependent_launch(k.device),
    )


@triton.jit
def to_pool(rows, inverse_scale, pool):
    """Rows of K or V in the pool's type; in e4m3 scaled and kept within its range, NaN staying NaN."""
    if pool.dtype.element_ty == tl.float8e4nv:
        scaled = rows.to(tl.float32) * inverse_scale
        rows = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return rows.to(pool.dtype.element_ty)


@triton.jit(do_not_specialize=["k_inverse", "v_inverse", "num_tokens"])
def _store_kernel(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    k_inverse,
    v_inverse,
    num_tokens,
    k_stride,
    v_stride,
    k_pool_stride,
    v_pool_stride,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real = token < num_tokens
    # Slots fit int32, offsets into a big pool do not.
    slot = tl.load(slots + token, mask=real, other=0).to(tl.int64)
    at = tl.arange(0, WIDTH_PADDED)
    mask = real[:, None] & (at < WIDTH)[None, :]
    keys = tl.load(k + token[:, None] * k_stride + at[None, :], mask=mask)
    values = tl.load(v + token[:, None] * v_stride + at[None, :], mask=mask)
    k_at = k_pool + slot[:, None] * k_pool_stride + at[None, :]
    v_at = v_pool + slot[:, None] * v_pool_stride + at[None, :]
    tl.store(k_at, to_pool(keys, k_inverse, k_pool), mask=mask)
    tl.store(v_at, to_pool(values, v_inverse, v_pool), mask=mask)
