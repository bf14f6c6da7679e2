"""Which tensors a config asks for, and their shapes: what loaders, random weights and checks agree on.

Names are those of the published checkpoints of the family.
"""

from math import prod

from worker.model.config import ModelConfig
from worker.model.weights import Shape

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """All parameters by name, in the order of the network. A tied head is the embedding: not listed."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.embedding_rows, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes[NORM] = (config.hidden_size,)
    if not config.tied_head:
        shapes[HEAD] = (config.embedding_rows, config.hidden_size)
    return shapes


ATTENTION_SPEED = 0.6
"""Operations a second of prefill attention, as a share of the products'; see
docs/kernels/prompt-attention.md."""


def doubling_context(config: ModelConfig) -> int:
    """Context at which a prompt's token costs twice what it costs at the beginning of the prompt.

    A token's products take two operations per weight of the layers, its attention four per query element
    and token of context.
    """
    layer = layer_weights(config)
    attention = 2 * config.num_heads * config.head_dim
    return max(1, int(ATTENTION_SPEED * layer / attention))


def layer_weights(config: ModelConfig) -> int:
    """Numbers in one layer."""
    return sum(prod(shape) for shape in _layer_shapes(config).values())


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes |= _linear(f"self_attn.{name}_proj", rows, hidden, config.has_qkv_bias)
    if config.has_qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes |= _linear("self_attn.o_proj", hidden, q_rows, config.has_output_bias)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name in ("gate", "up"):
        shapes |= _linear(f"mlp.{name}_proj", inner, hidden, config.has_mlp_bias)
    return shapes | _linear("mlp.down_proj", hidden, inner, config.has_mlp_bias)


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if has_bias else {})
