"""The gated activation: silu(gate) * up, read from one fused product.

Bytes: read 2 * num_tokens * width, write num_tokens * width elements. `ahead` as in rms_norm.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import ahead_of, dependent_launch, prefetch_share

SIZE = 1024
WARPS = 4


def silu_mul(gate_up: Tensor, ahead: Tensor | None = None) -> Tensor:
    """gate_up [num_tokens, 2 * width], gate first → [num_tokens, width], same dtype; silu in fp32."""
    num_tokens, double = gate_up.shape
    width = double // 2
    assert gate_up.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        coming = ahead_of(ahead, gate_up.device)
        blocks = triton.cdiv(width, SIZE)
        _silu_mul_kernel[(num_tokens * blocks + coming["AHEAD"],)](
            gate_up,
            out,
            gate_up.stride(0),
            width,
            blocks,
            num_tokens * blocks,
            SIZE=SIZE,
            WARPS=WARPS,
            **coming,
            **dependent_launch(gate_up.device),
            num_warps=WARPS,
        )
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def _silu_mul_kernel(
    gate_up,
    out,
    stride,
    width,
    blocks,
    num_blocks,
    ahead,
    ahead_bytes,
    SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:  # noqa: SIM102  (a constant, so apart)
            if program >= num_blocks:
                prefetch_share(ahead.to(tl.int64), ahead_bytes, program - num_blocks, AHEAD, 32 * WARPS)
                return
        gdc_wait()
    token = (program // blocks).to(tl.int64)
    at = (program % blocks) * SIZE + tl.arange(0, SIZE)
    mask = at < width
    gate = tl.load(gate_up + token * stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out + token * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask
    )
