"""Activations to float8_e4m3fn, each row with its own scale: what comes before an fp8 product.

Bytes: read a row once, write half of it. One program handles one row; the specification is
kernels.fp8.quantize_rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.fp8 import E4M3, LARGEST


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, width], rows contiguous, as e4m3 [n, width] and scales fp32 [n, 1]."""
    num_rows, width = x.shape
    assert x.stride(1) == 1, "rows must be contiguous"
    rows = torch.empty(num_rows, width, dtype=E4M3, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        padded = int(triton.next_power_of_2(width))
        _quantize_kernel[(num_rows,)](
            x,
            rows,
            scales,
            x.stride(0),
            WIDTH=width,
            PADDED=padded,
            LARGEST=LARGEST,
            **dependent_launch(x.device),
            num_warps=min(16, max(1, padded // 512)),
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
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < WIDTH
    values = tl.load(x + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0  # which the maximum passes over
    scale = tl.where(largest > 0, largest * (1.0 / LARGEST), 1.0)
    scale = tl.where(has_nan, float("nan"), scale)
    scaled = tl.div_rn(values, scale)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    tl.store(rows + row * WIDTH + at, scaled.to(rows.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale)
