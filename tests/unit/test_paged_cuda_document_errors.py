"""The mistakes in the document of the historical kernel, each named and shown not to be reproduced."""

from typing import Any

import numpy as np

from kernels.paged_cuda import cache_layout, emulation
from kernels.paged_cuda.shape import KernelShape
from kernels.paged_cuda.thread_block import KernelInputs

DOCUMENT = KernelShape(head_size=128, block_size=16, num_threads=128, itemsize=2)


def random_inputs(shape: KernelShape, context_len: int) -> KernelInputs:
    """One sequence, two heads over one KV head, blocks in reverse order."""
    rng = np.random.default_rng(0)
    num_blocks = shape.num_context_blocks(context_len)
    slots = num_blocks * shape.block_size
    dtype: Any = {2: np.float16, 4: np.float32}[shape.itemsize]

    def normal(*size: int) -> Any:
        return rng.standard_normal(size).astype(dtype)

    return KernelInputs(
        q=normal(1, 2, shape.head_size),
        k_cache=cache_layout.key_cache(normal(slots, 1, shape.head_size), shape.block_size),
        v_cache=cache_layout.value_cache(normal(slots, 1, shape.head_size), shape.block_size),
        physical_blocks=np.arange(num_blocks, dtype=np.int32)[None, ::-1],
        context_lens=np.array([context_len], np.int32),
        scale=shape.head_size**-0.5,
    )


def test_error_a_a_partition_is_context_tokens_and_not_gpus() -> None:
    """S2-28, error (a): PARTITION_SIZE counts tokens of the context; 0 turns partitions off."""
    assert KernelShape(head_size=128, partition_size=0).num_partitions(100_000) == 1
    shape = KernelShape(head_size=128, partition_size=512)
    parts = [shape.partition_tokens(part, 1025) for part in range(shape.num_partitions(1025))]
    assert parts == [range(512), range(512, 1024), range(1024, 1025)]


def test_error_b_accumulators_of_thread_0_are_rows_0_16_to_112() -> None:
    """S2-23, error (b): 'elements 0, 32, .. 224' cannot be, a head has 128."""
    assert DOCUMENT.num_v_vecs_per_row == 2
    assert DOCUMENT.num_rows_per_iter == 16
    assert list(DOCUMENT.value_rows_of_lane(0)) == [0, 16, 32, 48, 64, 80, 96, 112]
    assert max(DOCUMENT.value_rows_of_lane(31)) == 127


def test_error_c_the_output_is_written_and_the_inputs_are_not() -> None:
    """S2-02, error (c): `out` is no const pointer; q, k_cache and v_cache are."""
    inputs = random_inputs(DOCUMENT, context_len=20)
    for array in (inputs.q, inputs.k_cache, inputs.v_cache, inputs.physical_blocks, inputs.context_lens):
        array.setflags(write=False)
    outputs = emulation.launch(DOCUMENT, inputs)
    assert outputs.out.shape == (1, 2, 1, 128)
    assert np.isfinite(outputs.out).all()


def test_error_d_a_warp_takes_16_tokens_and_not_16_blocks() -> None:
    """S2-08, error (d): the left half of the document's drawing is one block, the tokens of warp 0."""
    groups_of_a_warp = 32 // DOCUMENT.thread_group_size
    assert groups_of_a_warp == DOCUMENT.block_size == 16
    assert list(DOCUMENT.blocks_of_warp(0, range(16))) == [0]


def test_error_e_elements_are_shared_out_by_vec() -> None:
    """S2-13, error (e): 0, 2, 4, 6 for thread 0 holds only where a vec is a single element."""
    assert list(DOCUMENT.elements_of_thread(0).reshape(-1)[:8]) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert list(DOCUMENT.elements_of_thread(1).reshape(-1)[:8]) == [4, 5, 6, 7, 12, 13, 14, 15]
    single = KernelShape(head_size=32, block_size=16, itemsize=8)
    assert single.vec_size == 1
    assert list(single.elements_of_thread(0).reshape(-1)[:4]) == [0, 2, 4, 6]
    assert list(single.elements_of_thread(1).reshape(-1)[:4]) == [1, 3, 5, 7]


def test_error_f_the_sources_are_named_as_they_were() -> None:
    """S2-27, error (f): a .cuh with v1 and v2, no attention_kernels.cu; authors and venue are named."""
    text = " ".join((emulation.__doc__ or "").split())
    assert "attention_kernels.cuh, paged_attention_v1.cu and paged_attention_v2.cu" in text
    assert "attention_kernels.cu," not in text
    assert "Kwon et al." in text
    assert "SOSP 2023" in text
    assert "historical" in text
