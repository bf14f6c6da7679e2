"""Which thread of the historical kernel touches which data, with the numbers of its document."""

import numpy as np
import pytest

from kernels.paged_cuda.shape import WARP_SIZE, KernelShape

# The document's example: FP16, 16 tokens a block, heads of 128, 4 warps.
DOCUMENT = KernelShape(head_size=128, block_size=16, num_threads=128, itemsize=2)
COMPILED = [
    KernelShape(head_size=head_size, block_size=block_size, itemsize=itemsize)
    for head_size in (32, 64, 80, 96, 112, 120, 128, 192, 256)
    for block_size in (8, 16, 32)
    for itemsize in (2, 4)
]


def test_the_template_constants_are_those_of_the_document() -> None:
    """S2-05: scalar type (by its size), HEAD_SIZE, BLOCK_SIZE, NUM_THREADS, PARTITION_SIZE = 0."""
    assert KernelShape.__dataclass_fields__.keys() == {
        "head_size",
        "block_size",
        "num_threads",
        "partition_size",
        "itemsize",
    }
    assert KernelShape(head_size=128).partition_size == 0
    assert DOCUMENT.num_warps == 4


def test_only_the_compiled_shapes_exist() -> None:
    """S2-32, M-29: block sizes 8, 16, 32 and head sizes 32..256; any other is refused by name."""
    for block_size in (1, 4, 64):
        with pytest.raises(ValueError, match="block_size"):
            KernelShape(head_size=128, block_size=block_size)
    for head_size in (16, 33, 264, 512):
        with pytest.raises(ValueError, match="head_size"):
            KernelShape(head_size=head_size)
    with pytest.raises(ValueError, match="num_threads"):
        KernelShape(head_size=128, num_threads=48)
    with pytest.raises(ValueError, match="partition_size"):
        KernelShape(head_size=128, partition_size=500)
    assert {shape.block_size for shape in COMPILED} == {8, 16, 32}


def test_fp16_with_groups_of_two_reads_vecs_of_4_and_value_vecs_of_8() -> None:
    """S2-06: THREAD_GROUP_SIZE = max(32 / BLOCK_SIZE, 1); 16 bytes a group for K, a thread for V."""
    assert DOCUMENT.thread_group_size == 2
    assert DOCUMENT.vec_size == 4
    assert DOCUMENT.v_vec_size == 8
    assert [KernelShape(128, block_size).thread_group_size for block_size in (8, 16, 32)] == [4, 2, 1]
    assert [KernelShape(128, block_size).vec_size for block_size in (8, 16, 32)] == [2, 4, 8]


@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_a_thread_group_reads_16_bytes_at_a_time(shape: KernelShape) -> None:
    """S2-04: x = 16 / element size = THREAD_GROUP_SIZE * VEC_SIZE, 8 for FP16."""
    assert shape.x == shape.thread_group_size * shape.vec_size
    assert shape.x * shape.itemsize == 16
    assert DOCUMENT.x == 8


def test_a_block_of_one_head_is_2048_elements() -> None:
    """S2-03: 16 tokens x 128 elements, the same number for K and for V."""
    shape = DOCUMENT
    assert shape.block_size * shape.head_size == 2048
    assert shape.head_size // shape.x * shape.block_size * shape.x == 2048


def test_four_warps_share_six_blocks_round_robin() -> None:
    """S2-08: warp 0 takes blocks 0 and 4, warp 1 blocks 1 and 5, warp 2 block 2, warp 3 block 3."""
    context = range(6 * 16)
    taken = [list(DOCUMENT.blocks_of_warp(warp, context)) for warp in range(4)]
    assert taken == [[0, 4], [1, 5], [2], [3]]


def test_round_robin_starts_anew_in_each_partition() -> None:
    """S2-08, S2-28: the first warp of a partition takes the partition's first block."""
    shape = KernelShape(head_size=128, partition_size=512)
    tokens = shape.partition_tokens(1, 1000)
    taken = [list(shape.blocks_of_warp(warp, tokens)) for warp in range(4)]
    assert sorted(block for blocks in taken for block in blocks) == list(range(32, 63))
    assert [blocks[0] for blocks in taken] == [32, 33, 34, 35]


def test_a_head_of_128_is_32_vecs() -> None:
    """S2-10: 128 / 4 = 32 vecs of the query, and of every key token."""
    assert DOCUMENT.num_vecs == 32
    assert DOCUMENT.num_vecs_per_thread == 16
    assert DOCUMENT.thread_group_size * DOCUMENT.num_vecs_per_thread == 32


def test_each_thread_of_a_group_fills_its_own_row_of_q_vecs() -> None:
    """S2-11: thread 0 row 0, thread 1 row 1; the group's threads side by side read neighbouring memory."""
    first, second = DOCUMENT.elements_of_thread(0), DOCUMENT.elements_of_thread(1)
    assert np.array_equal(second, first + DOCUMENT.vec_size)
    together = np.concatenate([first, second], axis=1)  # in each iteration: 8 neighbouring elements
    assert np.array_equal(together[0], np.arange(8))
    assert np.array_equal(together.reshape(-1), np.arange(128))


