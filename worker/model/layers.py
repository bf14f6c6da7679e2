"""Linear, embedding and rotary layers on top of kernels; the seam for packed implementations.

A product goes through `Linear` and nothing else, so a backend may keep weights as it likes: it gets the
sources of the file, not dense tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import reference
from worker.model.rope import RopeConfig, cos_sin_table
from worker.model.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a layer computes, and in which dtype activations are."""

    device: torch.device
    dtype: torch.dtype


class Linear(Protocol):
    """y = x W^T + b. x [num_tokens, in_features] → [num_tokens, out_features], dtype as placed."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        ...


class Embedding(Protocol):
    """Rows by id. ids int [num_tokens] → [num_tokens, width], dtype as placed."""

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows."""
        ...


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """What a Linear is made of: matrices stacked by output rows, e.g. q, k and v."""

    name: str  # e.g. "model.layers.3.qkv", "lm_head"
    parts: Sequence[WeightSource]  # each [out_features_i, in_features]
    biases: Sequence[WeightSource]  # one per part, [out_features_i], or none at all

    @property
    def out_features(self) -> int:
        """Rows of all parts."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.parts[0].shape[1]

    def bias(self, placement: Placement) -> Tensor | None:
        """The stacked bias [out_features]."""
        if not self.biases:
            return None
        return torch.cat([bias.dequantized(placement.dtype, placement.device) for bias in self.biases])


LinearFactory = Callable[[LinearWeights, Placement], Linear]
EmbeddingFactory = Callable[[WeightSource, Placement], Embedding]


class TorchLinear:
    """A dense weight and torch's product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


class TorchEmbedding:
    """A dense table."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [rows, width]

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows."""
        return torch.nn.functional.embedding(ids, self.weight)


def torch_linear(weights: LinearWeights, placement: Placement) -> Linear:
    """The default factory."""
    dense = [part.dequantized(placement.dtype, placement.device) for part in weights.parts]
    return TorchLinear(dense[0] if len(dense) == 1 else torch.cat(dense), weights.bias(placement))


def torch_embedding(source: WeightSource, placement: Placement) -> Embedding:
    """The default factory."""
    return TorchEmbedding(source.dequantized(placement.dtype, placement.device))


@dataclass(frozen=True, slots=True)
class Operations:
    """The functions between products; a backend replaces those that it does faster."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = reference.add_rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rotary
    silu_mul: Callable[[Tensor], Tensor] = reference.silu_mul


class RotaryTable:
    """Cosines and sines by absolute position, on the device."""

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        cos, sin = cos_sin_table(rope, head_dim, num_positions)
        self.cos = cos.to(device)  # fp32 [num_positions, head_dim / 2]
        self.sin = sin.to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of these positions, each fp32 [num_tokens, head_dim / 2]."""
        return self.cos[positions], self.sin[positions]
