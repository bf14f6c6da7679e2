"""float8_e4m3fn: the range, and how numbers become it and come back. In plain torch: the specification.

One sign bit, four of exponent, three of fraction; no infinity, one NaN; the largest number is 448. A value
is stored as value / scale, kept within the range and rounded to nearest even; NaN stays NaN. Source:
Micikevicius et al., arXiv:2209.05433.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
NAN_BYTE = 0x7F


def to_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """x / scale as e4m3, any shape; a scale tensor is broadcast."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def to_pages(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rows of K or V as a pool of `dtype` holds them: scaled in e4m3, as they are in every other type."""
    return to_fp8(x, scale) if dtype == E4M3 else x.to(dtype)


def read_slots(pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    """K or V of these slots: fp32 from e4m3, otherwise the pool's own type.

    pool [num_slots, num_kv_heads, head_dim]; slots int64, any shape → [*slots.shape, num_kv_heads, head_dim].
    """
    rows = pool[slots]
    return rows.float() * scale if pool.dtype == E4M3 else rows


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as e4m3, each with the scale that uses the whole range: ([n, width], fp32 [n, 1]).

    A row of zeros gets the scale 1, one with a NaN the scale NaN. x [n, width].
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A product, and not a quotient, since torch divides by a number otherwise on CUDA than on a processor.
    scale = torch.where(largest == 0, 1.0, largest * (1.0 / LARGEST))
    return to_fp8(x, scale), scale


def scaled_product(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The product that the scaled numbers stand for, accumulated in fp32: fp32 [n, out_features].

    x e4m3 [n, in_features], x_scale fp32 [n, 1], weight e4m3 [out_features, in_features], scale fp32
    [out_features].
    """
    return (x.float() @ weight.float().T) * x_scale * scale
