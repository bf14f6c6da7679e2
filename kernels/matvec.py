"""The product of one row with a weight matrix, limited by the bytes of the weight.

Bytes: num_outputs * width * itemsize of the weight, once. A library product of one row leaves most of the
bandwidth unused; this kernel also folds in what stands before and after the product: RMSNorm of the input,
addition to the residual, the gated activation. Its first weights are in registers before it waits for its
input, and in a long row each block of weights is asked for before the one before it is multiplied.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch


@dataclass(frozen=True, slots=True)
class MatvecLaunch:
    """Launch shape; timings of the choices in docs/kernels/products.md."""

    outputs: int = 4  # outputs a program
    block: int = 1024  # elements of the width a loop turn
    warps: int = 8


def matvec(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    launch: MatvecLaunch | None = None,
) -> Tensor:
    """x @ weight.T for one row, with prologue and epilogue.

    x [1, width]; weight [num_outputs, width], both contiguous. `norm` [width]: x is RMS-normed with it first.
    `scale` fp32 [num_outputs]: weight is e4m3 and stands for weight * scale[:, None]. `residual` [1,
    num_outputs]: the product is added to it in place and it is returned. `gated`: weight holds
    gate rows, then up rows; the result is silu(gate) * up [1, num_outputs / 2]. Sums are in fp32. The weight
    and `norm` may be read before earlier kernels have ended.
    """
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert num_rows == 1, f"{num_rows} rows"
    assert weight.shape[1] == width, f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    assert weight.is_contiguous(), "weight must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    assert residual is None or residual.shape == (1, num_outputs), f"residual {residual.shape}"
    if launch is None:
        launch = choose_launch(num_outputs, width, gated, weight.element_size())
    out = residual
    if out is None:
        out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    _matvec_kernel[(triton.cdiv(num_outputs, launch.outputs),)](
        x,
        weight,
        out,
        norm if norm is not None else x,
        scale if scale is not None else x,
        bias if bias is not None else x,
        num_outputs,
        eps,
        WIDTH=width,
        OUTPUTS=launch.outputs,
        BLOCK=launch.block,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        **dependent_launch(x.device),
        num_warps=launch.warps,
    )
    return out


def choose_launch(num_outputs: int, width: int, gated: bool, itemsize: int = 2) -> MatvecLaunch:
    """The fastest launch shape of those tried for products of this kind (docs/kernels/products.md)."""
    if num_outputs > 65_536:
        outputs, block, warps = 8 if width <= 1024 else 4, 1024, 4
    elif width <= 1024:
        outputs, block, warps = (8, 512, 8) if gated else (4, 512, 4)
    elif width <= 3072:
        outputs, block, warps = 4, 2048, 8
    elif gated:
        outputs, block, warps = 2, 4096, 8
    elif num_outputs > 4096:
        outputs, block, warps = 2, 2048 if itemsize > 1 else 4096, 8
    else:
        outputs, block, warps = 8, 512, 8
    return MatvecLaunch(outputs, min(block, int(triton.next_power_of_2(width))), warps)


@triton.jit
def _weight_tile(weight, outputs, output_ok, k, WIDTH: tl.constexpr):
    """Rows `outputs` at columns k: [outputs, k]."""
    at = weight + outputs.to(tl.int64)[:, None] * WIDTH + k[None, :]
    return tl.load(at, mask=output_ok[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit
def _matvec_kernel(
    x,
    weight,
    out,
    norm,
    scale,
    bias,
    num_outputs,
    eps,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * OUTPUTS
    outputs = first + tl.arange(0, OUTPUTS)
    output_ok = outputs < num_outputs
    k = tl.arange(0, BLOCK)
    # No kernel writes weights, so the first of them may be on their way before the input is there.
    w = _weight_tile(weight, outputs, output_ok, k, WIDTH)
    up = w
    if GATED:
        up = _weight_tile(weight, outputs + num_outputs, output_ok, k, WIDTH)
    gain = k
    if HAS_NORM:
        gain = tl.load(norm + k, mask=k < WIDTH, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    lanes = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    up_lanes = lanes
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + k
        next_w, next_up, next_gain = w, up, gain
        if BLOCK < WIDTH:
            after = at + BLOCK
            next_w = _weight_tile(weight, outputs, output_ok, after, WIDTH)
            if GATED:
                next_up = _weight_tile(weight, outputs + num_outputs, output_ok, after, WIDTH)
            if HAS_NORM:
                next_gain = tl.load(norm + after, mask=after < WIDTH, other=0.0)
        value = tl.load(x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        squares += value * value
        if HAS_NORM:
            value = value * gain.to(tl.float32)
        lanes += w.to(tl.float32) * value[None, :]
        if GATED:
            up_lanes += up.to(tl.float32) * value[None, :]
        w, up, gain = next_w, next_up, next_gain
    result = tl.sum(lanes, 1)
    up_result = tl.sum(up_lanes, 1)
    if HAS_SCALE:
        result *= tl.load(scale + outputs, mask=output_ok, other=0.0)
        if GATED:
            up_result *= tl.load(scale + num_outputs + outputs, mask=output_ok, other=0.0)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + eps)
        result *= factor
        up_result *= factor
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * up_result
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        result += tl.load(out + outputs, mask=output_ok, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=output_ok)
