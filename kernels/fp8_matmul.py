"""Products of a few fp8 rows with fp8 weights, limited by the bytes of the weight.

Bytes: out_features * in_features of the weight, once. The library's fp8 products of few rows leave half of
the bandwidth unused (docs/kernels/fp8.md). Here the weight is the tall side of the tensor cores' tile and the
rows are its short side, so that 16 rows cost no more than one; a long in_features is cut into parts for
several programs, and the last one to finish an output tile adds the parts up in their order. Sums are in
fp32, within a loop turn as the tensor cores have them.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch

MAX_ROWS = 64
MAX_PARTS = 16
_ENOUGH_TILES = 88  # two thirds of the multiprocessors: parts gain less than adding them up costs


@dataclass(frozen=True, slots=True)
class Fp8Launch:
    """Launch shape; timings of the choices in docs/kernels/fp8.md."""

    outputs: int = 64  # of a program
    block: int = 256  # of in_features, a loop turn
    parts: int = 1  # of in_features, side by side
    warps: int = 4
    stages: int = 4


def choose_launch(num_rows: int, out_features: int, in_features: int) -> Fp8Launch:
    """Two programs a multiprocessor, or one where many rows make parts dear; some turns to pipeline each."""
    tiles = triton.cdiv(out_features, 64)
    programs = 256 if num_rows <= 16 else 128
    parts = 1
    while parts < MAX_PARTS and 2 * parts * tiles <= programs and 1024 * parts <= in_features:
        parts *= 2
    return Fp8Launch(parts=1 if tiles >= _ENOUGH_TILES else parts)


def fp8_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    launch: Fp8Launch | None = None,
) -> Tensor:
    """(x * x_scale) @ (weight * scale).T + bias for few rows: [num_rows, out_features].

    x e4m3 [num_rows, in_features], num_rows <= 64; x_scale fp32 [num_rows, 1]; weight e4m3 [out_features,
    in_features]; scale fp32 [out_features]; all contiguous.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    assert num_rows <= MAX_ROWS, f"{num_rows} rows; at most {MAX_ROWS}"
    assert weight.shape[1] == in_features, f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    assert x.is_contiguous(), "x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    out = torch.empty(num_rows, out_features, dtype=out_dtype, device=x.device)
    shape = launch or choose_launch(num_rows, out_features, in_features)
    tiles = triton.cdiv(out_features, shape.outputs)
    rows = max(16, triton.next_power_of_2(num_rows))
    num_sums = shape.parts * rows * tiles * shape.outputs if shape.parts > 1 else 0
    sums, arrived = _scratch(x.device, num_sums, tiles)
    per_part = triton.cdiv(triton.cdiv(in_features, shape.block), shape.parts) * shape.block
    _fp8_kernel[(tiles, shape.parts)](
        x,
        x_scale,
        weight,
        scale,
        bias if bias is not None else scale,
        out,
        sums,
        arrived,
        num_rows,
        out_features,
        IN_FEATURES=in_features,
        PER_PART=per_part,
        PARTS=shape.parts,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        OUTPUTS=shape.outputs,
        BLOCK=shape.block,
        **dependent_launch(x.device),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


_MOST_SUMS = 4 << 20
_MOST_TILES = 1 << 16


def _scratch(device: torch.device, num_sums: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    """Parts of sums, and how many have come; products follow one another on one stream and share both."""
    assert num_sums <= _MOST_SUMS, f"{num_sums} sums; at most {_MOST_SUMS}"
    assert num_tiles <= _MOST_TILES, f"{num_tiles} tiles; at most {_MOST_TILES}"
    return _scratch_of(device)


@cache
def _scratch_of(device: torch.device) -> tuple[Tensor, Tensor]:
    sums = torch.empty(_MOST_SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    sums,
    arrived,
    num_rows,
    out_features,
    IN_FEATURES: tl.constexpr,
    PER_PART: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    output_ok, row_ok = outputs < out_features, rows < num_rows
    lane = tl.arange(0, BLOCK)
    weight_at = weight + outputs.to(tl.int64)[:, None] * IN_FEATURES + lane[None, :]
    x_at = x + rows[None, :] * IN_FEATURES + lane[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = part * PER_PART
    for start in range(first, tl.minimum(first + PER_PART, IN_FEATURES), BLOCK):
        inside = start + lane < IN_FEATURES
        left = tl.load(weight_at + start, mask=output_ok[:, None] & inside[None, :], other=0.0)
        right = tl.load(x_at + start, mask=row_ok[None, :] & inside[:, None], other=0.0)
        total += tl.dot(left, right)
    if PARTS > 1:
        mine = sums + (tile * PARTS + part) * (OUTPUTS * ROWS)
        at = tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :]
        tl.store(mine + at, total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before != PARTS - 1:
            return
        tl.store(arrived + tile, 0)
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for other in range(PARTS):
            total += tl.load(sums + (tile * PARTS + other) * (OUTPUTS * ROWS) + at, cache_modifier=".cg")
    factor = tl.load(scale + outputs, mask=output_ok, other=0.0)
    row_factor = tl.load(x_scale + rows, mask=row_ok, other=0.0)
    result = total * row_factor[None, :] * factor[:, None]
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[:, None]
    to = out + rows[None, :] * out_features + outputs[:, None]
    tl.store(to, result.to(out.dtype.element_ty), mask=output_ok[:, None] & row_ok[None, :])
