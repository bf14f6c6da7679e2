"""GGUF files of tiny models: row order by architecture, rope tensors, heads, vocabularies, refusals."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.resolve import resolve_model
from worker.model.gguf import canonical_name, ggml_name
from worker.model.layers import TorchLinear
from worker.model.llama import Model
from worker.model.parameters import HEAD, parameter_shapes
from worker.model.rope import RopeConfig, frequencies
from worker.model.source import load_model, open_checkpoint
from worker.model.toy import toy_config

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, ROWS = 4, 2, 8, 32, 24
SMALL = toy_config(
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=64,
    embedding_rows=ROWS,
    has_qkv_bias=True,
)
SETTINGS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": 64,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def tensors() -> dict[str, np.ndarray]:
    """By canonical name, rows in the order of the published checkpoints."""
    rng = np.random.default_rng(5)
    shapes = parameter_shapes(SMALL)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def stored_order(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """As converters write q and k of the `llama` architecture: halves of a head interleaved."""
    halves = tensor.reshape(num_heads, 2, HEAD_DIM // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def write(
    path: Path,
    content: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    tokens: list[int] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    packed: gguf.GGMLQuantizationType | None = None,
    **changes: Any,
) -> None:
    """A file as a converter would write it. `tokens` are the token types."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**SETTINGS, **changes}.items():
        name = key if key.startswith("split.") else f"{architecture}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name, value)
    if tokens:
        writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(len(tokens))])
        writer.add_array("tokenizer.ggml.token_type", tokens)
        writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
    for name, tensor in content.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = stored_order(tensor, HEADS)
        if architecture == "llama" and ".k_proj." in name:
            tensor = stored_order(tensor, KV_HEADS)
        if packed is not None and tensor.ndim == 2:
            writer.add_tensor(ggml_name(name), gguf.quants.quantize(tensor, packed), raw_dtype=packed)
        else:
            writer.add_tensor(ggml_name(name), tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path: Path) -> Model:
    return load_model(resolve_model(str(path)))


def dense(path: Path, name: str) -> Tensor:
    _, checkpoint = open_checkpoint(resolve_model(str(path)), seed=0)
    return checkpoint[name].dequantized(torch.float32, torch.device("cpu"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_q_and_k_rows_come_back_in_order(path: Path, architecture: str) -> None:
    """B091: undone for `llama` and only there; biases too; nothing else is touched."""
    content = tensors()
    write(path, content, architecture=architecture)
    assert not np.array_equal(stored_order(content[QUERY], HEADS), content[QUERY])
    for name, expected in content.items():
        assert torch.equal(dense(path, name), torch.from_numpy(expected)), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "F16", "BF16"])
def test_quantized_rows_come_back_in_order(path: Path, kind: str) -> None:
    """B091: blocks lie within rows, so whole rows move."""
    content = tensors()
    packed = gguf.GGMLQuantizationType[kind]
    write(path, content, packed=packed)
    ours, theirs = dense(path, QUERY).flatten(), torch.from_numpy(content[QUERY]).flatten()
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98
    exact = gguf.quants.dequantize(gguf.quants.quantize(content[QUERY], packed), packed)
    assert torch.equal(dense(path, QUERY), torch.from_numpy(exact))


def test_raw_rows_have_the_order_of_dense_rows(path: Path) -> None:
    content = tensors()
    packed = gguf.GGMLQuantizationType.Q8_0
    write(path, content, packed=packed)
    _, checkpoint = open_checkpoint(resolve_model(str(path)), seed=0)
    source = checkpoint[QUERY]
    raw = source.raw()
    assert (source.quantization, source.shape, raw.shape) == ("Q8_0", (32, 32), (32, 34))
    assert np.array_equal(raw, gguf.quants.quantize(content[QUERY], packed))


def test_a_file_without_a_head_ties_it_and_one_with_a_head_does_not(path: Path) -> None:
    """B096."""
    content = tensors()
    write(path, content)
    assert load(path).config.tied_head
    write(path, content | {HEAD: np.ones((ROWS, HIDDEN), np.float32)})
    model = load(path)
    assert not model.config.tied_head
    assert isinstance(model.head, TorchLinear)
    assert torch.equal(model.head.weight, torch.ones(ROWS, HIDDEN))


def test_rope_divisors_of_the_file_are_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B093: the tensor is the llama3 scaling, not a surplus weight."""
    rope = RopeConfig("llama3", 5e5, 8.0, original_context=32, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, scaled = frequencies(RopeConfig(theta=5e5), HEAD_DIM), frequencies(rope, HEAD_DIM)
    write(path, tensors(), extra={"rope_freqs.weight": (plain / scaled).numpy()})
    model = load(path)
    torch.testing.assert_close(frequencies(model.config.rope, HEAD_DIM), scaled)
    assert not caplog.records


def test_rope_divisors_of_another_length_are_refused(path: Path) -> None:
    write(path, tensors(), extra={"rope_freqs.weight": np.ones(3, np.float32)})
    with pytest.raises(ModelError, match="rope_freqs") as caught:
        load(path)
    assert caught.value.reason is ModelErrorReason.TENSOR_SHAPE


def test_an_unknown_tensor_is_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B093."""
    write(path, tensors(), extra={"blk.0.mystery.weight": np.ones(3, np.float32)})
    load(path)
    assert "blk.0.mystery.weight" in caplog.text


