"""Toy models: seeded, whole networks; what a backend may replace."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import reference
from worker.model.layers import Linear, LinearWeights, Operations, Placement, TorchLinear, torch_linear
from worker.model.llama import Model
from worker.model.source import load_model
from worker.model.toy import toy_config, toy_files, toy_model


def logits(model: Model, ids: Sequence[int]) -> Tensor:
    positions = torch.arange(len(ids))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, positions, scale=model.config.attention_scale)

    return model.logits(model.forward(torch.tensor(ids), positions, attend))


def test_the_same_seed_gives_the_same_model() -> None:
    assert torch.equal(logits(toy_model(seed=1), [5, 6, 7]), logits(toy_model(seed=1), [5, 6, 7]))
    assert not torch.equal(logits(toy_model(seed=1), [5, 6, 7]), logits(toy_model(seed=2), [5, 6, 7]))


def test_logits_are_fp32_whatever_the_model_computes_in() -> None:
    exact, rounded = toy_model(), toy_model(dtype=torch.bfloat16)
    wide, narrow = logits(exact, [1, 2, 3]), logits(rounded, [1, 2, 3])
    assert wide.dtype == narrow.dtype == torch.float32
    assert wide.shape == (3, exact.config.vocab_size)
    assert 0 < (wide - narrow).abs().max() < 0.1 * wide.abs().max()


def test_padding_rows_are_not_scored() -> None:
    """B054."""
    config = toy_config(embedding_rows=512, vocab_size=300)
    assert logits(toy_model(config), [1, 2]).shape == (2, 300)


def test_every_product_goes_through_the_factory() -> None:
    """A packed backend sees names, stacked parts and stored bytes of all products, the head included."""
    seen: dict[str, LinearWeights] = {}

    def factory(weights: LinearWeights, placement: Placement) -> Linear:
        seen[weights.name] = weights
        return torch_linear(weights, placement)

    model = load_model(toy_files(), linear_factory=factory)
    config = model.config
    assert len(seen) == 4 * config.num_layers + 1
    qkv = seen["model.layers.0.self_attn.qkv"]
    assert qkv.out_features == (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    assert [part.raw().shape for part in qkv.parts] == [(96, 256), (32, 256), (32, 256)]
    assert seen["lm_head"].parts[0].name == "model.embed_tokens.weight"


def test_operations_can_be_replaced_one_by_one() -> None:
    calls: list[str] = []

    def counted(gate_up: Tensor) -> Tensor:
        calls.append("silu_mul")
        return reference.silu_mul(gate_up)

    model = load_model(toy_files(), operations=Operations(silu_mul=counted))
    assert torch.equal(logits(model, [1, 2]), logits(load_model(toy_files()), [1, 2]))
    assert len(calls) == model.config.num_layers


def test_a_stacked_product_equals_its_parts() -> None:
    model = toy_model(toy_config(has_qkv_bias=True))
    stacked = model.layers[0].qkv
    assert isinstance(stacked, TorchLinear)
    assert stacked.bias is not None
    assert stacked.weight.shape == (160, 64)
    assert stacked.bias.shape == (160,)
