"""Padded decode batches: sizes, the dummy row, and nothing left of the batch before."""

import pytest
import torch

from kernels.checks import check_batch
from kernels.cpu_backend import CpuBackend
from kernels.reference import ReferenceBackend
from worker.execution.decode_buffers import DecodeBuffers, capture_sizes, first_sizes, padded_size
from worker.execution.kv_pool import KvPool
from worker.execution.page_table import PageTable
from worker.execution.token_pool import TokenPool

CPU = torch.device("cpu")


def tables(num_pages: int = 40) -> tuple[PageTable, TokenPool, DecodeBuffers]:
    table = PageTable(max_running=16, max_context=64, num_pages=num_pages, page_size=4, device=CPU)
    pool = TokenPool(num_rows=17, width=table.slots.shape[1], device=CPU)
    for row in range(16):
        table.write_pages([row, row], [0, 1], [2 * row, 2 * row + 1])
    pool.ids[:16] = torch.arange(16 * table.slots.shape[1], dtype=torch.int32).view(16, -1)
    return table, pool, DecodeBuffers(table, pool, max_batch=16)


def test_captured_sizes_are_few_and_the_largest_comes_first() -> None:
    """M-23."""
    assert capture_sizes(32) == [32, 24, 16, 8, 4, 2, 1]
    assert capture_sizes(3) == [3, 2, 1]
    assert capture_sizes(12) == [12, 8, 4, 2, 1]
    assert capture_sizes(256)[0] == 256
    assert len(capture_sizes(256)) == 35


def test_few_sizes_are_captured_before_the_first_step() -> None:
    """The largest is among them, so that every batch has a graph from the first step on."""
    assert first_sizes(capture_sizes(200)) == [200, 128, 64, 32, 16, 8, 4, 2, 1]
    assert first_sizes(capture_sizes(3)) == [3, 2, 1]


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 1), (3, 4), (5, 8), (8, 8), (9, 16), (17, None)])
def test_a_batch_is_padded_to_the_next_size(batch_size: int, expected: int | None) -> None:
    """M-24."""
    assert padded_size(batch_size, capture_sizes(16)) == expected


def test_padding_is_one_token_of_the_dummy_row() -> None:
    """M-24, M-25, S1-31: length 1, token 0, written to the dummy slot."""
    table, _, buffers = tables()
    padded = buffers.prepare([5, 2, 7], [3, 8, 1], 8)
    batch = padded.batch
    check_batch(batch)
    assert padded.num_real == 3
    assert batch.rows.tolist() == [5, 2, 7, *[table.dummy_row] * 5]
    assert batch.kv_lens.tolist() == [3, 8, 1, *[1] * 5]
    assert batch.positions.tolist() == [2, 7, 0, *[0] * 5]
    assert batch.write_slots.tolist() == [42, 23, 56, *[table.dummy_slot] * 5]
    assert padded.input_ids[3:].tolist() == [0] * 5
    assert batch.q_indptr.tolist() == list(range(9))


def test_nothing_is_left_of_a_larger_batch() -> None:
    """B081: after the largest batch was full, a batch of one has no stale length, row or slot anywhere."""
    table, _, buffers = tables()
    buffers.prepare(list(range(16)), [8] * 16, 16)
    padded = buffers.prepare([9], [2], 16)
    fresh = tables()[2].prepare([9], [2], 16)
    for name in ("rows", "kv_lens", "positions", "write_slots", "q_indptr"):
        assert torch.equal(getattr(padded.batch, name), getattr(fresh.batch, name)), name
    assert torch.equal(padded.input_ids, fresh.input_ids)
    assert padded.batch.max_kv_len == 2
    assert set(padded.batch.rows.tolist()) == {9, table.dummy_row}


def test_static_tensors_stay_where_they_are() -> None:
    """M-24: a captured graph holds their addresses."""
    _, _, buffers = tables()
    first = buffers.prepare([1], [2], 4)
    addresses = [first.batch.rows.data_ptr(), first.batch.write_slots.data_ptr(), first.input_ids.data_ptr()]
    again = buffers.prepare([3, 4, 5, 6], [1, 2, 3, 4], 4)
    assert addresses == [
        again.batch.rows.data_ptr(),
        again.batch.write_slots.data_ptr(),
        again.input_ids.data_ptr(),
    ]


@pytest.mark.parametrize("backend", [ReferenceBackend(), CpuBackend()], ids=["reference", "cpu"])
def test_padding_changes_no_real_row_and_no_managed_page(backend: ReferenceBackend | CpuBackend) -> None:
    """B079, S1-30: of 5 real and 3 padding rows five slots change, the dummy page aside."""
    _, _, buffers = tables()
    qkv = torch.randn(8, 8, 16, generator=torch.Generator().manual_seed(2))
    outputs = []
    for size in (5, 8):
        pool = filled_pool()
        before = pool.layers[0].k.clone()
        batch = buffers.prepare([5, 2, 7, 11, 0], [3, 8, 1, 4, 5], size).batch
        backend.plan(batch)
        q, k, v = qkv[:size, :4], qkv[:size, 4:6], qkv[:size, 6:]
        outputs.append(backend.run(pool.layers[0], q, k, v, scale=0.25)[:5])
        is_changed = (pool.layers[0].k != before).flatten(1).any(dim=1)[: pool.num_slots]
        assert is_changed.nonzero().flatten().tolist() == sorted(batch.write_slots[:5].tolist())
    assert torch.equal(*outputs)


def filled_pool() -> KvPool:
    pool = KvPool(
        num_layers=1, num_pages=40, page_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=CPU
    )
    pool.buffer[:, :, :40] = torch.randn(2, 1, 40, 4, 2, 16, generator=torch.Generator().manual_seed(1))
    return pool


def test_the_dummy_row_needs_no_free_page() -> None:
    """B082: padding works on a pool that is full to the last page."""
    table, _, buffers = tables(num_pages=32)
    padded = buffers.prepare([0], [8], 4)
    assert padded.batch.write_slots[1:].tolist() == [32 * 4] * 3
    assert table.dummy_slot == 128
