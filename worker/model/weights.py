"""Weights as they lie in a file, by the names a network asks for.

Owns the seam between containers and layers: a source is one tensor of a file, readable as a dense
tensor or as its stored bytes; a checkpoint is all of them. Knows no network and no file format.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvatlas.models.errors import ModelError, ModelErrorReason

Shape = tuple[int, ...]


class WeightSource(Protocol):
    """One tensor of a file. A matrix is [out_features, in_features]."""

    @property
    def name(self) -> str:
        """As the file spells it."""
        ...

    @property
    def shape(self) -> Shape:
        """Outermost first."""
        ...

    @property
    def quantization(self) -> str:
        """How elements are stored: "F32", "F16", "BF16", "Q4_1", "Q8_0", ..."""
        ...

    def dequantized(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The dense tensor; never a view of the file."""
        ...

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, row by row: [out_features, bytes per row], in the order `shape` means.

        May be a read-only view of the mapped file.
        """
        ...


class SharedSource:
    """A source whose dense tensor is made once and shared by everyone who asks: a tied head."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._dense: Tensor | None = None

    @property
    def name(self) -> str:
        """As the file spells it."""
        return self._source.name

    @property
    def shape(self) -> Shape:
        """Outermost first."""
        return self._source.shape

    @property
    def quantization(self) -> str:
        """How elements are stored."""
        return self._source.quantization

    def dequantized(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The one dense tensor; all askers place it alike."""
        if self._dense is None:
            self._dense = self._source.dequantized(dtype, device)
        assert (self._dense.dtype, self._dense.device.type) == (dtype, device.type), self.name
        return self._dense

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes by row."""
        return self._source.raw()


class Checkpoint:
    """The tensors of a model by canonical name."""

    def __init__(
        self, sources: Mapping[str, WeightSource], spelled: Callable[[str], str] = lambda name: name
    ) -> None:
        self._sources = dict(sources)
        self._spelled = spelled  # canonical name → the file's, for errors

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> WeightSource:
        return self._sources[name]

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raises, before anything is loaded, where tensors are missing or have another shape."""
        missing = [self._spelled(name) for name in shapes if name not in self._sources]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ModelError(ModelErrorReason.TENSOR_MISSING, f"tensors are missing: {shown}")
        for name, shape in shapes.items():
            source = self._sources[name]
            if source.shape != shape:
                raise ModelError(
                    ModelErrorReason.TENSOR_SHAPE,
                    f"tensor {source.name!r} has shape {list(source.shape)}, expected {list(shape)}",
                )

    def surplus(self, shapes: Mapping[str, Shape]) -> list[str]:
        """Tensors that nobody asks for, as the file spells them."""
        return [source.name for name, source in self._sources.items() if name not in shapes]
