"""Products of a few rows with a weight matrix, limited by the bytes of the weight.

Bytes: num_outputs * width * itemsize of the weight, once. A library product of few rows leaves most of the
bandwidth unused; these kernels also fold in what stands before and after the product: RMSNorm of the input,
addition to the residual, the gated activation.

One row is multiplied lane by lane; its first weights are in registers before the kernel waits for its input.
More rows go through the tensor cores, padded to 16, 32 or 64. The width may be cut into slices, one or more a
warp, so that no warp has a long chain of products to go through; slices are added up in a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch, prefetch

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class MatvecLaunch:
    """Launch shape; timings of the choices in docs/kernels.md."""

    outputs: int = 16  # outputs a program
    block: int = 64  # elements of the width a loop turn and slice
    slices: int = 4  # of the width, side by side; one row: 1; 1: all warps share a tile
    warps: int = 4
    stages: int = 4


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

    x [num_rows, width], num_rows <= 64; weight [num_outputs, width], both contiguous. `norm` [width]: x is
    RMS-normed with it first. `residual` [num_rows, num_outputs]: the product is added to it in place
    and it is returned. `gated`: weight holds gate rows, then up rows; the result is silu(gate) * up
    [num_rows, num_outputs / 2]. Sums are in fp32. The weight may be read before earlier kernels have ended.
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
    kernel = _one_row_kernel if num_rows == 1 else _few_rows_kernel
    kernel[(triton.cdiv(num_outputs, launch.outputs),)](
        x,
        weight,
        out,
        norm if norm is not None else x,
        bias if bias is not None else x,
        num_rows,
        num_outputs,
        eps,
        WIDTH=width,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        OUTPUTS=launch.outputs,
        BLOCK=launch.block,
        SLICES=launch.slices,
        WARPS=launch.warps,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        PREFETCHES=width * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0,
        **dependent_launch(x.device),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out


def beats_library(num_rows: int, num_outputs: int, width: int, *, gated: bool) -> bool:
    """Whether `matvec` is faster than the library's product and the kernels around it (docs/kernels.md)."""
    return num_rows == 1


def choose_launch(num_rows: int, num_outputs: int, width: int, gated: bool) -> MatvecLaunch:
    """The fastest launch shape of those tried for products of this kind (docs/kernels.md)."""
    if num_rows == 1:
        block = min(4096, int(triton.next_power_of_2(width)))
        return MatvecLaunch(outputs=4, block=block, slices=1, warps=8, stages=1)
    if num_rows > 16:
        if num_outputs <= 2048:
            return MatvecLaunch(outputs=8, block=32, slices=8, warps=8, stages=3)
        return MatvecLaunch(outputs=32, block=64, slices=1, warps=4, stages=5)
    if num_outputs <= 2048:
        return MatvecLaunch(outputs=8, block=32, slices=8, warps=8, stages=4)
    return MatvecLaunch(outputs=16, block=32, slices=8, warps=8, stages=4)


@triton.jit
def _prefetch_weight(
    weight,
    first,
    num_outputs,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
):
    row_bytes: tl.constexpr = WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8
    base = weight.to(tl.int64)
    prefetch(base, first, num_outputs, row_bytes, OUTPUTS, 32 * WARPS)
    if GATED:
        prefetch(base, num_outputs + first, 2 * num_outputs, row_bytes, OUTPUTS, 32 * WARPS)


