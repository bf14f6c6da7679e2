"""Seeded random weights of any shape: tests, demos and benchmarks without a download.

Each tensor depends on its name and the seed alone. Owns the scales.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.model.weights import Checkpoint, Shape, WeightSource


class RandomSource:
    """A tensor that is made when it is asked for."""

    quantization = "F32"

    def __init__(self, name: str, shape: Shape, seed: int) -> None:
        self.name = name
        self.shape = shape
        self._seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")

    def dequantized(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Ones for norms; otherwise normal, so that activations keep unit variance."""
        if self.name.endswith("norm.weight"):
            return torch.ones(self.shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(self._seed)
        scale = self.shape[-1] ** -0.5 if len(self.shape) > 1 else 0.1
        return torch.randn(self.shape, generator=generator, device=device).mul_(scale).to(dtype)

    def raw(self) -> npt.NDArray[np.uint8]:
        """The fp32 bytes."""
        dense = self.dequantized(torch.float32, torch.device("cpu"))
        return dense.reshape(self.shape[0] if len(self.shape) > 1 else 1, -1).view(torch.uint8).numpy()


def random_checkpoint(shapes: Mapping[str, Shape], seed: int) -> Checkpoint:
    """A checkpoint with exactly these tensors."""
    sources: dict[str, WeightSource] = {
        name: RandomSource(name, shape, seed) for name, shape in shapes.items()
    }
    return Checkpoint(sources)