def test_threads_take_vecs_in_turn() -> None:
    """S2-13: thread 0 reads vec 0, 2, 4, ..; thread 1 reads vec 1, 3, 5, ..; each vec is read once."""
    assert list(DOCUMENT.vecs_of_thread(0)) == list(range(0, 32, 2))
    assert list(DOCUMENT.vecs_of_thread(1)) == list(range(1, 32, 2))


@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_a_group_reads_every_element_of_a_token_once(shape: KernelShape) -> None:
    """S2-09, S2-13: the threads of a group share one key token without overlap."""
    elements = [shape.elements_of_thread(offset) for offset in range(shape.thread_group_size)]
    assert sorted(np.concatenate(elements).reshape(-1)) == list(range(shape.head_size))
    assert elements[0].shape == (shape.num_vecs_per_thread, shape.vec_size)


@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_key_offsets_walk_the_axis_split_by_x(shape: KernelShape) -> None:
    """S2-12: element e of a token lies at (e / x) * BLOCK_SIZE * x + e % x from k_ptr."""
    grid = np.arange(shape.head_size * shape.block_size)
    layout = grid.reshape(shape.head_size // shape.x, shape.block_size, shape.x)
    for offset in range(shape.thread_group_size):
        element = shape.elements_of_thread(offset)
        expected = layout[element // shape.x, 0, element % shape.x]
        assert np.array_equal(shape.key_offsets(offset), expected)


def test_each_thread_multiplies_64_of_128_elements() -> None:
    """S2-14: with groups of two a thread holds half a key token; the group adds up to all of it."""
    assert DOCUMENT.num_elems_per_thread == 64
    assert DOCUMENT.elements_of_thread(0).size == 64


def test_a_warp_reads_256_value_elements_an_iteration_and_needs_8_of_them() -> None:
    """S2-24: 32 * 8 = 256; 128 * 16 / 256 = 8."""
    per_iteration = WARP_SIZE * DOCUMENT.v_vec_size
    assert per_iteration == 256
    assert DOCUMENT.head_size * DOCUMENT.block_size // per_iteration == 8
    assert DOCUMENT.num_rows_per_thread == 8


@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_a_warp_reads_every_value_of_a_block_once(shape: KernelShape) -> None:
    """S2-22: HEAD_SIZE rows x BLOCK_SIZE columns, no groups, a column is one token."""
    reads = np.zeros((shape.head_size, shape.block_size), np.int64)
    for lane in range(WARP_SIZE):
        tokens = shape.value_tokens_of_lane(lane)
        assert np.array_equal(tokens, tokens[0] + np.arange(shape.v_vec_size))  # neighbouring tokens
        for row in shape.value_rows_of_lane(lane):
            if row < shape.head_size:
                reads[row, tokens] += 1
    assert (reads == 1).all()


def test_a_thread_reads_the_same_tokens_in_every_row() -> None:
    """S2-22, S2-23: an accumulator is one head position over the thread's 8 tokens."""
    assert list(DOCUMENT.value_tokens_of_lane(0)) == list(range(8))
    assert list(DOCUMENT.value_tokens_of_lane(1)) == list(range(8, 16))
    assert len(DOCUMENT.value_rows_of_lane(0)) == DOCUMENT.num_rows_per_thread == 8


@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_exactly_one_lane_writes_each_row(shape: KernelShape) -> None:
    """S2-25, S2-26: lane % NUM_V_VECS_PER_ROW == 0 and row_idx < HEAD_SIZE."""
    writers = [lane for lane in range(WARP_SIZE) if shape.writes_output(lane)]
    rows = np.concatenate([shape.value_rows_of_lane(lane) for lane in writers])
    assert sorted(rows[rows < shape.head_size]) == list(range(shape.head_size))
    assert len(writers) == shape.num_rows_per_iter


def test_partitions_cover_the_context_once() -> None:
    """S2-28: 512 tokens each; the last is short, those past the context are empty."""
    shape = KernelShape(head_size=64, partition_size=512)
    for length, count in ((1, 1), (511, 1), (512, 1), (513, 2), (4096, 8)):
        assert shape.num_partitions(length) == count
        tokens = [token for part in range(count + 2) for token in shape.partition_tokens(part, length)]
        assert tokens == list(range(length))
        assert len(shape.partition_tokens(count, length)) == 0


def test_shared_memory_holds_the_logits_or_half_the_warps_output() -> None:
    """S2-31: max(logits, half the warps x HEAD_SIZE), not the sum: it is used twice."""
    assert DOCUMENT.shared_floats(1000) == 1008  # whole blocks of logits
    assert DOCUMENT.shared_floats(1) == 2 * 128  # outputs of two warps
    assert KernelShape(head_size=128, num_threads=256).shared_floats(1) == 4 * 128
