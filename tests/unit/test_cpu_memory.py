"""Memory for weights and pages: aligned, zero, apart, and only promised until it is written."""

import resource

import numpy as np
import pytest
import torch

from kernels.cpu.memory import HUGE_PAGE, Arena, empty_tensor


def test_arrays_of_an_arena_are_zero_aligned_and_apart() -> None:
    arena = Arena()
    arrays = [arena.zeros(size) for size in (1, 63, 64, 65, 1000, 5 << 20, 40 << 20, 10)]
    for number, array in enumerate(arrays, start=1):
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[:] = number
    for number, array in enumerate(arrays, start=1):
        assert (array == number).all()


def test_an_array_outlives_its_arena() -> None:
    array = Arena().zeros(100)
    array[:] = 7
    assert array.sum() == 700


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_starts_at_a_huge_page_and_holds_zeros(dtype: torch.dtype) -> None:
    tensor = empty_tensor((2, 3, 5), dtype)
    assert tensor.shape == (2, 3, 5)
    assert tensor.dtype == dtype
    assert tensor.data_ptr() % HUGE_PAGE == 0
    assert not tensor.any()
    assert empty_tensor((0, 4), dtype).shape == (0, 4)


def test_a_large_tensor_costs_what_is_written_of_it() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensor = empty_tensor((1 << 28,), torch.float32)  # 1 GiB
    tensor[:1000] = 1.0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 << 10  # KiB
    assert np.isclose(float(tensor[:2000].sum()), 1000.0)
