"""ModelFiles → a loaded model: the one place that knows all containers and the network.

Owns the order of loading: config, completeness of the file, then layers one by one, so that a broken
file costs nothing and memory holds one layer's dense weights beside the model.
"""

import logging
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.shapes import SHAPES
from kvatlas.models.vocabulary import read_json, read_vocabulary
from worker.model import gguf, safetensors
from worker.model.config import ModelConfig
from worker.model.gguf_config import from_gguf
from worker.model.hub_config import from_hub_config
from worker.model.layers import (
    Embedding,
    EmbeddingFactory,
    Linear,
    LinearFactory,
    LinearWeights,
    Operations,
    Placement,
    RotaryTable,
    torch_embedding,
    torch_linear,
)
from worker.model.llama import DecoderLayer, Model
from worker.model.parameters import EMBEDDING, HEAD, NORM, parameter_shapes
from worker.model.random_weights import random_checkpoint
from worker.model.weights import Checkpoint, Shape, SharedSource

_LOG = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16)
# Buffers that old checkpoints carry along; they are computed from the config.
_HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".self_attn.bias")


def load_model(
    files: ModelFiles,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_context: int | None = None,
    linear_factory: LinearFactory = torch_linear,
    embedding_factory: EmbeddingFactory = torch_embedding,
    operations: Operations | None = None,
    seed: int = 0,
) -> Model:
    """Loads a model. `dtype` is that of activations and dense weights; `seed` is for random weights.

    `max_context` bounds the rotary table (default: all the model is made for). Raises ModelError.
    """
    config, checkpoint = open_checkpoint(files, seed)
    return build_model(
        config,
        checkpoint,
        placement=Placement(torch.device(device), dtype),
        max_context=max_context,
        linear_factory=linear_factory,
        embedding_factory=embedding_factory,
        operations=operations,
    )


def build_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    placement: Placement,
    max_context: int | None = None,
    linear_factory: LinearFactory = torch_linear,
    embedding_factory: EmbeddingFactory = torch_embedding,
    operations: Operations | None = None,
) -> Model:
    """Builds the network from a config and its tensors; all of them are checked before any is read."""
    _check_dtype(placement.dtype)
    shapes = parameter_shapes(config)
    checkpoint.check(shapes)
    _warn_of_surplus(checkpoint, config, shapes)
    positions = _context(config, max_context)
    loader = _Loader(config, checkpoint, placement, linear_factory)
    embedding, head = loader.embedding_and_head(embedding_factory)
    return Model(
        config,
        embedding=embedding,
        layers=[loader.layer(number) for number in range(config.num_layers)],
        norm=loader.vector(NORM),
        head=head,
        rotary=RotaryTable(config.rope, config.head_dim, positions, placement.device),
        operations=operations or Operations(),
        num_parameters=sum(prod(shape) for shape in shapes.values()),
    )


def read_config(files: ModelFiles) -> ModelConfig:
    """The config alone, in milliseconds: what a pool is sized by."""
    return open_checkpoint(files, 0)[0]


def open_checkpoint(files: ModelFiles, seed: int) -> tuple[ModelConfig, Checkpoint]:
    """Config and tensor directory; reads no weights."""
    match files.kind:
        case ModelKind.GGUF:
            file = gguf.open_gguf(files.location)
            config = from_gguf(file)
            return config, gguf.read_checkpoint(file, config)
        case ModelKind.FOLDER:
            return _hub_config(files), safetensors.read_checkpoint(files.location)
        case ModelKind.RANDOM:
            config = from_hub_config(SHAPES[files.shape or ""], read_vocabulary(files), files.name)
            return config, random_checkpoint(parameter_shapes(config), seed)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_DTYPE,
            f"{dtype} is not supported: activations of these families overflow it; use bfloat16 or float32",
        )


def _hub_config(files: ModelFiles) -> ModelConfig:
    path = files.location / "config.json"
    return from_hub_config(read_json(path), read_vocabulary(files), str(path))


def _context(config: ModelConfig, wanted: int | None) -> int:
    if config.usable_context < config.max_context:
        _LOG.warning(
            "event=context_limited reason=sliding_window max_context=%d window=%d",
            config.max_context,
            config.usable_context,
        )
    if wanted is not None and wanted > config.usable_context:
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_FEATURE,
            f"a context of {wanted} tokens is asked for, the model is right up to {config.usable_context}",
        )
    return wanted or config.usable_context


def _warn_of_surplus(checkpoint: Checkpoint, config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    surplus = [name for name in checkpoint.surplus(shapes) if not name.endswith(_HARMLESS_ENDINGS)]
    if config.tied_head and HEAD in checkpoint:
        # The config says tied, so the embedding is the head, whatever the other tensor holds (B096).
        surplus.remove(checkpoint[HEAD].name)
        _LOG.warning("event=head_ignored reason=tied_to_the_embedding name=%s", HEAD)
    if surplus:
        _LOG.warning("event=tensors_not_used count=%d first=%s", len(surplus), ",".join(surplus[:8]))


class _Loader:
    """Sources → layers, one at a time."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, placement: Placement, linear_factory: LinearFactory
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._placement = placement
        self._linear_factory = linear_factory

    def embedding_and_head(self, embedding_factory: EmbeddingFactory) -> tuple[Embedding, Linear]:
        """A tied head reads the embedding's own tensor."""
        table = SharedSource(self._checkpoint[EMBEDDING])
        head = table if self._config.tied_head else self._checkpoint[HEAD]
        embedding = embedding_factory(table, self._placement)
        return embedding, self._linear_factory(LinearWeights("lm_head", [head], []), self._placement)

    def layer(self, number: int) -> DecoderLayer:
        """The parameters of one layer."""
        prefix, config = f"model.layers.{number}", self._config
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        normed = config.has_qk_norm
        return DecoderLayer(
            attention_norm=self.vector(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear(f"{attention}.qkv", [f"{attention}.{name}_proj" for name in "qkv"]),
            q_norm=self.vector(f"{attention}.q_norm.weight") if normed else None,
            k_norm=self.vector(f"{attention}.k_norm.weight") if normed else None,
            output=self._linear(f"{attention}.output", [f"{attention}.o_proj"]),
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear(f"{mlp}.gate_up", [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=self._linear(f"{mlp}.down", [f"{mlp}.down_proj"]),
        )

    def vector(self, name: str) -> Tensor:
        """A norm's weight."""
        return self._checkpoint[name].dequantized(self._placement.dtype, self._placement.device)

    def _linear(self, name: str, parts: Sequence[str]) -> Linear:
        weights = [self._checkpoint[f"{part}.weight"] for part in parts]
        biases = [self._checkpoint[f"{part}.bias"] for part in parts if self._has_bias(part)]
        return self._linear_factory(LinearWeights(name, weights, biases), self._placement)

    def _has_bias(self, part: str) -> bool:
        if part.endswith(".o_proj"):
            return self._config.has_output_bias
        return self._config.has_mlp_bias if ".mlp." in part else self._config.has_qkv_bias
