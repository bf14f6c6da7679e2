"""A linear layer over packed matrices. Knows formats, not files."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.library import CpuLibrary, Format


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Consecutive outputs of a layer that are stored alike."""

    form: Format
    packed: npt.NDArray[np.uint8]  # CpuLibrary.pack
    first: int  # output feature
    num_outputs: int


class PackedLinear:
    """y = x W^T + b in fp32; W is what the packed bytes mean, exactly."""

    def __init__(
        self, library: CpuLibrary, matrices: Sequence[PackedMatrix], in_features: int, bias: Tensor | None
    ) -> None:
        self.in_features = in_features
        self.out_features = sum(matrix.num_outputs for matrix in matrices)
        self.matrices = tuple(matrices)
        self.bias = None if bias is None else bias.contiguous()  # fp32 [out_features]
        self._library = library

    def __call__(self, x: Tensor) -> Tensor:
        """x fp32 [num_tokens, in_features] → [num_tokens, out_features]."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape[0], self.out_features)
        if len(self.matrices) == 1:
            only = self.matrices[0]
            self._library.product(only.form, only.packed, self.bias, x, y)
            return y
        for matrix in self.matrices:
            columns = slice(matrix.first, matrix.first + matrix.num_outputs)
            bias = None if self.bias is None else self.bias[columns]
            self._library.product(matrix.form, matrix.packed, bias, x, y[:, columns])
        return y
