"""Decode steps in groups of rows side by side: as right as in one piece, and always the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import ring_launch, sliced_launch
from kernels.sample_columns import SampleRow, make_columns, write_rows
from kernels.testing import assert_no_worse
from kernels.triton_backend import TritonBackend
from worker.execution.cuda_graphs import DecodeGraphs, DecodeTables
from worker.execution.kv_pool import KvPool
from worker.model.fused import FusedModel, OwnRows
from worker.model.llama import Model
from worker.model.toy import toy_config, toy_model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
MOST, PAGE, CONTEXT = 256, 16, 128
SIZES = {72: 2, 128: 2, 136: 3, 192: 3, 200: 2, 256: 2}  # rows, and groups


@pytest.fixture(scope="module")
def small_layers() -> Model:
    """Of the shapes that groups were measured with."""
    if not (ring_launch.is_there(DEVICE) and sliced_launch.is_there(DEVICE)):
        pytest.skip("products of small layers by clusters need Hopper and a Triton that is known")
    config = toy_config(
        num_layers=3,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        has_qk_norm=True,
    )
    return toy_model(config, dtype=torch.bfloat16, device=DEVICE)


def weights_of(model: Model) -> list[Tensor]:
    """All but the norms' gains, which are ones."""
    given: Any = model
    parts = [part for at in given.layers for part in (at.qkv, at.output, at.gate_up, at.down)]
    return [part.weight for part in (given.embedding, given.head, *parts)]


class Steps:
    """A batch of MOST rows, each with a row of pages of random tokens."""

    def __init__(self, model: Model, own_rows: OwnRows | None, dtype: torch.dtype = torch.bfloat16) -> None:
        config, pages = model.config, CONTEXT // PAGE
        pool = KvPool(
            num_layers=config.num_layers,
            num_pages=MOST * pages,
            page_size=PAGE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=DEVICE,
        )
        draw = torch.Generator(DEVICE).manual_seed(2)
        pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=draw, device=DEVICE).bfloat16())
        order = torch.randperm(MOST * pages, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        table = torch.full((MOST + 1, CONTEXT), pool.num_slots, dtype=torch.int32, device=DEVICE)
        table[:MOST] = (order[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).view(MOST, -1)
        ids = torch.randint(0, config.vocab_size, table.shape, generator=torch.Generator().manual_seed(4))
        columns = make_columns(MOST + 1, DEVICE)
        write_rows(columns, list(range(MOST)), [SampleRow(temperature=0.6, seed=i) for i in range(MOST)])
        layers = pool.layers
        tables = DecodeTables(table, ids.int().to(DEVICE), layers, columns, dummy_row=MOST, page_size=PAGE)
        backend = TritonBackend(config.num_heads, config.num_kv_heads, config.head_dim, CONTEXT)
        self.model, self.pool = FusedModel(model, own_rows=own_rows), pool
        self.graphs = DecodeGraphs(self.model, backend, tables, max_batch=MOST, scale=config.attention_scale)

    def logits(self, count: int, seed: int) -> Tensor:
        lengths = torch.randint(1, CONTEXT, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        with torch.inference_mode():
            return self.graphs.run_forward(list(range(count)), lengths)[0].clone()


def test_groups_are_taken_where_they_were_measured(small_layers: Model) -> None:
    fused = FusedModel(small_layers)
    assert {rows: fused.num_groups(rows) for rows in SIZES} == SIZES
    assert [fused.num_groups(rows) for rows in (1, 64, 257)] == [1, 1, 1]


def test_groups_are_no_worse_than_one_piece(small_layers: Model) -> None:
    """Logits, and K and V of the new tokens of every layer, beside the same network in fp32."""
    wide = toy_model(small_layers.config, dtype=torch.float32, device=DEVICE)
    for mine, theirs in zip(weights_of(wide), weights_of(small_layers), strict=True):
        mine.copy_(theirs)
    split = Steps(small_layers, None)
    whole = Steps(small_layers, replace(OwnRows.of(small_layers), beside=0))
    exact = Steps(wide, OwnRows(0, 0, 0), torch.float32)
    for rows in SIZES:
        count = rows - 3  # with padding
        found, plain, right = (steps.logits(count, seed=rows) for steps in (split, whole, exact))
        assert_no_worse(found, plain=plain, exact=right)
    left, plain, right = (steps.pool.buffer[:, :, :-1] for steps in (split, whole, exact))  # no dummy page
    assert_no_worse(left, plain=plain, exact=right)
    for steps in (split, whole, exact):
        steps.graphs.close()


def test_a_step_in_groups_leaves_the_same_bits_eagerly_and_again(small_layers: Model) -> None:
    steps = Steps(small_layers, None)
    for rows in SIZES:
        expected = steps.logits(rows, seed=rows)
        for _ in range(20):
            assert torch.equal(steps.logits(rows, seed=rows), expected)
        steps.graphs._captures = False
        assert torch.equal(steps.logits(rows, seed=rows), expected)
        steps.graphs._captures = True
    steps.graphs.close()
