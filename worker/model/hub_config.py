"""config.json → ModelConfig. Refuses by name what it does not know; ignores nothing that changes results.

Owns the defaults of each family, which are those of the family's own code where a file leaves a value out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.vocabulary import Vocabulary
from worker.model.config import ModelConfig
from worker.model.hub_rope import read_rope
from worker.model.values import Values


@dataclass(frozen=True, slots=True)
class _Family:
    """What distinguishes a family where its config does not say it."""

    qkv_bias: bool | None = None  # None: the config's attention_bias decides, for the output product too
    mlp_bias: bool = False  # whether mlp_bias in the config is heard
    qk_norm: bool = False
    head_dim: int | None = None  # when absent; None: hidden_size / num_heads
    num_kv_heads: int | None = None  # when absent; None: num_heads
    sliding_window: int | None = None  # when absent
    windows_by_switch: bool = False  # only with use_sliding_window


_FAMILIES = {
    "LlamaForCausalLM": _Family(mlp_bias=True),
    "MistralForCausalLM": _Family(qkv_bias=False, num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, num_kv_heads=32, sliding_window=4096, windows_by_switch=True),
    "Qwen3ForCausalLM": _Family(
        qk_norm=True, head_dim=128, num_kv_heads=32, sliding_window=4096, windows_by_switch=True
    ),
}


def from_hub_config(raw: Mapping[str, object], vocabulary: Vocabulary, where: str) -> ModelConfig:
    """Resolves a config.json. `where` names the file in errors."""
    values = Values(raw, where)
    architecture, family = _family(values)
    _refuse_unsupported(values)
    hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    layers, rows = values.integer("num_hidden_layers"), values.integer("vocab_size")
    kv_heads = values.optional_integer("num_key_value_heads", family.num_kv_heads) or heads
    head_dim = values.optional_integer("head_dim", family.head_dim) or hidden // heads
    rope, max_context = read_rope(values)
    attention_bias = values.flag("attention_bias", False) if family.qkv_bias is None else False
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=values.integer("intermediate_size"),
        vocab_size=min(rows, vocabulary.num_ids or rows),
        embedding_rows=rows,
        max_context=max_context,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied_head=values.flag("tie_word_embeddings", False),
        has_qkv_bias=attention_bias or bool(family.qkv_bias),
        has_output_bias=attention_bias,
        has_mlp_bias=family.mlp_bias and values.flag("mlp_bias", False),
        has_qk_norm=family.qk_norm,
        sliding_window=_sliding_window(values, family, layers),
        bos_token_id=vocabulary.bos_id,
        eos_token_ids=vocabulary.eos_ids,
    )
    config.check(where)
    return config


def _family(values: Values) -> tuple[str, _Family]:
    named = values.raw.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    for name in names:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    raise ModelError(
        ModelErrorReason.UNSUPPORTED_ARCHITECTURE,
        f"{values.where}: architecture {names or named!r} is not supported; known are {', '.join(_FAMILIES)}",
    )


def _refuse_unsupported(values: Values) -> None:
    """What would change results and is not built."""
    if "quantization_config" in values:
        method = values.raw["quantization_config"]
        kind = method.get("quant_method") if isinstance(method, Mapping) else method
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_QUANTISATION,
            f"{values.where}: quantisation {kind!r} is not supported",
        )
    if values.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_ROPE,
            f"{values.where}: partial_rotary_factor {values.raw['partial_rotary_factor']} is not supported",
        )
    activation = values.raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_FEATURE,
            f"{values.where}: hidden_act {activation!r} is not supported",
        )


def _sliding_window(values: Values, family: _Family, num_layers: int) -> int | None:
    """The window in tokens where any layer has one."""
    window = values.optional_integer("sliding_window", family.sliding_window)
    kinds = values.raw.get("layer_types")
    if isinstance(kinds, list):
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(
                ModelErrorReason.UNSUPPORTED_FEATURE,
                f"{values.where}: layer type {unknown[0]!r} is not supported",
            )
    if not family.windows_by_switch:
        return window
    if not values.flag("use_sliding_window", False):
        return None
    if isinstance(kinds, list):
        return window if "sliding_attention" in kinds else None
    first = values.number("max_window_layers", 28)
    return window if first < num_layers else None
