"""The KV pool: one allocation, views and not copies, pages copied by content, how many pages fit."""

import pytest
import torch

from kernels.reference import store_kv
from tests import needs
from worker.execution.kv_pool import DUMMY_CANARY, KvPool, bytes_per_page, local_kv_heads, pages_that_fit
from worker.execution.page_table import PageTable
from worker.ids import PageId
from worker.scheduling.step import PageCopy

CPU = torch.device("cpu")


def kv_pool(*, num_pages: int = 6, page_size: int = 4, poison: bool = False) -> KvPool:
    return KvPool(
        num_layers=3,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=CPU,
        poison=poison,
    )


def test_one_allocation_of_six_axes_with_a_page_more_than_is_managed() -> None:
    """S1-09, S1-11, S1-28."""
    pool = kv_pool()
    assert pool.buffer.shape == (2, 3, 7, 4, 2, 8)
    assert pool.num_bytes == pool.buffer.numel() * 4


def test_k_and_v_of_a_layer_are_views_by_slot() -> None:
    """S1-10, S1-13: same memory, axes 2 and 3 merged."""
    pool = kv_pool()
    for layer, kv in enumerate(pool.layers):
        assert kv.k.shape == kv.v.shape == (28, 2, 8)
        assert kv.k.data_ptr() == pool.buffer[0, layer].data_ptr()
        assert kv.v.data_ptr() == pool.buffer[1, layer].data_ptr()
        assert kv.k.untyped_storage().data_ptr() == pool.buffer.untyped_storage().data_ptr()


def test_row_and_position_lead_to_page_and_offset() -> None:
    """S1-08: (row, position) -> slot -> kv.view(slots)[slot] is kv[page, offset]."""
    pool = kv_pool()
    table = PageTable(max_running=2, max_context=16, num_pages=6, page_size=4, device=CPU)
    table.write_pages([1, 1], [0, 1], [5, 2])
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view(pool.buffer.shape))
    for position, (page, offset) in {0: (5, 0), 3: (5, 3), 4: (2, 0), 6: (2, 2)}.items():
        slot = int(table.slots[1, position])
        assert (slot // 4, slot % 4) == (page, offset)
        for layer, kv in enumerate(pool.layers):
            assert torch.equal(kv.k[slot], pool.buffer[0, layer, page, offset])
            assert torch.equal(kv.v[slot], pool.buffer[1, layer, page, offset])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_store_copies_rows_and_leaves_all_others_alone(index_dtype: torch.dtype, compiled: bool) -> None:
    """S1-14, S1-15: rows by slot, from slices of a fused product; every other row keeps its bits."""
    pool = kv_pool(poison=True)
    draw = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, 4 + 2 + 2, 8, generator=draw)
    k, v = qkv[:, 4:6], qkv[:, 6:8]
    assert not k.is_contiguous()
    slots = torch.randperm(24, generator=draw)[:5].to(index_dtype)
    before = pool.buffer.clone()
    if compiled:
        needs.compiled().store(k, v, pool.layers[1], slots.to(torch.int32))
    else:
        store_kv(k, v, pool.layers[1], slots)
    assert torch.equal(pool.layers[1].k[slots.long()], k)
    assert torch.equal(pool.layers[1].v[slots.long()], v)
    pool.layers[1].k[slots.long()] = before[0, 1].view(28, 2, 8)[slots.long()]
    pool.layers[1].v[slots.long()] = before[1, 1].view(28, 2, 8)[slots.long()]
    assert torch.equal(pool.buffer.view(torch.int32), before.view(torch.int32))


def test_writing_through_the_dummy_row_changes_no_managed_page() -> None:
    """S1-29, S1-30: the dummy slot is real memory behind all pages that are handed out."""
    pool = kv_pool()
    table = PageTable(max_running=2, max_context=16, num_pages=6, page_size=4, device=CPU)
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view(pool.buffer.shape))
    managed = pool.buffer[:, :, :6].clone()
    slots = table.slots[table.dummy_row, :3]
    store_kv(torch.ones(3, 2, 8), torch.ones(3, 2, 8), pool.layers[0], slots)
    assert torch.equal(pool.buffer[:, :, :6], managed)
    assert (pool.layers[0].k[pool.num_slots] == 1.0).all()


