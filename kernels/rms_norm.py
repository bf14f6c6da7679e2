"""RMSNorm, with the residual added first where there is one. One program per token.

Bytes: read x (and residual), write the result (and the new residual).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [num_tokens, width] → x / rms(x) * weight, same dtype; the mean is in fp32."""
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum; both [num_tokens, width]."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    num_tokens, width = x.shape
    assert x.stride(1) == 1, "rows of x must be contiguous"
    assert weight.shape == (width,), f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(width)
    launch(
        _norm_kernel,
        (num_tokens,),
        (x, residual if residual is not None else x, weight, out, eps, x.stride(0)),
        (width, padded, residual is not None),
        num_warps=min(16, max(1, padded // 512)),
    )


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PADDED)
    mask = at < WIDTH
    value = tl.load(x + token * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + token * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + token * WIDTH + at, value.to(residual.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = value * scale * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + at, normed.to(out.dtype.element_ty), mask=mask)
