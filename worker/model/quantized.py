"""Linear layers of fp8 weights: e4m3 with a scale for each output, activations scaled row by row.

Weights are made fp8 while they are loaded, part by part, so that the dense model is never whole. The
embedding and the head keep their type: a small share of the bytes, and the source of most of the error.
"""

from collections.abc import Callable
from importlib import import_module
from typing import cast

import torch
from torch import Tensor

from kernels import fp8
from worker.model.layers import Linear, LinearWeights, Placement, torch_linear

HEAD = "lm_head"
LEAST_CAPABILITY = (8, 9)  # the first devices with fp8 products
_MULTIPLE = 16  # of both sides of a weight: what the product asks for

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]  # see kernels.fp8.quantize_rows


class Fp8Linear:
    """See worker.model.layers.Linear."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # e4m3 [out_features, in_features]
        self.scale = scale  # fp32 [out_features]
        self.bias = bias  # [out_features]
        self.out_features, self.in_features = weight.shape
        self._quantize = _quantize_for(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in the dtype of x. A row's result is that of any batch only as far as rounding."""
        rows, scales = self._quantize(x)
        product = torch._scaled_mm(
            rows, self.weight.t(), scale_a=scales, scale_b=self.scale[None, :], out_dtype=x.dtype
        )
        return product if self.bias is None else product + self.bias


def fp8_linear(weights: LinearWeights, placement: Placement) -> Linear:
    """A factory for load_model: fp8 everywhere but in the head and in matrices of odd shapes."""
    sides = [weights.in_features, *(part.shape[0] for part in weights.parts)]
    if weights.name == HEAD or any(side % _MULTIPLE for side in sides):
        return torch_linear(weights, placement)
    parts = [_quantized(part.dequantized(placement.dtype, placement.device)) for part in weights.parts]
    weight = torch.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
    return Fp8Linear(weight, torch.cat([scale for _, scale in parts]), weights.bias(placement))


def _quantized(dense: Tensor) -> tuple[Tensor, Tensor]:
    weight, scale = fp8.quantize_rows(dense)
    return weight, scale.flatten()


def _quantize_for(device: torch.device) -> QuantizeRows:
    if device.type != "cuda":
        return fp8.quantize_rows
    return cast(QuantizeRows, import_module("kernels.fp8_rows").quantize_rows)
