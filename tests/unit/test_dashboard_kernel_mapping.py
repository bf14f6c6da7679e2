"""The mapping of threads to keys and values that the dashboard draws is the kernel's."""

import pytest

from dashboard.kernel_mapping import KernelMapping
from kernels.paged_cuda.shape import KernelShape


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
def test_the_drawn_mapping_is_the_one_that_the_emulation_executes(page_size: int, head_size: int) -> None:
    drawn, shape = KernelMapping(page_size, head_size), KernelShape(head_size, page_size)
    assert drawn.exists
    assert (drawn.thread_group_size, drawn.vec_size) == (shape.thread_group_size, shape.vec_size)
    key_lanes = drawn.key_lanes()
    value_lanes = drawn.value_lanes()
    for lane in range(32):
        group, offset = divmod(lane, shape.thread_group_size)
        for vec in shape.vecs_of_thread(offset).tolist():
            assert key_lanes[vec][group % page_size] == lane
        tokens = shape.value_tokens_of_lane(lane)
        for row in shape.value_rows_of_lane(lane).tolist():
            if row < head_size:
                assert value_lanes[row][tokens[0] // shape.v_vec_size] == lane
    assert [drawn.warp_of(position) for position in range(6)] == [0, 1, 2, 3, 0, 1]


def test_the_mapping_knows_what_was_never_compiled() -> None:
    assert not KernelMapping(64, 64).exists
    assert not KernelMapping(16, 300).exists
    assert not KernelMapping(16, 63).exists
