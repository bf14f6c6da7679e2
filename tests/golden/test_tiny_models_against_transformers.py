"""Logits of tiny random checkpoints against transformers in fp32: families, GQA, rope, biases, heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kernels.reference import attention
from kvatlas.models.resolve import resolve_model
from worker.model.llama import Model
from worker.model.source import load_model

TRAINED = 24  # positions; small, so that prompts go past it
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "max_position_embeddings": TRAINED,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-3": (
        "Llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "llama-gqa-5-tied": (
        "Llama",
        {"num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama-all-biases": (
        "Llama",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral-gqa-7": (
        "Mistral",
        {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None},
    ),
    "qwen2-biases": ("Qwen2", {"num_attention_heads": 10, "num_key_value_heads": 2}),
    "qwen2-gqa-7-tied": (
        "Qwen2",
        {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3-explicit-head-dim": (
        "Qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3-attention-bias": (
        "Qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True},
    ),
    "rope-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "rope-llama3": (
        "Llama",
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "max_position_embeddings": 4 * TRAINED},
    ),
    "rope-yarn": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e6,
                "original_max_position_embeddings": TRAINED,
            },
        },
    ),
}
SMALLEST_BIAS = 0.05


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """B098, B099, B096: whole-model logits, prompts past the trained context included."""
    theirs = save_checkpoint(tmp_path, *CASES[case])
    ours = load_model(resolve_model(str(tmp_path)))
    num_tokens = min(3 * TRAINED, ours.config.usable_context)
    input_ids = torch.arange(num_tokens) * 31 % COMMON["vocab_size"]
    with torch.inference_mode():
        assert_close(run(ours, input_ids), theirs(input_ids[None]).logits[0])


def test_dynamic_rope_equals_transformers_fed_token_by_token(tmp_path: Path) -> None:
    """B099: past the trained context each token is turned as when it was the last one, in any batch."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    theirs = save_checkpoint(tmp_path, "Llama", {"rope_parameters": rope})
    ours = load_model(resolve_model(str(tmp_path)))
    input_ids = torch.arange(2 * TRAINED) * 31 % COMMON["vocab_size"]
    with torch.inference_mode():
        cache = transformers.DynamicCache()
        # By place: the argument's name differs between releases.
        steps = [theirs(token[None, None], None, None, cache).logits[0, -1] for token in input_ids]
        assert_close(run(ours, input_ids), torch.stack(steps))
        short = input_ids[: TRAINED // 2]  # short inputs are not touched by the scaling
        assert_close(run(ours, short), theirs(short[None]).logits[0])


def test_tokens_of_several_sequences_go_side_by_side(tmp_path: Path) -> None:
    """Positions, not places in the batch, decide the rotary turn."""
    save_checkpoint(tmp_path, *CASES["qwen3-explicit-head-dim"])
    model = load_model(resolve_model(str(tmp_path)))
    first, second = torch.arange(9) + 3, torch.arange(14) + 50
    with torch.inference_mode():
        alone = torch.cat([run(model, first), run(model, second)])
        together = run(model, first, second)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def save_checkpoint(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    """Makes a random checkpoint with non-trivial norms and biases, saves it, returns it in fp32."""
    heads = {"num_attention_heads": 5, "num_key_value_heads": 1}
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **heads, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.uniform_(SMALLEST_BIAS, 0.5)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def run(model: Model, *prompts: Tensor) -> Tensor:
    """Logits of prompts that go through the network in one call, each attending to itself alone."""
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    lengths = [len(prompt) for prompt in prompts]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spans = zip(*(tensor.split(lengths) for tensor in (q, k, v, positions)), strict=True)
        scale = model.config.attention_scale
        return torch.cat([attention(q, k, v, at, scale=scale) for q, k, v, at in spans])

    return model.logits(model.forward(torch.cat(prompts), positions, attend))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4 of the largest logit, everywhere."""
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0.1, "logits of a dead network prove nothing"
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
