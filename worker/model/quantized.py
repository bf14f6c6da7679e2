"""Linear layers of fp8 weights: e4m3 with a scale for each output, activations scaled row by row.

Weights are made fp8 while they are loaded, part by part, so that the dense model is never whole. The
embedding and the head keep their type: a small share of the bytes of a large model, and an error of the head
is an error of the choice itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from kernels import fp8
from worker.model.layers import Linear, LinearWeights, Placement, torch_linear

HEAD = "lm_head"
LEAST_CAPABILITY = (8, 9)  # the first devices with fp8 products
_MULTIPLE = 16  # of both sides of a weight: what the product asks for

FEW_ROWS = 64
"""Rows up to which our product is faster than the library's (docs/kernels/fp8.md)."""


class Fp8Linear:
    """See worker.model.layers.Linear."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # e4m3 [out_features, in_features]
        self.scale = scale  # fp32 [out_features]
        self.bias = bias  # [out_features]
        self.out_features, self.in_features = weight.shape
        self._kernels = _kernels() if weight.device.type == "cuda" else None

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in the dtype of x."""
        quantize_rows = fp8.quantize_rows if self._kernels is None else self._kernels.quantize_rows
        return self.of_rows(*quantize_rows(x), x.dtype)

    def of_rows(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The product of rows that are e4m3: of a few by our kernel, of more by the library.

        rows e4m3 [num_tokens, in_features], scales fp32 [num_tokens, 1] → [num_tokens, out_features].
        """
        if self._kernels is None or rows.shape[0] > FEW_ROWS:
            return self._of_many(rows, scales, dtype)
        product = self._kernels.fp8_matmul
        return product(rows, scales, self.weight, self.scale, out_dtype=dtype, bias=self.bias)

    def _of_many(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        product = torch._scaled_mm(
            rows, self.weight.t(), scale_a=scales, scale_b=self.scale[None, :], out_dtype=dtype
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


@dataclass(frozen=True, slots=True)
class _Kernels:
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]]  # see kernels.fp8_rows
    fp8_matmul: Callable[..., Tensor]  # see kernels.fp8_matmul


def _kernels() -> _Kernels:
    """Triton's, imported only where they run."""
    return _Kernels(
        import_module("kernels.fp8_rows").quantize_rows, import_module("kernels.fp8_matmul").fp8_matmul
    )