def test_the_dummy_page_is_there_from_the_start_and_holds_numbers() -> None:
    """B082, B080: no first use that finds the pool full, nothing undefined for padding to read."""
    assert (kv_pool().buffer[:, :, 6] == 0.0).all()
    assert (kv_pool(poison=True).buffer[:, :, 6] == DUMMY_CANARY).all()


def test_pages_are_copied_by_content() -> None:
    """H14: the target holds the source's K and V of all layers; `x[index].copy_(y)` would change nothing."""
    pool = kv_pool()
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view(pool.buffer.shape))
    before = pool.buffer.clone()
    pool.copy_pages([PageCopy(PageId(1), PageId(4)), PageCopy(PageId(0), PageId(5))])
    assert torch.equal(pool.buffer[:, :, 4], before[:, :, 1])
    assert torch.equal(pool.buffer[:, :, 5], before[:, :, 0])
    untouched = [0, 1, 2, 3, 6]
    assert torch.equal(pool.buffer[:, :, untouched], before[:, :, untouched])


def test_copies_of_one_step_read_before_they_write() -> None:
    pool = kv_pool()
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view(pool.buffer.shape))
    before = pool.buffer.clone()
    pool.copy_pages([PageCopy(PageId(1), PageId(2)), PageCopy(PageId(2), PageId(3))])
    assert torch.equal(pool.buffer[:, :, 2], before[:, :, 1])
    assert torch.equal(pool.buffer[:, :, 3], before[:, :, 2])


def test_freed_pages_are_poisoned_and_only_those() -> None:
    pool = kv_pool(poison=True)
    assert pool.buffer[:, :, :6].isnan().all()
    pool.buffer[:, :, :6] = 1.0
    pool.poison_pages([0, 3])
    assert pool.buffer[:, :, [0, 3]].isnan().all()
    assert (pool.buffer[:, :, [1, 2, 4, 5]] == 1.0).all()


def test_a_write_into_the_dummy_page_shows_which_slots() -> None:
    pool = kv_pool(poison=True)
    assert pool.damaged_dummy_slots() == []
    pool.layers[2].v[pool.num_slots + 3, 1, 5] = 0.5
    assert pool.damaged_dummy_slots() == [3]


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "expected"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 8, 1), (3, 1, 3)]
)
def test_kv_heads_of_a_rank(num_kv_heads: int, tp_size: int, expected: int) -> None:
    """S1-12: an even share, or one replicated head."""
    assert local_kv_heads(num_kv_heads, tp_size) == expected


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(3, 2), (8, 3), (2, 3)])
def test_kv_heads_that_cannot_be_shared_evenly_are_refused(num_kv_heads: int, tp_size: int) -> None:
    """S1-12."""
    with pytest.raises(ValueError, match=f"{num_kv_heads} KV heads .* {tp_size} ranks"):
        local_kv_heads(num_kv_heads, tp_size)


def test_pages_are_counted_from_the_memory_that_is_left() -> None:
    """M-22: (ratio * free before the model - model) / bytes per page, and one of them is the dummy page."""
    page_bytes = bytes_per_page(num_layers=30, page_size=16, num_kv_heads=3, head_dim=64, dtype=torch.float32)
    assert page_bytes == 2 * 64 * 3 * 16 * 4 * 30
    free, model = 10 * 2**30, 2**30
    count = pages_that_fit(memory_ratio=0.9, free_bytes=free, model_bytes=model, page_bytes=page_bytes)
    assert (count + 1) * page_bytes <= 0.9 * free - model < (count + 2) * page_bytes


def test_no_room_for_a_page_is_an_error_with_the_numbers() -> None:
    """M-22, B033: the dummy page counts."""
    with pytest.raises(
        ValueError, match=r"no room for one page of 100 bytes: 0.50 of 1000 free bytes, less 301"
    ):
        pages_that_fit(memory_ratio=0.5, free_bytes=1000, model_bytes=301, page_bytes=100)
    assert pages_that_fit(memory_ratio=0.5, free_bytes=1000, model_bytes=300, page_bytes=100) == 1
