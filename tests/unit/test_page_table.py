"""The page table: slots, widths, one scatter a step, the dummy row, and what other kernels derive from it."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.execution import page_table as page_table_module
from worker.execution.on_the_way import OnTheWay
from worker.execution.page_table import PageTable, slots_of_pages, table_width

CPU = torch.device("cpu")


def page_table(
    *, max_running: int = 4, max_context: int = 100, num_pages: int = 30, page_size: int = 4
) -> PageTable:
    return PageTable(
        max_running=max_running,
        max_context=max_context,
        num_pages=num_pages,
        page_size=page_size,
        device=CPU,
    )


def test_the_table_is_one_int32_matrix_with_a_row_more_than_sequences() -> None:
    """S1-01, S1-06: shape [max_running + 1, aligned width]; the row count bounds concurrency."""
    table = page_table(max_running=7, max_context=100)
    assert table.slots.shape == (8, 128)
    assert table.slots.dtype == torch.int32
    assert table.slots.is_contiguous()


@pytest.mark.parametrize("max_context", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_rows_are_aligned_to_128_bytes_and_to_whole_pages(max_context: int, page_size: int) -> None:
    """S1-02, S1-25, H16."""
    table = page_table(max_context=max_context, num_pages=200, page_size=page_size)
    width = table.slots.stride(0)
    assert width % 32 == 0
    assert width % page_size == 0
    assert width >= math.ceil(max_context / page_size) * page_size
    assert width - max_context < math.lcm(32, page_size)


def test_a_row_addresses_no_more_tokens_than_the_pool_has() -> None:
    """S1-03."""
    assert table_width(max_context=10_000, num_pages=10, page_size=16) == 160


def test_page_64_and_a_context_of_160_hold_a_prompt_of_150_tokens() -> None:
    """H16: rounded to 32 alone the row has 160 columns and the third page reaches column 191."""
    table = page_table(max_context=160, num_pages=10, page_size=64)
    table.write_pages([0] * 3, [0, 1, 2], [5, 6, 7])
    assert table.slots[0, 191] == 7 * 64 + 63


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_entries_are_slots_and_consecutive_within_a_page(page_size: int) -> None:
    """S1-04, S1-05, S1-07: no arithmetic at read time, whatever the page size."""
    table = page_table(page_size=page_size, num_pages=40)
    pages = [17, 3, 39]
    table.write_pages([2] * 3, [0, 1, 2], pages)
    row = table.slots[2].tolist()
    for index, page in enumerate(pages):
        first = index * page_size
        assert row[first] % page_size == 0
        assert row[first : first + page_size] == [page * page_size + i for i in range(page_size)]


def test_slots_of_pages_is_the_same_object_at_page_size_one() -> None:
    """S1-17."""
    pages = np.array([5, 9], dtype=np.int32)
    assert slots_of_pages(pages, 1) is pages
    expanded = slots_of_pages(np.array([8, 0], dtype=np.int32), 4)
    assert expanded.dtype == np.int32
    assert expanded.tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


class CountWrites(TorchDispatchMode):
    """Counts operations that write into a given tensor, and the sizes of their index vectors."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target
        self.index_sizes: list[list[int]] = []
        self.index_dtypes: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        writes = func._schema.is_mutable and args and isinstance(args[0], torch.Tensor)
        if writes and args[0].untyped_storage().data_ptr() == self.target.untyped_storage().data_ptr():
            self.index_sizes.append([len(index) for index in args[1]])
            self.index_dtypes.append([index.dtype for index in args[1]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_step_writes_the_table_once_for_all_sequences(page_size: int) -> None:
    """S1-22, S1-23: one scatter; its two int64 vectors are as long as all allocated tokens."""
    table = page_table(max_running=8, page_size=page_size, num_pages=64)
    with CountWrites(table.slots) as writes:
        table.write_pages([0, 1, 1, 7], [0, 0, 1, 0], [3, 4, 5, 6])
    assert writes.index_sizes == [[4 * page_size, 4 * page_size]]
    assert writes.index_dtypes == [[torch.int64, torch.int64]]


def test_a_step_without_new_pages_writes_nothing() -> None:
    """S1-21's other half: zero pages, zero writes."""
    table = page_table()
    with CountWrites(table.slots) as writes:
        table.write_pages([], [], [])
    assert writes.index_sizes == []


def test_columns_that_contradict_one_another_are_our_bug() -> None:
    """S1-24: allocated tokens and filled tokens agree, or nothing is written."""
    table = page_table()
    before = table.slots.clone()
    with pytest.raises((AssertionError, ValueError)):
        table.write_pages([0, 0], [0], [3, 4])
    assert torch.equal(table.slots, before)


def test_whole_pages_are_written_past_the_tokens_in_use() -> None:
    """S1-25: a sequence of 5 tokens has two pages of 4, and all eight columns are valid."""
    table = page_table(page_size=4)
    table.write_pages([1, 1], [0, 1], [9, 2])
    assert table.slots[1, :8].tolist() == [36, 37, 38, 39, 8, 9, 10, 11]


def test_the_dummy_row_is_full_of_the_dummy_slot() -> None:
    """S1-26, S1-27, S1-29: row max_running, every entry num_pages * page_size."""
    table = page_table(max_running=4, num_pages=30, page_size=4)
    assert table.dummy_row == 4
    assert table.dummy_slot == 120
    assert (table.slots[4] == 120).all()
    table.write_pages([0, 3], [0, 0], [29, 28])
    assert (table.slots[4] == 120).all()
    assert (table.slots[:4] < 120).all()


def test_rows_are_read_back_for_the_audit() -> None:
    table = page_table(page_size=2)
    table.write_pages([0, 0, 2], [0, 1, 0], [7, 1, 4])
    assert table.read_rows([2, 0], [1, 4]) == [[8], [14, 15, 2, 3]]
    assert table.read_rows([], []) == []


def test_spans_of_any_length_come_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    class Counted(OnTheWay):
        def __init__(self, *parts: torch.Tensor) -> None:
            copies.append(sum(map(len, parts)))
            super().__init__(*parts)

    monkeypatch.setattr(page_table_module, "OnTheWay", Counted)
    table = page_table(page_size=2)
    table.write_pages([0, 0, 2], [0, 1, 0], [7, 1, 4])
    read = table.begin_read([(0, 1, 3), (2, 0, 0), (2, 0, 1), (0, 0, 2)])
    table.write_pages([0, 2], [0, 0], [9, 9])  # behind the copy
    assert read.is_ready()
    assert read.result() == [[15, 2, 3], [], [8], [14, 15]]
    assert copies == [6]
    assert table.begin_read([(2, 1, 1)]).result() == [[19]]
    assert copies == [6, 1]


def test_repointing_a_page_replaces_its_slots() -> None:
    table = page_table(page_size=4)
    table.write_pages([1, 1], [0, 1], [9, 2])
    table.write_pages([1], [0], [20])
    assert table.read_rows([1], [8]) == [[80, 81, 82, 83, 8, 9, 10, 11]]
