"""Which rows run side by side, and that whoever waits for them waits for all."""

import pytest
import torch

from worker.execution.row_groups import ALIGNED, Branches, group_slices


@pytest.mark.parametrize("most", [64, 128])
@pytest.mark.parametrize("num_rows", range(65, 257))
def test_groups_hold_every_row_once_and_none_more_than_an_even_share_allows(num_rows: int, most: int) -> None:
    slices = group_slices(num_rows, -(-num_rows // most))
    assert [row for at in slices for row in range(num_rows)[at]] == list(range(num_rows))
    sizes = [at.stop - at.start for at in slices]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 3 * ALIGNED
    assert all(at.start % ALIGNED == 0 for at in slices)


def test_without_a_gpu_all_work_is_done_in_order() -> None:
    done: list[int] = []
    Branches(4, torch.device("cpu")).run([lambda number=number: done.append(number) for number in range(3)])
    assert done == [0, 1, 2]
