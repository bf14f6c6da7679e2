"""Steps with prompts in pieces, through Triton's interpreter: the same results, padding that nobody sees."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import KvLayer
from worker.execution.prompt_graphs import PromptGraphs, token_sizes
from worker.model.fused import FusedModel, OwnRows
from worker.model.toy import toy_config, toy_model

CPU = torch.device("cpu")
CONFIG = toy_config(has_qk_norm=True)
MODEL = FusedModel(toy_model(CONFIG), own_rows=OwnRows(0, 0, 0))
TOKENS, SLOTS = 5, 12


def test_sizes_are_four_to_a_doubling_up_to_the_largest_step() -> None:
    assert token_sizes(200) == [64, 80, 96, 112, 128, 160, 192, 200]
    assert token_sizes(64) == [64]
    assert token_sizes(63) == []
    sizes = token_sizes(8192)
    assert len(sizes) == 29
    assert max(large / small for small, large in pairwise(sizes)) == 1.25


def layers() -> list[KvLayer]:
    shape = (SLOTS + 1, CONFIG.num_kv_heads, CONFIG.head_dim)
    return [KvLayer(torch.zeros(shape), torch.zeros(shape)) for _ in range(CONFIG.num_layers)]


def attention(slots: Tensor, positions: Tensor, kv: KvLayer, q: Tensor) -> Tensor:
    assert q.shape[0] == len(slots), "attention sees padding"
    scale = CONFIG.head_dim**-0.5
    return reference.attention(q, kv.k[slots], kv.v[slots], positions, scale=scale)


def test_a_step_in_pieces_is_the_step_in_one_and_padding_writes_the_dummy_page_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S1-30, M-25: twice over the same buffers, the second step shorter than the first."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    whole, pieced = layers(), layers()
    graphs = PromptGraphs(MODEL, pieced, max_tokens=8, dummy_slot=SLOTS, device=CPU, capture=False)
    for num_tokens in (TOKENS, TOKENS - 2):
        ids = torch.randint(0, CONFIG.vocab_size, (num_tokens,))
        positions = torch.arange(num_tokens, dtype=torch.int32)
        slots = torch.randperm(SLOTS)[:num_tokens].int()
        attend = partial(attention, slots.long(), positions)

        inputs = MODEL.embedding[ids]
        expected = MODEL.forward(inputs.clone(), positions, slots, whole, attend)
        found = graphs.run(inputs.clone(), positions, slots, attend)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for left, right in zip(whole, pieced, strict=True):
            torch.testing.assert_close(left.k[:SLOTS], right.k[:SLOTS], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(left.v[:SLOTS], right.v[:SLOTS], rtol=1e-5, atol=1e-5)
