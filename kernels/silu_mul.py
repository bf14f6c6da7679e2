"""The gated activation: silu(gate) * up, read from one fused product.

Bytes: read 2 * num_tokens * width, write num_tokens * width elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 * width], gate first → [num_tokens, width], same dtype; silu in fp32."""
    num_tokens, double = gate_up.shape
    width = double // 2
    assert gate_up.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        size = 1024
        grid = (num_tokens, triton.cdiv(width, size))
        launch(_silu_mul_kernel, grid, (gate_up, out, gate_up.stride(0), width), (size,), num_warps=4)
    return out


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, width, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = at < width
    gate = tl.load(gate_up + token * stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out + token * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask
    )
