"""Activations to float8_e4m3fn, each row with its own scale: what comes before an fp8 product.

Bytes: read a row once, write half of it; behind a norm or the gated activation what those read, and what they
would leave is not written. One program handles one row; the specification is kernels.fp8.quantize_rows, of
what these operations leave.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.fp8 import E4M3, LARGEST
from kernels.launcher import launch

TOP = tl.constexpr(LARGEST)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, width], rows contiguous, as e4m3 [n, width] and scales fp32 [n, 1]."""
    assert x.stride(1) == 1, "rows must be contiguous"
    return _launch(_quantize_kernel, x, (x,), (x.stride(0),), x.shape[1], ())


def norm_rows(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of the norm of residual + x, which is left in `residual`; x None: of its norm alone.

    x, residual [n, width]; weight [width].
    """
    width = residual.shape[1]
    assert weight.shape == (width,), f"residual is {tuple(residual.shape)}, weight {tuple(weight.shape)}"
    assert residual.is_contiguous(), "residual must be contiguous"
    assert x is None or x.is_contiguous(), "x must be contiguous"
    tensors = (x if x is not None else residual, residual, weight)
    return _launch(_norm_kernel, residual, tensors, (eps,), width, (x is not None,))


def silu_rows(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of the gated activation. gate_up [n, 2 * width], gate first."""
    assert gate_up.stride(1) == 1, "rows must be contiguous"
    return _launch(_silu_kernel, gate_up, (gate_up,), (gate_up.stride(0),), gate_up.shape[1] // 2, ())


def _launch(
    kernel: Any,
    like: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    width: int,
    constants: tuple[bool, ...],
) -> tuple[Tensor, Tensor]:
    num_rows, device = like.shape[0], like.device
    rows = torch.empty(num_rows, width, dtype=E4M3, device=device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=device)
    if num_rows:
        padded = int(triton.next_power_of_2(width))
        is_dependent = dependent_launch(device)["PDL"]
        launch(
            kernel,
            (num_rows,),
            (*tensors, rows, scales, *numbers),
            (width, padded, *constants, is_dependent),
            num_warps=min(16, max(1, padded // 512)),
            is_dependent=is_dependent,
        )
    return rows, scales


@triton.jit
def _quantize_kernel(
    x,
    rows,
    scales,
    stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    values = tl.load(x + row * stride + at, mask=at < WIDTH, other=0.0)
    _store_quantized(values, rows, scales, row, at, WIDTH)


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    rows,
    scales,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_X: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.arange(0, PADDED)
    mask = at < WIDTH
    gain = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(residual + row * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_X:
        value += tl.load(x + row * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + row * WIDTH + at, value.to(residual.dtype.element_ty), mask=mask)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    _store_quantized((value * factor * gain).to(residual.dtype.element_ty), rows, scales, row, at, WIDTH)


@triton.jit
def _silu_kernel(
    gate_up,
    rows,
    scales,
    stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < WIDTH
    gate = tl.load(gate_up + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty)
    _store_quantized(active, rows, scales, row, at, WIDTH)


@triton.jit
def _store_quantized(values, rows, scales, row, at, WIDTH: tl.constexpr):
    """A row's values [PADDED], zeros behind its end, as activations hold them."""
    values = values.to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0  # which the maximum passes over
    scale = tl.where(largest > 0, largest * (1.0 / TOP), 1.0)
    scale = tl.where(has_nan, float("nan"), scale)
    scaled = tl.div_rn(values, scale)
    scaled = tl.minimum(tl.maximum(scaled, -TOP), TOP)
    tl.store(rows + row * WIDTH + at, scaled.to(rows.dtype.element_ty), mask=at < WIDTH)
    tl.store(scales + row, scale)
