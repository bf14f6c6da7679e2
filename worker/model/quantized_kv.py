"""Scales of fp8 pages, one for K and one for V of each layer, measured on the model itself.

e4m3 rounds a large number as finely as a small one, so a scale has one task: nothing beyond 448, nothing
among the subnormal numbers. Owns the measurement: one pass over seeded random tokens at load, the same on
every worker, so that all of them store the same bytes.
"""

import math

import torch
from torch import Tensor

from kernels import reference
from kernels.fp8 import LARGEST
from worker.model.llama import Model

HEADROOM = 2.0
"""How much larger than in the measurement K and V may be before they are cut off."""
_TOKENS, _SEED = 256, 0


def measure_kv_scales(model: Model, device: torch.device) -> tuple[tuple[float, float], ...]:
    """(k_scale, v_scale) by layer: powers of two, so that scaling itself rounds nothing."""
    draw = torch.Generator().manual_seed(_SEED)
    count = min(_TOKENS, model.max_context)
    ids = torch.randint(model.config.vocab_size, (count,), generator=draw, dtype=torch.int32).to(device)
    positions = torch.arange(count, dtype=torch.int32, device=device)
    largest: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        largest.append(torch.stack([k.abs().amax(), v.abs().amax()]).float())
        return reference.attention(q, k, v, positions, scale=model.config.attention_scale)

    with torch.inference_mode():
        model.forward(ids, positions, attend)
    return tuple((scale_for(k), scale_for(v)) for k, v in torch.stack(largest).tolist())


def scale_for(largest: float) -> float:
    """The power of two with which numbers up to `largest`, and HEADROOM times that, fit into e4m3."""
    if not 0.0 < largest < math.inf:
        return 1.0
    return float(2.0 ** math.ceil(math.log2(largest * HEADROOM / LARGEST)))