def test_a_missing_tensor_is_named_as_the_file_would_spell_it(path: Path) -> None:
    content = tensors()
    del content["model.layers.1.mlp.gate_proj.weight"], content["model.layers.1.self_attn.k_proj.bias"]
    write(path, content)
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k\.bias, blk\.1\.ffn_gate\.weight") as caught:
        load(path)
    assert caught.value.reason is ModelErrorReason.TENSOR_MISSING


def test_a_quantisation_that_cannot_be_read_names_the_tensor(path: Path) -> None:
    content = tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    write(path, content | {name: content[name].astype(np.int8)})
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*I8") as caught:
        load(path)
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_QUANTISATION


def test_unused_tokens_at_the_end_are_never_sampled(path: Path) -> None:
    """B054: converters pad the vocabulary to the embedding's rows; logits end before the padding."""
    normal, unused = 1, 5
    write(path, tensors(), tokens=[3, normal, 3, 3, unused] + [normal] * 15 + [unused] * 4)
    model = load(path)
    assert (model.config.vocab_size, model.config.embedding_rows) == (20, ROWS)
    assert model.logits(torch.zeros(1, HIDDEN)).shape == (1, 20)
    assert model.config.eos_token_ids == {2, 3}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeConfig("default", 5e5)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeConfig("linear", 5e5, 4.0)),
        ({"rope.scale_linear": 2.0}, RopeConfig("linear", 5e5, 2.0)),
    ],
)
def test_rope_settings_are_read(path: Path, changes: dict[str, Any], rope: RopeConfig) -> None:
    write(path, tensors(), **changes)
    assert load(path).config.rope == rope


def test_yarn_settings_are_read(path: Path) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    write(path, tensors(), **yarn)
    rope = load(path).config.rope
    assert (rope.variant, rope.factor, rope.original_context) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(1.138629)  # 0.1 ln 4 + 1


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"rope.scaling.type": "longrope"}, ModelErrorReason.UNSUPPORTED_ROPE, "longrope"),
        ({"rope.dimension_count": 4}, ModelErrorReason.UNSUPPORTED_ROPE, "dimension_count 4"),
        ({"attention.value_length": 4}, ModelErrorReason.UNSUPPORTED_FEATURE, "different width"),
        ({"expert_count": 8}, ModelErrorReason.UNSUPPORTED_FEATURE, r"llama\.expert_count"),
        ({"attention.head_count": 0}, ModelErrorReason.INVALID_CONFIG, "head_count"),
        ({"rope.freq_base": float("nan")}, ModelErrorReason.INVALID_CONFIG, "freq_base is nan"),
        ({"attention.head_count_kv": 3}, ModelErrorReason.INVALID_CONFIG, "3 KV heads"),
        ({"split.count": 3}, ModelErrorReason.UNSUPPORTED_FORMAT, "split"),
        ({"feed_forward_length": 65}, ModelErrorReason.TENSOR_SHAPE, "ffn"),
        ({"block_count": 1 << 31}, ModelErrorReason.INVALID_CONFIG, "layers are more than"),
        ({"attention.key_length": 1 << 31}, ModelErrorReason.TENSOR_SHAPE, "attn_q"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    path: Path, changes: dict[str, Any], reason: ModelErrorReason, words: str
) -> None:
    """B099: an unknown rope among them; and values that cannot be."""
    write(path, tensors(), **changes)
    with pytest.raises(ModelError, match=words) as caught:
        load(path)
    assert caught.value.reason is reason
    assert str(path) in str(caught.value) or reason is ModelErrorReason.TENSOR_SHAPE


def test_another_architecture_is_refused_by_name(path: Path) -> None:
    write(path, {}, architecture="mamba")
    with pytest.raises(ModelError, match="'mamba'") as caught:
        load(path)
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_ARCHITECTURE


def test_a_missing_setting_is_named(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"llama\.embedding_length is missing") as caught:
        load(path)
    assert caught.value.reason is ModelErrorReason.INVALID_CONFIG


def test_a_window_limits_the_context(path: Path) -> None:
    write(path, tensors(), **{"attention.sliding_window": 50})
    assert len(load(path).rotary.cos) == 50


def test_names_translate_both_ways() -> None:
    for name in parameter_shapes(toy_config(has_qk_norm=True, has_mlp_bias=True, tied_head=False)):
        assert canonical_name(ggml_name(name)) == name


def test_the_model_outlives_its_file(path: Path) -> None:
    """Dense weights are copies: replacing or truncating the file cannot crash a running worker."""
    write(path, tensors())
    model = load(path)
    before = model.norm.clone()
    path.write_bytes(b"")
    assert torch.equal(model.norm, before)
