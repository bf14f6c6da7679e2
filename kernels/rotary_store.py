"""Per-head norm of q and k, rotary, and the store of k and v into their slots, in one launch.

Bytes: read the fused qkv product once, write q once and k, v once into the pool. One program handles one
token. Rotary is the half-split form (Hugging Face's `rotate_half`).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer
from kernels.dependent_launch import dependent_launch
from kernels.launcher import launch
from kernels.store_kv import to_pool


@dataclass(frozen=True, slots=True)
class Rotary:
    """What q and K of a layer's qkv product go through before attention."""

    cos_sin: Tensor  # fp32 [max_position, head_dim]: cosines of the head_dim / 2 frequencies, then sines
    q_norm: Tensor | None = None  # [head_dim], both or neither
    k_norm: Tensor | None = None
    eps: float = 1e-6


def rotary_store(
    qkv: Tensor, kv: KvLayer, slots: Tensor, positions: Tensor, rotary: Rotary, out_q: Tensor
) -> None:
    """Splits `qkv`, norms, rotates, stores.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; out_q [num_tokens, num_heads, head_dim];
    positions and slots int32 [num_tokens].
    """
    cos_sin, q_norm, k_norm, eps = rotary.cos_sin, rotary.q_norm, rotary.k_norm, rotary.eps
    num_tokens, num_heads, head_dim = out_q.shape
    num_kv_heads = kv.k.shape[1]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, f"qkv is {tuple(qkv.shape)}"
    assert qkv.stride(1) == 1, "qkv rows must be contiguous"
    assert out_q.is_contiguous(), "out_q must be contiguous"
    assert (q_norm is None) == (k_norm is None), "q_norm and k_norm come together"
    if num_tokens == 0:
        return
    heads = (num_heads, triton.next_power_of_2(num_heads))
    kv_heads = (num_kv_heads, triton.next_power_of_2(num_kv_heads))
    half = (head_dim // 2, triton.next_power_of_2(head_dim // 2))
    is_dependent = dependent_launch(qkv.device)["PDL"]
    launch(
        _rotary_store_kernel,
        (num_tokens,),
        (
            qkv,
            kv.k,
            kv.v,
            slots,
            positions,
            cos_sin,
            out_q,
            q_norm if q_norm is not None else qkv,
            k_norm if k_norm is not None else qkv,
            eps,
            qkv.stride(0),
            kv.k.stride(0),
            kv.v.stride(0),
            cos_sin.stride(0),
            1.0 / kv.k_scale,
            1.0 / kv.v_scale,
        ),
        (*heads, *kv_heads, *half, q_norm is not None, is_dependent),
        num_warps=4,
        is_dependent=is_dependent,
    )


@triton.jit
def _pair(at, mask, HALF: tl.constexpr):
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def _gains(norm, half, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Of both halves of a head; without a norm numbers that nobody reads."""
    return _pair(norm + half, half < HALF, HALF) if HAS_NORM else (half, half)


@triton.jit
def _norm_rotated(low, high, gains, cos, sin, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if HAS_NORM:
        square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        scale = 1.0 / tl.sqrt(square + eps)
        low = low * scale[:, None] * gains[0].to(tl.float32)[None, :]
        high = high * scale[:, None] * gains[1].to(tl.float32)[None, :]
    return low * cos[None, :] - high * sin[None, :], high * cos[None, :] + low * sin[None, :]


@triton.jit
def _rotary_store_kernel(
    qkv,
    k_pool,
    v_pool,
    slots,
    positions,
    cos_sin,
    out_q,
    q_norm,
    k_norm,
    eps,
    qkv_stride,
    k_stride,
    v_stride,
    cos_sin_stride,
    k_inverse,
    v_inverse,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_PADDED)
    half_ok = half < HALF
    if PDL:
        gdc_launch_dependents()
    q_gains = _gains(q_norm, half, HALF, HAS_NORM)
    k_gains = _gains(k_norm, half, HALF, HAS_NORM)
    if PDL:
        gdc_wait()
    # All that needs no other load is asked for before the first store: none may pass a store afterwards.
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    heads = tl.arange(0, HEADS_PADDED)
    mask = (heads < HEADS)[:, None] & half_ok[None, :]
    in_heads = heads[:, None] * (2 * HALF) + half[None, :]
    kv_heads = tl.arange(0, KV_HEADS_PADDED)
    kv_mask = (kv_heads < KV_HEADS)[:, None] & half_ok[None, :]
    in_kv_heads = kv_heads[:, None] * (2 * HALF) + half[None, :]
    source = qkv + token * qkv_stride
    k_source = source + HEADS * 2 * HALF
    q_low, q_high = _pair(source + in_heads, mask, HALF)
    k_low, k_high = _pair(k_source + in_kv_heads, kv_mask, HALF)
    v_low, v_high = _pair(k_source + KV_HEADS * 2 * HALF + in_kv_heads, kv_mask, HALF)
    cos, sin = _pair(cos_sin + position * cos_sin_stride + half, half_ok, HALF)
    low, high = _norm_rotated(q_low, q_high, q_gains, cos, sin, eps, HALF, HAS_NORM)
    at = out_q + token * (HEADS * 2 * HALF) + in_heads
    tl.store(at, low.to(out_q.dtype.element_ty), mask=mask)
    tl.store(at + HALF, high.to(out_q.dtype.element_ty), mask=mask)
    low, high = _norm_rotated(k_low, k_high, k_gains, cos, sin, eps, HALF, HAS_NORM)
    at = k_pool + slot * k_stride + in_kv_heads
    tl.store(at, to_pool(low, k_inverse, k_pool), mask=kv_mask)
    tl.store(at + HALF, to_pool(high, k_inverse, k_pool), mask=kv_mask)
    at = v_pool + slot * v_stride + in_kv_heads
    tl.store(at, to_pool(v_low, v_inverse, v_pool), mask=kv_mask)
    tl.store(at + HALF, to_pool(v_high, v_inverse, v_pool), mask=kv_mask)
