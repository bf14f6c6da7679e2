"""The context at which a prompt's token costs twice what it costs at the beginning."""

from kvatlas.models.resolve import resolve_model
from worker.model.parameters import ATTENTION_SPEED, doubling_context
from worker.model.source import read_config


def test_it_follows_from_the_weights_of_a_layer_and_the_query_heads() -> None:
    """Qwen3-0.6B: 15.7 million weights a layer, 2,048 query elements."""
    config = read_config(resolve_model("random:qwen3-0.6b"))
    weights = 1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert doubling_context(config) == int(ATTENTION_SPEED * 2 * weights / (4 * 2048))
    assert 2000 < doubling_context(config) < 2500


def test_a_larger_model_feels_its_context_later() -> None:
    small, large = (read_config(resolve_model(f"random:{name}")) for name in ("qwen3-0.6b", "llama-3.1-8b"))
    assert doubling_context(large) > 5 * doubling_context(small)
