"""A matrix product whose rows do not know one another: one launch shape for any number of rows.

Flops: 2 * num_rows * out_features * in_features. Libraries choose tiles, and how sums are split, by the
number of rows, so the last bits of a row change with its company. Here the tile follows from the weight
alone, no sum is split, and each element is summed along in_features in one order. Source of the idea: He et
al., "Defeating Nondeterminism in LLM Inference", 2025.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch


@dataclass(frozen=True, slots=True)
class InvariantLaunch:
    """Launch shape; timings in docs/kernels/deterministic.md. May depend on the weight, never on the rows."""

    rows: int = 64
    outputs: int = 64
    inputs: int = 128  # a loop turn
    warps: int = 4
    stages: int = 4


_GROUP = 8  # row tiles that share a weight tile while it is in the cache


def launch_for(out_features: int, itemsize: int) -> InvariantLaunch:
    """Narrow tiles where the outputs are few, so that one row still fills the device."""
    if itemsize > 2:
        return InvariantLaunch(rows=32, outputs=64, inputs=32, stages=3)
    return InvariantLaunch() if out_features <= 8192 else InvariantLaunch(outputs=128)


def invariant_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, launch: InvariantLaunch | None = None
) -> Tensor:
    """x [num_rows, in_features] times weight [out_features, in_features] transposed, plus bias.

    Sums are in fp32 (products of fp32 too, not in TF32); the result is rounded once to the dtype of x.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    assert weight.shape[1] == in_features, f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    assert x.stride(1) == weight.stride(1) == 1, "rows must be contiguous"
    shape = launch or launch_for(out_features, x.element_size())
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    programs = triton.cdiv(num_rows, shape.rows) * triton.cdiv(out_features, shape.outputs)
    _matmul_kernel[(programs,)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        ROWS=shape.rows,
        OUTPUTS=shape.outputs,
        INPUTS=shape.inputs,
        GROUP=_GROUP,
        **dependent_launch(x.device),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    row_tiles, output_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(out_features, OUTPUTS)
    group = program // (GROUP * output_tiles)
    first_tile = group * GROUP
    group_size = tl.minimum(row_tiles - first_tile, GROUP)
    within = program % (GROUP * output_tiles)
    row_tile, output_tile = first_tile + within % group_size, within // group_size
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    outputs = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row_ok, output_ok = rows < num_rows, outputs < out_features
    lane = tl.arange(0, INPUTS)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + lane[None, :]
    weight_at = weight + outputs.to(tl.int64)[None, :] * weight_stride + lane[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, in_features, INPUTS):
        inside = start + lane < in_features
        left = tl.load(x_at + start, mask=row_ok[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight_at + start, mask=output_ok[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[None, :]
    at = out + rows.to(tl.int64)[:, None] * out_features + outputs[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_ok[:, None] & output_ok[None, :])
