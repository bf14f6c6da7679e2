"""RMSNorm, with the residual added first where there is one. One program per token.

Bytes: read x (and residual), write the result (and the new residual). `ahead` is the weight of the product
that comes next: programs beside those of the tokens bring it nearer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import ahead_of, dependent_launch, prefetch_share


def rms_norm(x: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None) -> Tensor:
    """x [num_tokens, width] → x / rms(x) * weight, same dtype; the mean is in fp32."""
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps, ahead)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None
) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum; both [num_tokens, width]."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps, ahead)
    return out


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float, ahead: Tensor | None
) -> None:
    num_tokens, width = x.shape
    assert x.stride(1) == 1, "rows of x must be contiguous"
    assert weight.shape == (width,), f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(width)
    warps = min(16, max(1, padded // 512))
    coming = ahead_of(ahead, x.device)
    _norm_kernel[(num_tokens + coming["AHEAD"],)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        eps,
        x.stride(0),
        num_tokens,
        WIDTH=width,
        WIDTH_PADDED=padded,
        HAS_RESIDUAL=residual is not None,
        WARPS=warps,
        **coming,
        **dependent_launch(x.device),
        num_warps=warps,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    num_tokens,
    ahead,
    ahead_bytes,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PADDED)
    mask = at < WIDTH
    gain = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:  # noqa: SIM102  (a constant, so apart)
            if token >= num_tokens:
                prefetch_share(ahead.to(tl.int64), ahead_bytes, token - num_tokens, AHEAD, 32 * WARPS)
                return
        gdc_wait()
    value = tl.load(x + token * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + token * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + token * WIDTH + at, value.to(residual.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = value * scale * gain
    tl.store(out + token * WIDTH + at, normed.to(out.dtype.element_ty), mask=mask)
