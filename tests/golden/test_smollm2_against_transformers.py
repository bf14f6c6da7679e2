"""The embedded model against transformers' own reading of the same GGUF file, in fp32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kernels.reference import attention
from kvatlas.models.resolve import resolve_model
from worker.model.layers import TorchEmbedding, TorchLinear
from worker.model.llama import Model
from worker.model.source import load_model, open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPT = [1, 4093, 198, 2683, 418, 1133, 506, 2, 198, 1, 520, 9531, 198, 28, 260, 3575, 284, 253, 1165, 30]


@pytest.fixture(scope="module")
def theirs(model_path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    )


@pytest.fixture(scope="module")
def ours(model_path: Path) -> Model:
    return load_model(resolve_model(str(model_path)))


def test_every_tensor_equals_theirs(model_path: Path, theirs: Any) -> None:
    """B091: q and k rows in the right order, everything else untouched."""
    _, checkpoint = open_checkpoint(resolve_model(str(model_path)), seed=0)
    expected = theirs.state_dict()
    names = [name for name in expected if name != "lm_head.weight"]
    assert len(names) == 272
    for name in names:
        mine = checkpoint[name].dequantized(torch.float32, torch.device("cpu"))
        torch.testing.assert_close(mine, expected[name], rtol=0, atol=0, msg=name)


def test_stored_bytes_mean_the_same_as_dense_tensors(model_path: Path) -> None:
    """A packed backend that reads raw() sees the rows that dequantized() returns, reordered ones too."""
    _, checkpoint = open_checkpoint(resolve_model(str(model_path)), seed=0)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        source = checkpoint[f"model.layers.7.{name}.weight"]
        assert source.quantization == "Q4_1"
        dense = source.dequantized(torch.float32, torch.device("cpu"))
        torch.testing.assert_close(decode_q4_1(source.raw()), dense, rtol=1e-6, atol=1e-6)


def test_logits_equal_theirs(ours: Model, theirs: Any) -> None:
    """B096, B098: whole-model logits within 1e-4 of the largest, and the same next token everywhere."""
    input_ids, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, positions, scale=ours.config.attention_scale)

    with torch.inference_mode():
        mine = ours.logits(ours.forward(input_ids, positions, attend))
        expected = theirs(input_ids[None]).logits[0]
    assert (mine - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(mine.argmax(-1), expected.argmax(-1))


def test_the_tied_head_shares_the_embedding_s_memory(ours: Model) -> None:
    """B096: SmolLM2 has no output.weight; its head is the embedding, not a copy of it."""
    assert isinstance(ours.embedding, TorchEmbedding)
    assert isinstance(ours.head, TorchLinear)
    assert ours.head.weight.data_ptr() == ours.embedding.weight.data_ptr()
    assert ours.num_parameters == 134_515_008


def decode_q4_1(rows: np.ndarray) -> Tensor:
    """Q4_1 as the format says: per 32 elements scale, minimum (fp16) and 16 bytes of two nibbles."""
    blocks = rows.reshape(-1, 20)
    scale, minimum = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return torch.from_numpy((nibbles * scale[:, None] + minimum[:, None]).reshape(len(rows), -1))
