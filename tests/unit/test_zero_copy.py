"""Batches out of host memory and results into it, through Triton's interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.zero_copy import BATCH_COLUMNS, NO_PAGE, PAGE_ROWS, padded_room, read_batch, write_results
from worker.execution.page_table import PageTable

CPU = torch.device("cpu")
ROWS = 40


def page_table(page_size: int) -> PageTable:
    return PageTable(max_running=ROWS, max_context=70, num_pages=90, page_size=page_size, device=CPU)


@pytest.mark.parametrize("page_size", [1, 4, 16, 24])
@pytest.mark.parametrize("num_pages", [0, 1, 33, 64])
def test_new_pages_are_entered_as_by_a_scatter(page_size: int, num_pages: int) -> None:
    """S1-22: whatever the page size, and not one entry more."""
    draw = torch.Generator().manual_seed(num_pages)
    expected, found = page_table(page_size), page_table(page_size)
    pages_per_row = 70 // page_size
    places = torch.randperm(ROWS * pages_per_row, generator=draw)[:num_pages]
    count = len(places)
    columns = (places // pages_per_row, places % pages_per_row, torch.randperm(90, generator=draw)[:count])
    expected.write_pages(*(column.tolist() for column in columns))
    batch = torch.zeros(BATCH_COLUMNS, 64, dtype=torch.int32)
    batch[PAGE_ROWS] = NO_PAGE
    for column, values in enumerate(columns, start=PAGE_ROWS):
        batch[column, :count] = values.int()
    there = torch.zeros(2, 64, dtype=torch.int32)
    read_batch(batch, found.slots, *there, max(count, 1), page_size=page_size)
    assert torch.equal(found.slots, expected.slots)


def test_rows_and_lengths_arrive() -> None:
    batch = torch.arange(BATCH_COLUMNS * 96, dtype=torch.int32).view(BATCH_COLUMNS, 96)
    batch[PAGE_ROWS] = NO_PAGE
    rows, kv_lens = torch.full((2, 96), -7, dtype=torch.int32)
    read_batch(batch, page_table(4).slots, rows, kv_lens, 33, page_size=4)
    assert torch.equal(rows[:64], batch[0, :64])
    assert torch.equal(kv_lens[:64], batch[1, :64])
    assert rows[64:].tolist() == kv_lens[64:].tolist() == [-7] * 32


@pytest.mark.parametrize(("max_rows", "count"), [(1, 1), (5, 3), (40, 40), (64, 33)])
def test_ids_and_flags_arrive(max_rows: int, count: int) -> None:
    ids = torch.randint(0, 2**31 - 1, (max_rows,), dtype=torch.int32)
    is_finite = torch.rand(max_rows) < 0.5
    results = torch.full((2, padded_room(max_rows)), -7, dtype=torch.int32)
    write_results(ids, is_finite.view(torch.int8), results, count)
    assert torch.equal(results[0, :count], ids[:count])
    assert torch.equal(results[1, :count], is_finite[:count].int())
    assert (results[:, max_rows:] == -7).all(), "nothing past the last row"


def test_a_batch_beyond_the_room_is_refused() -> None:
    batch, there = torch.zeros(BATCH_COLUMNS, 32, dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)
    with pytest.raises(AssertionError, match="33 entries, room for 32"):
        read_batch(batch, page_table(4).slots, *there, 33, page_size=4)
    with pytest.raises(AssertionError, match="6 of 5 rows"):
        write_results(there[0, :5], there[1, :5].to(torch.int8), there, 6)
