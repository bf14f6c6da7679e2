"""Padded decode steps, through Triton's interpreter: the dummy row, and nothing left of the batch before."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.sample_columns import SampleRow, make_columns, write_rows
from kernels.triton_backend import TritonBackend, TritonStaticDecode
from worker.execution import cuda_graphs
from worker.execution.cuda_graphs import DecodeGraphs, DecodeTables
from worker.execution.kv_pool import KvPool
from worker.execution.page_table import PageTable
from worker.execution.token_pool import TokenPool
from worker.model.fused import FusedModel, OwnRows
from worker.model.toy import toy_config, toy_model

CPU = torch.device("cpu")
CONFIG = toy_config()
MODEL = toy_model(CONFIG)
ROWS, PAGE, CONTEXT = 8, 4, 16


@dataclass
class Setting:
    """Every page of the pool is some row's."""

    table: PageTable
    tokens: TokenPool
    pool: KvPool
    graphs: DecodeGraphs


def setting(own_rows: OwnRows | None = None) -> Setting:
    pages = ROWS * 2
    table = PageTable(max_running=ROWS, max_context=CONTEXT, num_pages=pages, page_size=PAGE, device=CPU)
    tokens = TokenPool(num_rows=ROWS + 1, width=table.slots.shape[1], device=CPU)
    draw = torch.Generator().manual_seed(1)
    for row in range(ROWS):
        table.write_pages([row, row], [0, 1], [2 * row, 2 * row + 1])
        tokens.ids[row] = torch.randint(1, CONFIG.vocab_size, tokens.ids[row].shape, generator=draw)
    pool = KvPool(
        num_layers=CONFIG.num_layers,
        num_pages=pages,
        page_size=PAGE,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    pool.buffer[:, :, :pages].normal_(generator=draw)
    columns = make_columns(ROWS + 1, CPU)
    write_rows(columns, list(range(ROWS)), [SampleRow() for _ in range(ROWS)])
    heads = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim)
    tables = DecodeTables(table.slots, tokens.ids, pool.layers, columns, dummy_row=ROWS, page_size=PAGE)
    backend = TritonBackend(*heads, CONTEXT)
    scale = CONFIG.attention_scale
    graphs = DecodeGraphs(
        FusedModel(MODEL, own_rows=own_rows or OwnRows(4, 0, 0)),
        backend,
        tables,
        max_batch=ROWS,
        scale=scale,
    )
    return Setting(table, tokens, pool, graphs)


def drawn(given: Setting, rows: list[int], kv_lens: list[int]) -> list[int]:
    with torch.inference_mode():
        ids, is_finite = given.graphs.run(rows, kv_lens, with_filters=False).arrived()
    assert is_finite.tolist() == [1] * len(rows)
    return ids.tolist()


def test_padding_is_one_token_of_the_dummy_row() -> None:
    """M-24, M-25, S1-31: length 1, position 0, written to the dummy slot; here of 5 rows in a graph of 8."""
    given = setting()
    drawn(given, [5, 2, 7, 0, 1], [3, 8, 1, 2, 4])
    rows, kv_lens = given.graphs.columns(8)
    assert rows.tolist() == [5, 2, 7, 0, 1, *[ROWS] * 3]
    assert kv_lens.tolist() == [3, 8, 1, 2, 4, *[1] * 3]
    assert given.graphs._positions.tolist() == [2, 7, 0, 1, 3, *[0] * 3]
    assert given.graphs._slots.tolist() == [42, 23, 56, 1, 11, *[given.table.dummy_slot] * 3]


def test_padding_changes_no_real_row_and_no_managed_page() -> None:
    """B079, S1-30, B082: with every page in use, 3 rows in a graph of 4 write 3 slots and answer as in 4."""
    whole = drawn(setting(), [5, 2, 7, 0], [3, 8, 1, 2])
    given = setting()
    before = given.pool.buffer.clone()
    assert drawn(given, [5, 2, 7], [3, 8, 1]) == whole[:3]
    is_changed = (given.pool.buffer != before)[:, :, : given.pool.num_pages].flatten(4).any(dim=4)
    slots = is_changed.flatten(2).any(dim=0).any(dim=0).nonzero().flatten().tolist()
    assert slots == sorted([42, 23, 56])
    assert given.tokens.ids[ROWS, 0] == 0, "the dummy row feeds token 0"


