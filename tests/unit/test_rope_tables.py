"""Cosines and sines of every rope variant against transformers, and the values that files may leave out."""

from typing import Any

import pytest
import torch
import transformers

from worker.model.hub_rope import read_rope
from worker.model.rope import RopeConfig, cos_sin_table, frequencies
from worker.model.values import Values

ORIGINAL = 64
HEAD_DIM = 16
POSITIONS = (0, 1, ORIGINAL - 1, ORIGINAL, 4 * ORIGINAL - 1)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": ORIGINAL, **LLAMA3},
        "max_position_embeddings": 4 * ORIGINAL,
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    },
    "yarn-without-original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn-attention-factor": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75, "beta_fast": 16}
    },
    "yarn-mscale": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5}
    },
    "yarn-not-truncated": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
}


def config(**changes: Any) -> dict[str, Any]:
    return {"max_position_embeddings": ORIGINAL, "rope_theta": 5e4, **changes}


def resolved(**changes: Any) -> RopeConfig:
    return read_rope(Values(config(**changes), "config.json"))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_equal_transformers(variant: str) -> None:
    """B099: cosines and sines at 0, 1, original - 1, original and 4 * original - 1."""
    # Takes seconds to import: here, or each process would as it collects tests.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            **config(**VARIANTS[variant]), hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM
        )
    )
    cos, sin = cos_sin_table(resolved(**VARIANTS[variant]), HEAD_DIM, 4 * ORIGINAL)
    for position in POSITIONS:
        # One at a time: the dynamic variant looks at the largest position it is given.
        their_cos, their_sin = theirs(torch.zeros(1), torch.tensor([[position]]))
        for ours, expected in ((cos, their_cos), (sin, their_sin)):
            wide = torch.cat([ours[position], ours[position]])
            torch.testing.assert_close(wide, expected[0, 0], rtol=1e-5, atol=2e-5)


def test_old_and_new_spellings_mean_the_same() -> None:
    """B099: `type`, `rope_type`, and theta inside `rope_parameters`."""
    old = resolved(rope_scaling={"type": "linear", "factor": 2.0})
    middle = resolved(rope_scaling={"rope_type": "linear", "factor": 2.0})
    new = read_rope(
        Values(
            {
                "max_position_embeddings": ORIGINAL,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
            },
            "config.json",
        )
    )[0]
    assert old == middle == new == RopeConfig("linear", 5e4, 2.0)


def test_an_absent_theta_is_ten_thousand() -> None:
    assert read_rope(Values({"max_position_embeddings": 8}, ""))[0] == RopeConfig(theta=10000.0)


def test_the_context_grows_by_the_factor_where_the_variant_says_so() -> None:
    contexts = {name: read_rope(Values(config(**changes), ""))[1] for name, changes in VARIANTS.items()}
    assert contexts.pop("default") == ORIGINAL
    assert set(contexts.values()) == {4 * ORIGINAL}


def test_dynamic_leaves_the_trained_context_alone() -> None:
    """B099: short inputs are as good as without scaling."""
    plain, _ = cos_sin_table(resolved(), HEAD_DIM, ORIGINAL)
    dynamic, _ = cos_sin_table(resolved(**VARIANTS["dynamic"]), HEAD_DIM, ORIGINAL)
    assert torch.equal(plain, dynamic)


def test_divisors_of_a_file_equal_the_llama3_formula() -> None:
    """B093: a GGUF file carries llama3's scaling as one divisor per pair."""
    rope = resolved(**VARIANTS["llama3"])
    plain, scaled = frequencies(RopeConfig(theta=5e4), HEAD_DIM), frequencies(rope, HEAD_DIM)
    assert not torch.equal(plain, scaled)
    from_file = RopeConfig("llama3", 5e4, frequency_divisors=tuple((plain / scaled).tolist()))
    torch.testing.assert_close(frequencies(from_file, HEAD_DIM), scaled)
