"""config.json → ModelConfig: what each family leaves out, and every refusal by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.resolve import resolve_model
from kvatlas.models.shapes import SHAPES
from kvatlas.models.vocabulary import Vocabulary, read_vocabulary
from worker.model.config import ModelConfig
from worker.model.hub_config import from_hub_config
from worker.model.source import read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def parse(vocabulary: Vocabulary | None = None, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    return from_hub_config(raw, vocabulary or Vocabulary(None, None, frozenset()), "config.json")


def test_values_that_a_file_leaves_out() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert not config.tied_head
    assert not any((config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias, config.has_qk_norm))


def test_families_differ_by_config_only() -> None:
    """B098: biases of Qwen2, head norms and the default head_dim of Qwen3, biases of Llama on request."""
    qwen2 = parse(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
    assert (qwen2.has_qkv_bias, qwen2.has_output_bias, qwen2.has_qk_norm) == (True, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert (qwen3.head_dim, qwen3.has_qk_norm, qwen3.has_qkv_bias) == (128, True, False)
    assert parse(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2, head_dim=None).head_dim == 16
    llama = parse(attention_bias=True, mlp_bias=True)
    assert llama.has_qkv_bias
    assert llama.has_output_bias
    assert llama.has_mlp_bias


def test_mistral_s_window_limits_the_context_and_is_never_ignored() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert parse(**mistral, sliding_window=100).usable_context == 100
    assert parse(**mistral, sliding_window=None).usable_context == 256
    assert parse(**mistral, max_position_embeddings=9000).usable_context == 4096  # the family's default


def test_qwen_s_window_counts_only_when_switched_on() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 32}
    assert parse(**qwen).usable_context == 256
    assert parse(**qwen, use_sliding_window=True, max_window_layers=1).usable_context == 32
    assert parse(**qwen, use_sliding_window=True, max_window_layers=2).usable_context == 256
    kinds = ["full_attention", "sliding_attention"]
    assert parse(**qwen, use_sliding_window=True, layer_types=kinds).usable_context == 32
    for family in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        unsaid = qwen | {"architectures": [family], "sliding_window": "absent"}
        switched = parse(**unsaid, use_sliding_window=True, max_window_layers=1, max_position_embeddings=9000)
        assert switched.usable_context == 4096  # the family's default


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ModelErrorReason.UNSUPPORTED_ARCHITECTURE,
            "GPT2LMHeadModel",
        ),
        ({"architectures": "absent"}, ModelErrorReason.UNSUPPORTED_ARCHITECTURE, "None"),
        ({"hidden_act": "gelu"}, ModelErrorReason.UNSUPPORTED_FEATURE, "gelu"),
        ({"layer_types": ["linear_attention"]}, ModelErrorReason.UNSUPPORTED_FEATURE, "linear_attention"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            ModelErrorReason.UNSUPPORTED_QUANTISATION,
            "awq",
        ),
        ({"rope_scaling": {"type": "su"}}, ModelErrorReason.UNSUPPORTED_ROPE, "'su'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, ModelErrorReason.UNSUPPORTED_ROPE, "'longrope'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "new": 1}},
            ModelErrorReason.UNSUPPORTED_ROPE,
            "new",
        ),
        ({"partial_rotary_factor": 0.5}, ModelErrorReason.UNSUPPORTED_ROPE, "0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ModelErrorReason.UNSUPPORTED_ROPE, "0.25"),
        ({"rope_scaling": {"type": "linear"}}, ModelErrorReason.INVALID_CONFIG, "factor is missing"),
        ({"rope_scaling": "linear"}, ModelErrorReason.INVALID_CONFIG, "rope_scaling"),
        ({"hidden_size": "absent"}, ModelErrorReason.INVALID_CONFIG, "hidden_size is missing"),
        ({"num_hidden_layers": 2.5}, ModelErrorReason.INVALID_CONFIG, "2.5"),
        ({"vocab_size": -3}, ModelErrorReason.INVALID_CONFIG, "-3"),
        (
            {"max_position_embeddings": 10**400},
            ModelErrorReason.INVALID_CONFIG,
            "max_position_embeddings is 1000",
        ),
        ({"rms_norm_eps": float("nan")}, ModelErrorReason.INVALID_CONFIG, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, ModelErrorReason.INVALID_CONFIG, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, ModelErrorReason.INVALID_CONFIG, "multiple of 3 KV heads"),
        ({"head_dim": 15}, ModelErrorReason.INVALID_CONFIG, "15 is odd"),
        ({"num_attention_heads": 65}, ModelErrorReason.INVALID_CONFIG, "65 heads are more than hidden_size"),
        ({"num_hidden_layers": 10**9}, ModelErrorReason.INVALID_CONFIG, "1000000000 layers are more than"),
        ({"rope_theta": 10**400}, ModelErrorReason.INVALID_CONFIG, "rope_theta is 1000"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}},
            ModelErrorReason.INVALID_CONFIG,
            "beta of rope",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    changes: dict[str, Any], reason: ModelErrorReason, words: str
) -> None:
    """B099: unknown architecture, rope or quantisation, and values that cannot be."""
    with pytest.raises(ModelError, match=words) as caught:
        parse(**changes)
    assert caught.value.reason is reason
    assert "config.json" in str(caught.value)


def test_padding_rows_of_the_embedding_are_not_in_the_vocabulary() -> None:
    """B054: ids past the tokenizer's are never sampled, because logits end before them."""
    config = parse(Vocabulary(90, 1, frozenset({2})))
    assert (config.vocab_size, config.embedding_rows) == (90, 100)
    assert parse(Vocabulary(120, 1, frozenset({2}))).vocab_size == 100


@pytest.mark.parametrize("shape", SHAPES)
def test_every_named_shape_is_a_model(shape: str) -> None:
    config = read_config(resolve_model(f"random:{shape}"))
    assert config.num_heads % config.num_kv_heads == 0
    assert config.eos_token_ids == {257}


def test_eos_is_the_union_of_what_all_files_say(tmp_path: Path) -> None:
    """B076, H11: generation_config has a list, config another id, the tokenizer a name."""
    files = {
        "config.json": {**LLAMA, "eos_token_id": 5},
        "generation_config.json": {"eos_token_id": [7, 9], "bos_token_id": 3},
        "tokenizer_config.json": {"eos_token": {"content": "<end>"}, "bos_token": "<s>"},
        "tokenizer.json": {
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
            "added_tokens": [{"id": 11, "content": "<end>"}, {"id": 4, "content": "<s>"}],
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    vocabulary = read_vocabulary(resolve_model(str(tmp_path)))
    assert vocabulary == Vocabulary(num_ids=12, bos_id=4, eos_ids=frozenset({5, 7, 9, 11}))


def test_files_that_say_nothing_leave_it_open(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_vocabulary(resolve_model(str(tmp_path))) == Vocabulary(None, None, frozenset())


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "two"}'])
def test_a_broken_json_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        read_config(resolve_model(str(tmp_path)))
