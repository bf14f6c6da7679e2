"""GGUF metadata → ModelConfig. Every key of the architecture is understood or refused by name."""

import math

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.gguf import GgufFile
from kvatlas.models.vocabulary import gguf_vocabulary
from worker.model.config import ModelConfig
from worker.model.gguf import rope_divisors
from worker.model.rope import RopeConfig, yarn_attention_factor

# "llama" stands for Llama, Mistral and SmolLM2 alike.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_KNOWN_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    }
)


def from_gguf(file: GgufFile) -> ModelConfig:
    """Resolves the metadata; biases, norms and a separate head are seen from the tensors."""
    keys = _Keys(file)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    _refuse_unsupported(keys, head_dim)
    rope, max_context = _rope(keys, head_dim)
    rows, vocabulary = _embedding_rows(file), gguf_vocabulary(file)
    config = ModelConfig(
        architecture=_ARCHITECTURES[keys.architecture],
        hidden_size=hidden,
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=keys.integer("feed_forward_length"),
        vocab_size=min(rows, vocabulary.num_ids or rows),
        embedding_rows=rows,
        max_context=max_context,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied_head="output.weight" not in file.tensors,
        has_qkv_bias="blk.0.attn_q.bias" in file.tensors,
        has_output_bias="blk.0.attn_output.bias" in file.tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=keys.integer("attention.sliding_window", 0) or None,
        bos_token_id=vocabulary.bos_id,
        eos_token_ids=vocabulary.eos_ids,
    )
    config.check(str(file.path))
    return config


class _Keys:
    """Metadata under the architecture's own prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.text("general.architecture") or "(none)"
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(
                ModelErrorReason.UNSUPPORTED_ARCHITECTURE,
                f"{file.path}: architecture {self.architecture!r} is not supported; "
                f"known are {', '.join(_ARCHITECTURES)}",
            )

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; must be there where no default is given."""
        value = self.file.integer(f"{self.architecture}.{key}")
        value = default if value is None else value
        if value is None:
            raise self._missing(key)
        if value < 1 and value != default:
            raise self.error(ModelErrorReason.INVALID_CONFIG, f"{self.architecture}.{key} is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; must be there where no default is given."""
        value = self.file.number(f"{self.architecture}.{key}")
        value = default if value is None else value
        if value is None:
            raise self._missing(key)
        if not math.isfinite(value):
            raise self.error(ModelErrorReason.INVALID_CONFIG, f"{self.architecture}.{key} is {value}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        return self.file.text(f"{self.architecture}.{key}") or default

    def names(self) -> list[str]:
        """All keys under the prefix."""
        prefix = f"{self.architecture}."
        return [key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)]

    def error(self, reason: ModelErrorReason, what: str) -> ModelError:
        """An error that names the file."""
        return ModelError(reason, f"{self.file.path}: {what}")

    def _missing(self, key: str) -> ModelError:
        return self.error(ModelErrorReason.INVALID_CONFIG, f"metadata {self.architecture}.{key} is missing")


def _refuse_unsupported(keys: _Keys, head_dim: int) -> None:
    """What would change results and is not built."""
    for key in keys.names():
        if key not in _KNOWN_KEYS:
            raise keys.error(
                ModelErrorReason.UNSUPPORTED_FEATURE,
                f"metadata {keys.architecture}.{key} is not understood",
            )
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error(ModelErrorReason.UNSUPPORTED_FEATURE, "K and V heads of different width")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.error(
            ModelErrorReason.UNSUPPORTED_ROPE,
            f"rope.dimension_count {keys.integer('rope.dimension_count')} differs from head_dim {head_dim}",
        )


def _embedding_rows(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(
            ModelErrorReason.TENSOR_MISSING, f"{file.path}: tensor 'token_embd.weight' is missing"
        )
    return table.shape[0]


def _rope(keys: _Keys, head_dim: int) -> tuple[RopeConfig, int]:
    """The resolved variant, and how many positions the model is made for."""
    context, theta = keys.integer("context_length"), keys.number("rope.freq_base", 10000.0)
    divisors = rope_divisors(keys.file)
    if divisors:
        if len(divisors) != head_dim // 2:
            raise keys.error(
                ModelErrorReason.TENSOR_SHAPE,
                f"rope_freqs.weight has {len(divisors)} of {head_dim // 2} values",
            )
        return RopeConfig("llama3", theta, frequency_divisors=divisors), context
    old_factor = keys.number("rope.scale_linear", 1.0)
    variant = keys.text("rope.scaling.type", "linear" if old_factor != 1.0 else "none")
    factor = keys.number("rope.scaling.factor", old_factor)
    match variant:
        case "none":
            return RopeConfig("default", theta), context
        case "linear":
            return RopeConfig("linear", theta, factor), context
        case "yarn":
            return _yarn(keys, theta, factor, context), context
    raise keys.error(ModelErrorReason.UNSUPPORTED_ROPE, f"rope scaling {variant!r} is not supported")


def _yarn(keys: _Keys, theta: float, factor: float, context: int) -> RopeConfig:
    extra = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
    return RopeConfig(
        "yarn",
        theta,
        factor,
        keys.integer("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(factor) * extra,
    )
