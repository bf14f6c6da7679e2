"""Safetensors → weight sources: one file or several shards, opened once and read tensor by tensor.

Knows the index file and nothing of networks.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvatlas.models.errors import ModelError, ModelErrorReason
from worker.model.weights import Checkpoint, Shape, WeightSource

_INDEX = "model.safetensors.index.json"
_DENSE = frozenset({"F64", "F32", "F16", "BF16"})


class SafetensorSource:
    """One tensor of a safetensors file."""

    def __init__(self, handle: Any, path: Path, name: str) -> None:
        header = handle.get_slice(name)
        self._handle = handle
        self._path = path
        self._name = name
        self._shape = tuple(header.get_shape())
        self._quantization = str(header.get_dtype())

    @property
    def name(self) -> str:
        """As the file spells it."""
        return self._name

    @property
    def shape(self) -> Shape:
        """Outermost first."""
        return self._shape

    @property
    def quantization(self) -> str:
        """The element type."""
        return self._quantization

    def raw(self) -> npt.NDArray[np.uint8]:
        """The elements' bytes by row."""
        rows = self._read().reshape(self._shape[0] if len(self._shape) > 1 else 1, -1)
        return rows.view(torch.uint8).numpy()

    def dequantized(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The dense tensor."""
        if self._quantization not in _DENSE:
            raise ModelError(
                ModelErrorReason.UNSUPPORTED_QUANTISATION,
                f"tensor {self._name!r} of {self._path} is stored as {self._quantization}",
            )
        return self._read().to(device=device, dtype=dtype, copy=True)

    def _read(self) -> Tensor:
        try:
            tensor: Tensor = self._handle.get_tensor(self._name)
        except SafetensorError as error:
            raise ModelError(
                ModelErrorReason.FILE_CORRUPT, f"{self._path}: tensor {self._name!r} is unreadable ({error})"
            ) from error
        return tensor


def read_checkpoint(folder: Path) -> Checkpoint:
    """All tensors of the folder's safetensors files; names are canonical already."""
    sources: dict[str, WeightSource] = {}
    for path in _shards(folder):
        handle = _open(path)
        for name in handle.keys():  # noqa: SIM118  (a handle, not a dict)
            sources[name] = SafetensorSource(handle, path, name)
    return Checkpoint(sources)


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            shards = [folder / name for name in names]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{index} is no index ({error!r})") from error
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{index} names {name!r}, outside its folder")
        return shards
    single = folder / "model.safetensors"
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(ModelErrorReason.FILE_MISSING, f"{folder} has no *.safetensors file")
    return found


def _open(path: Path) -> Any:
    if not path.exists():
        raise ModelError(ModelErrorReason.FILE_MISSING, f"no such file: {path}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelError(
            ModelErrorReason.FILE_TRUNCATED, f"{path} is truncated or no safetensors file ({error})"
        ) from error
