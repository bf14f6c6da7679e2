"""Rotary position embedding: which variant a model uses, and its table of cosines and sines.

Owns the formulas of the variants. A row of the table depends on its absolute position alone, so pages
can be shared between sequences of any length. Knows nothing of files.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeVariant = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A resolved variant: every value its formula needs, none guessed later."""

    variant: RopeVariant = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0  # positions seen in training; dynamic, yarn and llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # multiplies cosines and sines
    truncate: bool = True  # yarn: round the corrected range to whole dimensions
    frequency_divisors: tuple[float, ...] = ()  # per pair, from the file; instead of llama3's formula


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. num_positions - 1, each fp32 [num_positions, head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    if rope.variant == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(rope, head_dim, positions)
    else:
        angles = positions[:, None] * frequencies(rope, head_dim)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]."""
    plain = 1.0 / _wavelengths(rope.theta, head_dim)
    if rope.frequency_divisors:
        return plain / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    match rope.variant:
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, head_dim)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The default scale of cosines and sines. Source: Peng et al., arXiv:2309.00071, section 3.4."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _wavelengths(theta: float, head_dim: int) -> Tensor:
    return torch.pow(theta, _exponents(head_dim))  # in units of 2 pi positions


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """The base grows once a context is longer than the trained one, fp32 [num_positions, head_dim / 2].

    Computed as for a context that ends at this very position: what a model fed token by token sees, and
    the only reading in which a cached K may serve other sequences. Positions within the trained
    context are not touched. A prompt longer than that, computed at once, turns all its tokens by the
    base of its full length in some other implementations; that K could not be shared.
    """
    stretch = torch.clamp((positions + 1) / rope.original_context, min=1.0) * rope.factor - (rope.factor - 1)
    bases = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / bases[:, None] ** _exponents(head_dim)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / plain
    ratio = rope.original_context / wavelengths
    smooth = (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(ratio < rope.low_freq_factor, plain / rope.factor, between)
    return torch.where(ratio > rope.high_freq_factor, plain, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Blend of stretched and plain frequencies by how often a pair turns in the trained context."""
    plain = 1.0 / _wavelengths(rope.theta, head_dim)
    low, high = _yarn_range(rope, head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001
