"""Products of a few rows with a weight matrix, limited by the bytes of the weight.

Bytes: num_outputs * width * itemsize of the weight, once. At batch 1..16 a library product leaves most of the
bandwidth unused; these kernels also fold in what stands before and after the product: RMSNorm of the input,
addition to the residual, the gated activation.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class MatvecLaunch:
    """Launch shape; timings of the choices in docs/kernels.md."""

    outputs: int = 16  # outputs a program
    block: int = 512  # elements of the width a loop turn
    warps: int = 4
    stages: int = 3


def matvec(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    launch: MatvecLaunch | None = None,
) -> Tensor:
    """x @ weight.T for few rows, with prologue and epilogue.

    x [num_rows, width], num_rows <= 16; weight [num_outputs, width], both contiguous. `norm` [width]: x is
    RMS-normed with it first. `residual` [num_rows, num_outputs]: the product is added to it in place
    and it is returned. `gated`: weight holds gate rows, then up rows; the result is silu(gate) * up
    [num_rows, num_outputs / 2]. Sums are in fp32.
    """
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert num_rows <= MAX_ROWS, f"{num_rows} rows; at most {MAX_ROWS}"
    assert weight.shape[1] == width, f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    assert weight.is_contiguous(), "weight must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    assert residual is None or residual.shape == (num_rows, num_outputs), f"residual {residual.shape}"
    if launch is None:
        launch = choose_launch(num_rows, num_outputs, width, gated)
    out = residual
    if out is None:
        out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    _matvec_kernel[(triton.cdiv(num_outputs, launch.outputs),)](
        x,
        weight,
        out,
        norm if norm is not None else x,
        bias if bias is not None else x,
        num_rows,
        num_outputs,
        eps,
        WIDTH=width,
        ROWS=1 if num_rows == 1 else 16,
        OUTPUTS=launch.outputs,
        BLOCK=launch.block,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out


def choose_launch(num_rows: int, num_outputs: int, width: int, gated: bool) -> MatvecLaunch:
    """The fastest launch shape of those tried for products of this kind (docs/kernels.md)."""
    block = min(1024, int(triton.next_power_of_2(width)))
    if num_rows == 1:
        return MatvecLaunch(outputs=4, block=block, warps=8, stages=1)
    outputs = 32 if num_outputs >= 4096 else 16
    return MatvecLaunch(outputs=outputs, block=min(256, block), warps=4, stages=5)


@triton.jit
def _products(
    x,
    weight,
    outputs,
    output_ok,
    rows,
    row_ok,
    scale,
    norm,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    base = weight + outputs.to(tl.int64) * WIDTH
    if ROWS == 1:
        lanes = tl.zeros([OUTPUTS, BLOCK], tl.float32)
        for k in range(0, WIDTH, BLOCK):
            inside = k + at < WIDTH
            w = tl.load(base[:, None] + k + at[None, :], mask=output_ok[:, None] & inside[None, :], other=0.0)
            value = tl.load(x + k + at, mask=inside, other=0.0).to(tl.float32)
            if HAS_NORM:
                value = value * scale * tl.load(norm + k + at, mask=inside, other=0.0).to(tl.float32)
            lanes += w.to(tl.float32) * value[None, :]
        return tl.sum(lanes, 1)[None, :]
    else:
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for k in range(0, WIDTH, BLOCK):
            inside = k + at < WIDTH
            w = tl.load(base[:, None] + k + at[None, :], mask=output_ok[:, None] & inside[None, :], other=0.0)
            value = tl.load(
                x + rows[:, None] * WIDTH + k + at[None, :], mask=row_ok[:, None] & inside[None, :], other=0.0
            )
            if HAS_NORM:
                weights = tl.load(norm + k + at, mask=inside, other=0.0).to(tl.float32)
                value = (value.to(tl.float32) * scale[:, None] * weights[None, :]).to(w.dtype)
            acc = tl.dot(value, tl.trans(w), acc)
        return acc


@triton.jit
def _matvec_kernel(
    x,
    weight,
    out,
    norm,
    bias,
    num_rows,
    num_outputs,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output_ok = outputs < num_outputs
    rows = tl.arange(0, ROWS)
    row_ok = rows < num_rows
    at = tl.arange(0, BLOCK)
    scale = 1.0
    if HAS_NORM:
        if ROWS == 1:
            square = tl.zeros([BLOCK], tl.float32)
            for k in range(0, WIDTH, BLOCK):
                value = tl.load(x + k + at, mask=k + at < WIDTH, other=0.0).to(tl.float32)
                square += value * value
            scale = 1.0 / tl.sqrt(tl.sum(square, 0) / WIDTH + eps)
        else:
            squares = tl.zeros([ROWS], tl.float32)
            for k in range(0, WIDTH, BLOCK):
                inside = row_ok[:, None] & (k + at < WIDTH)[None, :]
                values = tl.load(x + rows[:, None] * WIDTH + k + at[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )
                squares += tl.sum(values * values, 1)
            scale = 1.0 / tl.sqrt(squares / WIDTH + eps)
    result = _products(
        x, weight, outputs, output_ok, rows, row_ok, scale, norm, WIDTH, ROWS, OUTPUTS, BLOCK, HAS_NORM
    )
    if GATED:
        upper = outputs + num_outputs
        up = _products(
            x, weight, upper, output_ok, rows, row_ok, scale, norm, WIDTH, ROWS, OUTPUTS, BLOCK, HAS_NORM
        )
        result = result / (1.0 + tl.exp(-result)) * up
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[None, :]
    to = out + rows[:, None] * num_outputs + outputs[None, :]
    mask = row_ok[:, None] & output_ok[None, :]
    if HAS_RESIDUAL:
        result += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, result.to(out.dtype.element_ty), mask=mask)