@triton.jit
def _weight_tile(weight, outputs, output_ok, k, WIDTH: tl.constexpr):
    """Rows `outputs` at columns k: [outputs, k]."""
    at = weight + outputs.to(tl.int64)[:, None] * WIDTH + k[None, :]
    return tl.load(at, mask=output_ok[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _one_row_kernel(
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
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PREFETCHES: tl.constexpr,
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
        if PREFETCHES and BLOCK < WIDTH:
            _prefetch_weight(weight, first, num_outputs, WIDTH, OUTPUTS, WARPS, GATED)
        gdc_wait()
    value = tl.load(x + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    squares = value * value
    if HAS_NORM:
        value = value * gain.to(tl.float32)
    lanes = w.to(tl.float32) * value[None, :]
    up_lanes = up.to(tl.float32) * value[None, :]
    for start in range(BLOCK, WIDTH, BLOCK):
        at = start + k
        w = _weight_tile(weight, outputs, output_ok, at, WIDTH)
        value = tl.load(x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        squares += value * value
        if HAS_NORM:
            value = value * tl.load(norm + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        lanes += w.to(tl.float32) * value[None, :]
        if GATED:
            up = _weight_tile(weight, outputs + num_outputs, output_ok, at, WIDTH)
            up_lanes += up.to(tl.float32) * value[None, :]
    result = tl.sum(lanes, 1)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + eps)
        result *= scale
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * (tl.sum(up_lanes, 1) * scale)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        result += tl.load(out + outputs, mask=output_ok, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=output_ok)


@triton.jit
def _weight_part(weight, outputs, output_ok, k, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """Rows `outputs` at columns k: [block, outputs], or of k [slices, block]: [slices, block, outputs]."""
    if SLICES == 1:
        part = tl.trans(_weight_tile(weight, outputs, output_ok, k, WIDTH))
    else:
        at = weight + outputs.to(tl.int64)[None, :, None] * WIDTH + k[:, None, :]
        tile = tl.load(at, mask=output_ok[None, :, None] & (k < WIDTH)[:, None, :], other=0.0)
        part = tl.permute(tile, (0, 2, 1))
    return part


@triton.jit
def _input_part(x, rows, row_ok, k, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """Rows of x at columns k: [rows, block], or of k [slices, block]: [slices, rows, block]."""
    if SLICES == 1:
        mask = row_ok[:, None] & (k < WIDTH)[None, :]
        part = tl.load(x + rows[:, None] * WIDTH + k[None, :], mask=mask, other=0.0)
    else:
        mask = row_ok[None, :, None] & (k < WIDTH)[:, None, :]
        part = tl.load(x + rows[None, :, None] * WIDTH + k[:, None, :], mask=mask, other=0.0)
    return part


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
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
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PREFETCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * OUTPUTS
    lane = tl.arange(0, BLOCK)
    if SLICES > 1:
        lane = tl.arange(0, SLICES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    gain = lane
    if HAS_NORM:
        gain = tl.load(norm + lane, mask=lane < WIDTH, other=0.0)
    if PDL:
        gdc_launch_dependents()
        if PREFETCHES:
            _prefetch_weight(weight, first, num_outputs, WIDTH, OUTPUTS, WARPS, GATED)
        gdc_wait()
    outputs = first + tl.arange(0, OUTPUTS)
    output_ok = outputs < num_outputs
    rows = tl.arange(0, ROWS)
    row_ok = rows < num_rows
    if SLICES == 1:
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
    else:
        acc = tl.zeros([SLICES, ROWS, OUTPUTS], tl.float32)
        squares = tl.zeros([SLICES, ROWS, BLOCK], tl.float32)
    up_acc = acc
    for start in range(0, WIDTH, SLICES * BLOCK):
        k = start + lane
        w = _weight_part(weight, outputs, output_ok, k, WIDTH, SLICES)
        value = _input_part(x, rows, row_ok, k, WIDTH, SLICES)
        if HAS_NORM:
            wide = value.to(tl.float32)
            squares += wide * wide
            if SLICES == 1:
                value = (wide * gain.to(tl.float32)[None, :]).to(value.dtype)
            else:
                value = (wide * gain.to(tl.float32)[:, None, :]).to(value.dtype)
            # A turn ahead: too small for the pipeline, and its way is long.
            after = k + SLICES * BLOCK
            gain = tl.load(norm + after, mask=after < WIDTH, other=0.0)
        acc = tl.dot(value, w, acc, input_precision="ieee")
        if GATED:
            up = _weight_part(weight, outputs + num_outputs, output_ok, k, WIDTH, SLICES)
            up_acc = tl.dot(value, up, up_acc, input_precision="ieee")
    if SLICES == 1:
        result, up_result, square = acc, up_acc, tl.sum(squares, 1)
    else:
        result, up_result = tl.sum(acc, 0), tl.sum(up_acc, 0)
        square = tl.sum(tl.sum(squares, 0), 1)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(square / WIDTH + eps)
        result *= scale[:, None]
        up_result *= scale[:, None]
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * up_result
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[None, :]
    to = out + rows[:, None] * num_outputs + outputs[None, :]
    mask = row_ok[:, None] & output_ok[None, :]
    if HAS_RESIDUAL:
        result += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, result.to(out.dtype.element_ty), mask=mask)
