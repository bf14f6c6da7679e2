"""Sizes of a runner over a toy model: the model says some of them, a test the others."""

from typing import Any

from worker.execution.torch_runner import RunnerConfig
from worker.model.config import ModelConfig


def sizes_for(shape: ModelConfig, **sizes: Any) -> RunnerConfig:
    """`sizes`: max_running, max_context, num_pages, page_size, and what else RunnerConfig has."""
    return RunnerConfig(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        attention_scale=shape.attention_scale,
        **sizes,
    )
