"""Sizes of captured decode batches."""

import pytest

from worker.execution.graph_sizes import capture_sizes, kernel_sizes, padded_size


def test_captured_sizes_are_few_and_the_largest_comes_first() -> None:
    """M-23."""
    assert capture_sizes(32) == [32, 24, 16, 8, 4, 2, 1]
    assert capture_sizes(3) == [3, 2, 1]
    assert capture_sizes(12) == [12, 8, 4, 2, 1]
    assert capture_sizes(256)[0] == 256
    assert len(capture_sizes(256)) == 35


def test_few_sizes_meet_every_kernel() -> None:
    """Kernels differ by powers of two; the largest batch may lie between two of them."""
    assert kernel_sizes(capture_sizes(200)) == [200, 128, 64, 32, 16, 8, 4, 2, 1]
    assert kernel_sizes(capture_sizes(3)) == [3, 2, 1]


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 1), (3, 4), (5, 8), (8, 8), (9, 16), (17, None)])
def test_a_batch_is_padded_to_the_next_size(batch_size: int, expected: int | None) -> None:
    """M-24."""
    assert padded_size(batch_size, capture_sizes(16)) == expected
