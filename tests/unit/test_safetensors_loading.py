"""Folders of safetensors: what is missing, surplus, truncated or of another shape, and whose head it is."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.resolve import resolve_model
from worker.model.layers import TorchEmbedding, TorchLinear
from worker.model.llama import Model
from worker.model.parameters import EMBEDDING, HEAD, parameter_shapes
from worker.model.source import load_model
from worker.model.toy import toy_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 20,
    "max_position_embeddings": 32,
}
DOWN = "model.layers.1.mlp.down_proj.weight"
SMALL = toy_config(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    embedding_rows=20,
)


def tensors() -> dict[str, Tensor]:
    """A complete checkpoint with a tied head: no lm_head."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(SMALL).items()}


def write(folder: Path, content: dict[str, Tensor], **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True, **changes}))
    save_file(content, folder / "model.safetensors")


def load(folder: Path, **options: Any) -> Model:
    return load_model(resolve_model(str(folder)), **options)


def head_and_embedding(model: Model) -> tuple[Tensor, Tensor]:
    assert isinstance(model.head, TorchLinear)
    assert isinstance(model.embedding, TorchEmbedding)
    return model.head.weight, model.embedding.weight


def test_a_whole_checkpoint_loads_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, tensors())
    model = load(tmp_path)
    assert model.num_parameters == sum(tensor.numel() for tensor in tensors().values())
    assert not caplog.records


def test_a_tied_head_without_a_tensor_is_the_embedding(tmp_path: Path) -> None:
    """B096."""
    write(tmp_path, tensors())
    head, embedding = head_and_embedding(load(tmp_path))
    assert head.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_with_a_tensor_is_still_the_embedding(
    tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """B096: the config decides; that the file's other tensor is ignored is said, not silent."""
    content = tensors()
    content[HEAD] = content[EMBEDDING].clone() if same else torch.zeros(20, 16)
    write(tmp_path, content)
    head, _ = head_and_embedding(load(tmp_path))
    assert torch.equal(head, content[EMBEDDING])
    assert HEAD in caplog.text


def test_an_untied_head_is_its_own_tensor(tmp_path: Path) -> None:
    """B096."""
    content = tensors() | {HEAD: torch.ones(20, 16)}
    write(tmp_path, content, tie_word_embeddings=False)
    head, embedding = head_and_embedding(load(tmp_path))
    assert torch.equal(head, content[HEAD])
    assert torch.equal(embedding, content[EMBEDDING])


@pytest.mark.parametrize("flag", [False, None])
def test_an_untied_head_that_is_missing_is_named(tmp_path: Path, flag: bool | None) -> None:
    """B096: an absent flag means untied, as in the families' own code."""
    write(tmp_path, tensors(), tie_word_embeddings=flag)
    with pytest.raises(ModelError, match=r"lm_head\.weight") as caught:
        load(tmp_path)
    assert caught.value.reason is ModelErrorReason.TENSOR_MISSING


def test_missing_tensors_are_all_named_at_once(tmp_path: Path) -> None:
    content = tensors()
    del content[DOWN], content["model.norm.weight"]
    write(tmp_path, content)
    with pytest.raises(ModelError, match=rf"{DOWN}, model\.norm\.weight") as caught:
        load(tmp_path)
    assert caught.value.reason is ModelErrorReason.TENSOR_MISSING


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    write(tmp_path, tensors() | {DOWN: torch.zeros(16, 25)})
    with pytest.raises(ModelError, match=rf"{DOWN}.*\[16, 25\], expected \[16, 24\]") as caught:
        load(tmp_path)
    assert caught.value.reason is ModelErrorReason.TENSOR_SHAPE


def test_surplus_tensors_are_named_and_old_buffers_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {
        "model.extra.weight": torch.zeros(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    write(tmp_path, tensors() | extra)
    load(tmp_path)
    assert "model.extra.weight" in caplog.text
    assert "inv_freq" not in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors") as caught:
            load(tmp_path)
        assert caught.value.reason is ModelErrorReason.FILE_TRUNCATED


def test_shards_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    content = tensors()
    names = sorted(content)
    write(tmp_path, content)
    (tmp_path / "model.safetensors").unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: content[name] for name in part}, tmp_path / shard)
    places = {name: shard for shard, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(head_and_embedding(load(tmp_path))[1], content[EMBEDDING])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors") as caught:
        load(tmp_path)
    assert caught.value.reason is ModelErrorReason.FILE_MISSING


def test_a_folder_without_weights_and_a_broken_index_are_named(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors") as caught:
        load(tmp_path)
    assert caught.value.reason is ModelErrorReason.FILE_MISSING
    for odd in (
        "[]",
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../b"}}',
        '{"weight_map": {"a": "/b"}}',
    ):
        (tmp_path / "model.safetensors.index.json").write_text(odd)
        with pytest.raises(ModelError, match="index") as caught:
            load(tmp_path)
        assert caught.value.reason is ModelErrorReason.FILE_CORRUPT


def test_integers_are_no_weights(tmp_path: Path) -> None:
    write(tmp_path, tensors() | {DOWN: torch.zeros(16, 24, dtype=torch.int8)})
    with pytest.raises(ModelError, match=f"{DOWN}.*I8") as caught:
        load(tmp_path)
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_QUANTISATION


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_every_stored_dtype_becomes_the_asked_one(tmp_path: Path, stored: torch.dtype) -> None:
    content = {name: tensor.to(stored) for name, tensor in tensors().items()}
    write(tmp_path, content)
    for dtype in (torch.float32, torch.bfloat16):
        _, embedding = head_and_embedding(load(tmp_path, dtype=dtype))
        assert torch.equal(embedding, content[EMBEDDING].to(dtype))


def test_float16_activations_are_refused(tmp_path: Path) -> None:
    """B090: residuals of these families pass 65504; id-0 text must not be the way to find out."""
    write(tmp_path, tensors())
    with pytest.raises(ModelError, match="bfloat16") as caught:
        load(tmp_path, dtype=torch.float16)
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_DTYPE


def test_a_context_past_the_model_s_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    assert load(tmp_path, max_context=5).max_context == 5
    assert load(tmp_path).max_context == 32
    with pytest.raises(ModelError, match="33 tokens"):
        load(tmp_path, max_context=33)


def test_raw_bytes_are_the_stored_elements(tmp_path: Path) -> None:
    """What a packed backend reads."""
    content = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    write(tmp_path, content)
    from worker.model.source import open_checkpoint

    _, checkpoint = open_checkpoint(resolve_model(str(tmp_path)), seed=0)
    source = checkpoint[DOWN]
    raw = source.raw()
    assert (source.quantization, raw.shape) == ("BF16", (16, 48))
    assert torch.equal(torch.from_numpy(raw).view(torch.bfloat16), content[DOWN])
