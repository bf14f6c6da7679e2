"""Seeded tiny models for tests and demos: real networks with random weights, no download.

The text side of such a model is the byte vocabulary of kvatlas.models.vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch

from kvatlas.models.files import ModelFiles
from kvatlas.models.resolve import resolve_model
from worker.model.config import ModelConfig
from worker.model.layers import Placement
from worker.model.llama import Model
from worker.model.parameters import parameter_shapes
from worker.model.random_weights import random_checkpoint
from worker.model.source import build_model, read_config

TOY_MODEL = "random:tiny"


def toy_files() -> ModelFiles:
    """The smallest model there is, as every process resolves it."""
    return resolve_model(TOY_MODEL)


def toy_config(**changes: Any) -> ModelConfig:
    """Its config, with fields replaced: `toy_config(num_kv_heads=1, has_qk_norm=True)`."""
    return replace(read_config(toy_files()), **changes)


def toy_model(
    config: ModelConfig | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A model with seeded weights."""
    config = config or toy_config()
    checkpoint = random_checkpoint(parameter_shapes(config), seed)
    return build_model(config, checkpoint, placement=Placement(torch.device(device), dtype))