def test_a_row_with_products_of_its_own_takes_no_larger_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonStaticDecode, "least_size", lambda self, kv_lens, kv: 2)
    assert setting(OwnRows(1, 0, 0)).graphs._size([3]) == 1


@pytest.mark.parametrize(("least", "size"), [(1, 1), (2, 2), (16, ROWS)])
def test_a_batch_takes_a_larger_graph_where_attention_asks_for_one(
    least: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its row the answer is the same; where no graph is as large, it is the largest there is."""
    alone = drawn(setting(), [5], [3])
    monkeypatch.setattr(TritonStaticDecode, "least_size", lambda self, kv_lens, kv: least)
    given = setting()
    assert drawn(given, [5], [3]) == alone
    rows, kv_lens = given.graphs.columns(ROWS)
    assert rows.tolist()[:size] == [5, *[ROWS] * (size - 1)]
    assert given.graphs._positions.tolist()[:size] == [2] + [0] * (size - 1)
    assert given.graphs._size(kv_lens.tolist()) == ROWS


def test_attention_of_the_product_and_behind_a_store_leave_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways of a step's attention: tokens, and K and V of every page but the dummy page, in which only
    the store of its own puts something for padding.
    """
    left = []
    for rows_of_product in (0, ROWS):
        monkeypatch.setattr(cuda_graphs, "PRODUCT_ROWS", rows_of_product)
        given = setting()
        left.append((drawn(given, [5, 2, 7], [3, 8, 1]), given.pool.buffer[:, :, : given.pool.num_pages]))
    (tokens, pool), (tokens_of_product, pool_of_product) = left
    assert tokens_of_product == tokens
    torch.testing.assert_close(pool_of_product, pool, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_in_groups_leave_what_they_leave_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, and K and V of every page, of more rows than our own products take; padding is in the last."""
    through, groups = FusedModel.through_layers, []

    def noted(self: FusedModel, residual: torch.Tensor, *rest: Any) -> Any:
        groups.append(residual.shape[0])
        return through(self, residual, *rest)

    monkeypatch.setattr(FusedModel, "through_layers", noted)
    whole, split = setting(), setting(OwnRows(4, 0, 0, beside=ROWS))
    batch = ([5, 2, 7, 0, 1, 3, 4], [3, 8, 1, 2, 4, 7, 1])
    tokens = drawn(whole, *batch)
    assert not groups
    assert drawn(split, *batch) == tokens
    assert groups == [4, 4]
    torch.testing.assert_close(split.pool.buffer, whole.pool.buffer, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert drawn(split, batch[0][:4], batch[1][:4]) == drawn(whole, batch[0][:4], batch[1][:4])
    assert groups == [4, 4, 4, 4], "four rows are not split, in one piece or the other"


def test_nothing_is_left_of_a_larger_batch() -> None:
    """B081: after the largest batch was full, a batch of one has no stale length or row anywhere."""
    graphs = setting().graphs
    graphs.prepare(list(range(ROWS)), [8] * ROWS, ROWS)
    graphs.prepare([6], [2], ROWS)
    rows, kv_lens = graphs.columns(ROWS)
    assert rows.tolist() == [6, *[ROWS] * (ROWS - 1)]
    assert kv_lens.tolist() == [2, *[1] * (ROWS - 1)]


def test_static_tensors_stay_where_they_are() -> None:
    """M-24: a captured graph holds their addresses, at multiples of 16 bytes as its kernels expect them."""
    graphs = setting().graphs
    for size in graphs.sizes:
        before = [part.data_ptr() for part in graphs.columns(size)]
        graphs.prepare([1], [2], size)
        assert [part.data_ptr() for part in graphs.columns(size)] == before
        assert (before[1] - before[0]) % 16 == 0
