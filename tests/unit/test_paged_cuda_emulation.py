"""The historical kernel, executed: each reduction, each address, and the result against plain attention."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.paged_cuda import cache_layout
from kernels.paged_cuda.emulation import launch, paged_attention_v1, paged_attention_v2
from kernels.paged_cuda.shape import IntArray, KernelShape
from kernels.paged_cuda.thread_block import (
    FLOAT_MIN,
    FloatArray,
    KernelInputs,
    KernelOutputs,
    ThreadBlock,
    cache_address,
    qk_dot,
)

EPSILON = float(np.finfo(np.float32).eps)


def problem(
    shape: KernelShape,
    context_lens: list[int],
    num_heads: int = 2,
    num_kv_heads: int = 1,
    unused: float = 0.0,
    seed: int = 0,
) -> tuple[KernelInputs, Any]:
    """Random inputs in shuffled blocks, and the exact answer [num_seqs, num_heads, head_size] in float64.

    Slots past a context, and three blocks that nobody owns, hold `unused`. q is a slice of a fused qkv.
    """
    rng = np.random.default_rng(seed)
    dtype: Any = {2: np.float16, 4: np.float32, 8: np.float64}[shape.itemsize]
    lens = np.array(context_lens, np.int32)
    counts = [shape.num_context_blocks(length) for length in context_lens]
    numbers = rng.permutation(sum(counts) + 3)
    tables = np.zeros((len(lens), max(counts)), np.int32)
    slots = len(numbers) * shape.block_size
    k = np.full((slots, num_kv_heads, shape.head_size), unused, dtype)
    v = np.full_like(k, unused)
    width = (num_heads + 2 * num_kv_heads) * shape.head_size
    qkv = rng.standard_normal((len(lens), width)).astype(dtype)
    q = qkv[:, : num_heads * shape.head_size].reshape(len(lens), num_heads, shape.head_size)
    assert q.base is not None
    scale = shape.head_size**-0.5
    exact = np.zeros(q.shape)
    taken = 0
    for seq, length in enumerate(context_lens):
        tables[seq, : counts[seq]] = numbers[taken : taken + counts[seq]]
        taken += counts[seq]
        position = np.arange(length)
        slot = tables[seq, position // shape.block_size] * shape.block_size + position % shape.block_size
        k[slot] = rng.standard_normal((length, num_kv_heads, shape.head_size))
        v[slot] = rng.standard_normal((length, num_kv_heads, shape.head_size))
        exact[seq] = softmax_attention(q[seq], k[slot], v[slot], scale)
    inputs = KernelInputs(
        q=q,
        k_cache=cache_layout.key_cache(k, shape.block_size),
        v_cache=cache_layout.value_cache(v, shape.block_size),
        physical_blocks=tables,
        context_lens=lens,
        scale=scale,
    )
    return inputs, exact


def softmax_attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    """m = max x, f = exp(x - m), l = sum f, softmax = f / l; float64, one head at a time."""
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        kv_head = head // (q.shape[0] // k.shape[1])
        x = k[:, kv_head].astype(np.float64) @ q[head].astype(np.float64) * scale
        f = np.exp(x - x.max())
        out[head] = f / f.sum() @ v[:, kv_head].astype(np.float64)
    return out


def tolerance(shape: KernelShape, length: int) -> float:
    """The 1e-6 guard of a sum (two with partitions), rounding of fp32 sums, and of logits cast to 16 bits."""
    guard = 2e-6 if shape.partition_size else 1e-6
    cast = float(np.finfo(np.float16).eps) if shape.itemsize == 2 else 0.0
    return 5 * (guard + 2 * cast + EPSILON * np.log2(length + 2) * 8)  # |V| of the draws stays below 5


def only_block(shape: KernelShape, inputs: KernelInputs, head: int = 0, seq: int = 0) -> ThreadBlock:
    return ThreadBlock(shape, inputs, head_idx=head, seq_idx=seq, partition_idx=0)


def outputs_for(inputs: KernelInputs, partitions: int = 1) -> KernelOutputs:
    num_seqs, num_heads, head_size = inputs.q.shape
    grid = (num_seqs, num_heads, partitions)
    return KernelOutputs(
        np.full((*grid, head_size), np.nan, np.float32),
        np.full(grid, np.nan, np.float32),
        np.full(grid, np.nan, np.float32),
    )


# --- inputs and layout -----------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_cache_layouts_lose_nothing(block_size: int, itemsize: int) -> None:
    """S2-02, S2-04: by slot → K split by x, V transposed → by slot is the identity."""
    rng = np.random.default_rng(1)
    dtype: Any = {2: np.float16, 4: np.float32}[itemsize]
    rows = rng.standard_normal((5 * block_size, 3, 64)).astype(dtype)
    k_cache = cache_layout.key_cache(rows, block_size)
    v_cache = cache_layout.value_cache(rows, block_size)
    x = 16 // itemsize
    assert k_cache.shape == (5, 3, 64 // x, block_size, x)
    assert v_cache.shape == (5, 3, 64, block_size)
    assert np.array_equal(cache_layout.keys_by_slot(k_cache), rows)
    assert np.array_equal(cache_layout.values_by_slot(v_cache), rows)
    slot = 3 * block_size + 5
    assert np.array_equal(k_cache[3, 2, :, 5].reshape(-1), rows[slot, 2])
    assert np.array_equal(v_cache[3, 2, :, 5], rows[slot, 2])


def test_each_sequence_has_one_query_and_its_own_context() -> None:
    """S2-01: a batch of decode tokens; every sequence's answer is the answer alone."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, exact = problem(shape, [1, 16, 17, 40])
    assert inputs.q.shape[0] == len(inputs.context_lens) == 4
    together = paged_attention_v1(shape, inputs)
    for seq in range(4):
        alone = replace(
            inputs,
            q=inputs.q[seq : seq + 1],
            physical_blocks=inputs.physical_blocks[seq : seq + 1],
            context_lens=inputs.context_lens[seq : seq + 1],
        )
        assert np.array_equal(paged_attention_v1(shape, alone)[0], together[seq])
        assert np.abs(together[seq] - exact[seq]).max() <= tolerance(shape, 40)


def test_a_thread_block_is_one_head_of_one_sequence_of_one_partition() -> None:
    """S2-07: the grid is (num_heads, num_seqs, max_num_partitions), each place visited once."""
    shape = KernelShape(head_size=32, itemsize=4, partition_size=16)
    inputs, _ = problem(shape, [40, 8], num_heads=2)
    visited: list[tuple[int, int, int]] = []

    class Recording(ThreadBlock):
        def run(self, outputs: KernelOutputs) -> None:
            visited.append((self.head_idx, self.seq_idx, self.partition_idx))

    launch(shape, inputs, Recording)
    assert sorted(visited) == [(h, s, p) for h in range(2) for s in range(2) for p in range(3)]


def test_q_may_be_a_slice_of_a_fused_product() -> None:
    """S2-10: q_ptr = q + seq_idx * q_stride + head_idx * HEAD_SIZE."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, _ = problem(shape, [5, 9], num_heads=4, num_kv_heads=2)
    assert inputs.q_stride == (4 + 2 * 2) * 32
    block = only_block(shape, inputs, head=3, seq=1)
    block.load_query()
    in_head_order = block.q_vecs.transpose(1, 0, 2).reshape(-1)
    assert np.array_equal(in_head_order, inputs.q[1, 3])
    contiguous = replace(inputs, q=np.ascontiguousarray(inputs.q))
    assert np.array_equal(paged_attention_v1(shape, contiguous), paged_attention_v1(shape, inputs))


# --- query times keys ------------------------------------------------------------------------------


def test_q_vecs_has_a_row_for_each_thread_of_a_group() -> None:
    """S2-11: q_vecs[THREAD_GROUP_SIZE][NUM_VECS_PER_THREAD]; row t holds vecs t, t + 2, .."""
    shape = KernelShape(head_size=128)
    inputs, _ = problem(shape, [3])
    block = only_block(shape, inputs)
    block.load_query()
    assert block.q_vecs.shape == (2, 16, 4)
    vecs = inputs.q[0, 0].astype(np.float32).reshape(32, 4)
    assert np.array_equal(block.q_vecs[0], vecs[0::2])
    assert np.array_equal(block.q_vecs[1], vecs[1::2])


def test_every_group_of_a_warp_has_the_same_query_and_another_key() -> None:
    """S2-09: 16 groups, 16 tokens of one block."""
    shape = KernelShape(head_size=128)
    inputs, _ = problem(shape, [64])
    block = only_block(shape, inputs)
    tokens = block.key_tokens(warp=1)
    assert np.array_equal(tokens, np.repeat(np.arange(16), 2))


def test_key_addresses_are_those_of_the_token_in_its_physical_block() -> None:
    """S2-12: k_ptr = block * kv_block_stride + kv_head * kv_head_stride + offset_in_block * x."""
    shape = KernelShape(head_size=64, itemsize=4)
    inputs, _ = problem(shape, [50], num_heads=6, num_kv_heads=3)
    block = only_block(shape, inputs, head=5)
    keys = cache_layout.keys_by_slot(inputs.k_cache)
    memory = inputs.k_cache.reshape(-1)
    for block_idx in range(4):
        read = memory[block.key_addresses(0, block_idx)]  # [32, num_vecs_per_thread, vec_size]
        for lane in range(32):
            slot = inputs.physical_blocks[0, block_idx] * 16 + lane // 2
            assert np.array_equal(read[lane], keys[slot, 2][shape.elements_of_thread(lane % 2)])


def test_neighbouring_threads_read_neighbouring_keys() -> None:
    """S2-13: in each inner iteration a warp reads 32 x 4 elements in one stretch (coalescing)."""
    shape = KernelShape(head_size=128)
    inputs, _ = problem(shape, [16])
    addresses = only_block(shape, inputs).key_addresses(0, 0)
    for iteration in range(shape.num_vecs_per_thread):
        stretch = addresses[:, iteration].reshape(-1)
        assert np.array_equal(stretch, stretch[0] + np.arange(32 * 4))


def test_each_key_and_value_element_is_read_once() -> None:
    """S2-13, S2-22: K goes to registers, as one thread reads it once; V likewise."""
    shape = KernelShape(head_size=32)
    inputs, _ = problem(shape, [70], num_heads=1)
    reads = {id_: np.zeros(inputs.k_cache.size, np.int64) for id_ in ("k", "v")}

    class Watching(ThreadBlock):
        def load(self, memory: Any, addresses: IntArray) -> FloatArray:
            if memory.base is self.inputs.k_cache or memory.base is self.inputs.k_cache.base:
                np.add.at(reads["k"], addresses.reshape(-1), 1)
            elif memory.base is self.inputs.v_cache or memory.base is self.inputs.v_cache.base:
                np.add.at(reads["v"], addresses.reshape(-1), 1)
            return super().load(memory, addresses)

    launch(shape, inputs, Watching)
    used = np.isin(np.arange(inputs.k_cache.shape[0]), inputs.physical_blocks[0])
    per_block = shape.block_size * shape.head_size
    for counts in reads.values():
        assert np.array_equal(counts.reshape(-1, per_block), np.repeat(used[:, None], per_block, axis=1))


def test_qk_is_the_product_of_the_whole_head() -> None:
    """S2-14: a thread multiplies 64 elements, the group's reduction returns all 128 to both threads."""
    shape = KernelShape(head_size=128)
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 128)).astype(np.float32)
    mine = np.stack([shape.elements_of_thread(lane % 2) for lane in range(32)])
    result = qk_dot(q[mine], k[mine], shape.thread_group_size)
    half = float(q[mine[0]].reshape(-1) @ k[mine[0]].reshape(-1))
    rounding = 128 * EPSILON * float(np.abs(q * k).sum())
    assert abs(result[0] - float(q @ k)) <= rounding
    assert abs(half - float(q @ k)) > 100 * rounding
    assert (result == result[0]).all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (5, 1), (14, 2), (4, 4)])
def test_heads_of_a_group_share_a_kv_head(num_heads: int, num_kv_heads: int) -> None:
    """S2-15: kv_head_idx = head_idx / (num_heads / num_kv_heads)."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, exact = problem(shape, [19], num_heads, num_kv_heads)
    mapped = [only_block(shape, inputs, head).kv_head_idx for head in range(num_heads)]
    assert mapped == [kv for kv in range(num_kv_heads) for _ in range(num_heads // num_kv_heads)]
    assert np.abs(paged_attention_v1(shape, inputs) - exact).max() <= tolerance(shape, 19)


# --- softmax ---------------------------------------------------------------------------------------


def test_logits_are_fp32_in_shared_memory_one_per_token() -> None:
    """S2-16: entry token_idx - start_token_idx is scale * q.k; padding up to the block's end is masked."""
    shape = KernelShape(head_size=64, itemsize=4, partition_size=32)
    inputs, _ = problem(shape, [45], num_heads=1)
    block = ThreadBlock(shape, inputs, head_idx=0, seq_idx=0, partition_idx=1)
    block.load_query()
    for warp in range(4):
        block.multiply_keys(warp)
    assert block.logits.dtype == np.float32
    keys = cache_layout.keys_by_slot(inputs.k_cache)[:, 0]
    for position in range(32, 45):
        slot = inputs.physical_blocks[0, position // 16] * 16 + position % 16
        exact = float(keys[slot].astype(np.float64) @ inputs.q[0, 0]) * inputs.scale
        assert abs(block.logits[position - 32] - exact) <= 64 * EPSILON * 8
    assert (block.logits[13:16] == 0).all()
    assert np.isnan(block.logits[16:]).all()  # no thread group of this partition wrote further


def test_masked_tokens_write_zero_and_leave_the_maximum() -> None:
    """S2-17: token_idx >= context_len; with all real logits negative a masked 0 would win."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, _ = problem(shape, [3], num_heads=1)
    keys = np.zeros((inputs.k_cache.shape[0] * 16, 1, 32), np.float32)
    keys[:] = -inputs.q[0, 0]  # every product is negative
    inputs = replace(inputs, k_cache=cache_layout.key_cache(keys, 16))
    block = only_block(shape, inputs)
    block.load_query()
    for warp in range(4):
        block.multiply_keys(warp)
    assert (block.logits[:3] < 0).all()
    assert (block.logits[3:16] == 0).all()
    block.reduce_qk_max()
    assert (block.qk_max == block.logits[:3].max()).all()


def test_qk_max_reaches_every_thread() -> None:
    """S2-18: in-warp shuffles down to the group size, warp leaders through red_smem, then all threads."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, _ = problem(shape, [100], num_heads=1)
    block = only_block(shape, inputs)
    block.load_query()
    for warp in range(4):
        block.multiply_keys(warp)
    by_warp = block.qk_max.max(axis=1)
    assert (block.qk_max[:, 1::2] == FLOAT_MIN).all()  # only thread 0 of each group keeps a maximum
    block.reduce_qk_max()
    assert np.array_equal(block.red_smem[:4], by_warp)
    assert block.qk_max.shape == (4, 32)
    assert (block.qk_max == block.logits[:100].max()).all()


def test_exp_sum_counts_real_tokens_only() -> None:
    """S2-19: the second pass runs over num_tokens; 13 masked zeros would add 13 * exp(-qk_max)."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, _ = problem(shape, [35], num_heads=1)
    block = only_block(shape, inputs)
    block.load_query()
    for warp in range(4):
        block.multiply_keys(warp)
    block.reduce_qk_max()
    qk = block.logits[:35].astype(np.float64)
    for warp in range(4):
        block.exponentiate(warp)
    values = np.exp(qk - qk.max())
    assert np.abs(block.logits[:35] - values).max() <= 4 * EPSILON * 4
    total = block.block_sum(block.exp_sum)
    assert abs(total - values.sum()) <= 35 * EPSILON * values.sum()
    assert total >= 1


def test_the_guard_of_the_sum_costs_at_most_a_millionth() -> None:
    """S2-20: inv_sum = 1 / (exp_sum + 1e-6); exp_sum >= 1, so the relative error is <= 1e-6."""
    for exp_sum in (1.0, 1.5, 2.0, 1e3, 1e6):
        exact, guarded = 1 / exp_sum, 1 / (exp_sum + 1e-6)
        assert 0 < (exact - guarded) / exact <= 1e-6
    shape = KernelShape(head_size=32, itemsize=4)
    for length in (1, 7, 300):
        inputs, _ = problem(shape, [length], num_heads=1)
        block = only_block(shape, inputs)
        block.run(outputs_for(inputs))
        exp_sum = float(block.exp_sum[0, 0])
        total = exp_sum / (exp_sum + 1e-6)
        probabilities = ThreadBlock(shape, inputs, 0, 0, 0)
        probabilities.load_query()
        for warp in range(4):
            probabilities.multiply_keys(warp)
        probabilities.reduce_qk_max()
        for warp in range(4):
            probabilities.exponentiate(warp)
        probabilities.normalize()
        summed = float(probabilities.logits[:length].sum(dtype=np.float64))
        assert abs(summed - total) <= 8 * EPSILON
        assert abs(summed - 1) <= 1e-6 + 8 * EPSILON


def test_the_softmax_is_the_definition() -> None:
    """S2-21: m = max x, f = exp(x - m), l = sum f, softmax = f / l."""
    shape = KernelShape(head_size=64, itemsize=4)
    inputs, exact = problem(shape, [200], num_heads=3)
    # Logits of a hundred would overflow exp in fp32 without the maximum.
    steep = replace(inputs, q=inputs.q * np.float32(100))
    keys = cache_layout.keys_by_slot(inputs.k_cache)
    values = cache_layout.values_by_slot(inputs.v_cache)
    position = np.arange(200)
    slot = inputs.physical_blocks[0, position // 16] * 16 + position % 16
    wanted = softmax_attention(steep.q[0], keys[slot], values[slot], inputs.scale)
    ours = paged_attention_v1(shape, steep)
    logit_error = 64 * EPSILON * 800  # of a product of 64 elements, magnitude of the logits included
    assert np.abs(ours[0] - wanted).max() <= 5 * (2 * logit_error + 1e-6)
    assert np.abs(paged_attention_v1(shape, inputs) - exact).max() <= tolerance(shape, 200)


# --- values and output -----------------------------------------------------------------------------


def test_accumulators_are_sums_over_the_tokens_of_a_lane() -> None:
    """S2-23: accs[i] += dot(logits_vec, v_vec), fp32; before the shuffles a lane has its 4 columns only."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, _ = problem(shape, [16], num_heads=1)
    block = only_block(shape, inputs)
    block.shared[:16] = np.arange(16) / 16  # logits
    block.multiply_values(0)
    assert block.accs.dtype == np.float32
    assert shape.v_vec_size == shape.num_v_vecs_per_row == 4
    values = cache_layout.values_by_slot(inputs.v_cache)[inputs.physical_blocks[0, 0] * 16 + np.arange(16), 0]
    wanted = np.arange(16) / 16 @ values.astype(np.float64)
    for lane in range(32):
        mine = wanted[shape.value_rows_of_lane(lane)]
        assert np.abs(block.accs[0, lane] - mine).max() <= 16 * EPSILON * 16


def test_the_lanes_of_a_row_and_then_the_warps_are_added() -> None:
    """S2-25: xor shuffles over NUM_V_VECS_PER_ROW lanes, then halves of the warps through shared memory."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, exact = problem(shape, [128], num_heads=1)
    block = only_block(shape, inputs)
    outputs = outputs_for(inputs)
    block.run(outputs)
    by_row = block.accs.reshape(4, 8, 4, 4)  # [warp, row in iteration, lane of the row, accumulator]
    assert (by_row[3] == by_row[3, :, :1]).all()  # the last warp only handed over
    in_order = by_row[0, :, 0].T.reshape(-1)
    assert np.array_equal(in_order, outputs.out[0, 0, 0])
    assert np.abs(in_order - exact[0, 0]).max() <= tolerance(shape, 128)


def test_each_thread_block_writes_head_size_elements_at_its_own_address() -> None:
    """S2-26: out + seq * heads * partitions * HEAD + head * partitions * HEAD + partition * HEAD."""
    shape = KernelShape(head_size=120, itemsize=4, partition_size=16)  # 120: the last rows are idle
    inputs, _ = problem(shape, [40, 20], num_heads=3)
    outputs = outputs_for(inputs, partitions=4)
    for seq, head, part in [(1, 2, 0), (1, 2, 1), (0, 1, 2)]:
        before = outputs.out.copy()
        block = ThreadBlock(shape, inputs, head, seq, part)
        assert block.output_address(outputs) == ((seq * 3 + head) * 4 + part) * 120
        block.run(outputs)
        changed = np.flatnonzero(~np.isclose(before, outputs.out, equal_nan=True))
        first = block.output_address(outputs)
        assert np.array_equal(changed, first + np.arange(120))


@pytest.mark.parametrize("length", [1, 511, 512, 513])
def test_partitioned_equals_whole_equals_plain_attention(length: int) -> None:
    """S2-28: v2 = v1 = reference at the edges of a partition of 512 tokens."""
    v1 = KernelShape(head_size=64, itemsize=4)
    v2 = replace(v1, partition_size=512)
    inputs, exact = problem(v1, [length], num_heads=2)
    whole, parts = paged_attention_v1(v1, inputs), paged_attention_v2(v2, inputs)
    assert np.abs(whole - exact).max() <= tolerance(v1, length)
    assert np.abs(parts - exact).max() <= tolerance(v2, length)
    if length <= 512:  # one partition: a plain copy
        assert np.array_equal(whole, parts)


def test_partitioned_equals_whole_at_4096_tokens() -> None:
    """S2-28: eight partitions of 512 tokens."""
    v1 = KernelShape(head_size=32, itemsize=4)
    v2 = replace(v1, partition_size=512)
    inputs, exact = problem(v1, [4096], num_heads=1)
    assert np.abs(paged_attention_v1(v1, inputs) - exact).max() <= tolerance(v1, 4096)
    assert np.abs(paged_attention_v2(v2, inputs) - exact).max() <= tolerance(v2, 4096)


def test_the_reduce_kernel_guards_its_sum_too() -> None:
    """S2-28: one dominant token, V all ones: 1 / (1 + 1e-6) in the partition and again between them."""
    shape = KernelShape(head_size=32, itemsize=4, partition_size=16)
    inputs, _ = problem(shape, [32], num_heads=1)
    keys = np.zeros((inputs.k_cache.shape[0] * 16, 1, 32), np.float32)
    keys[inputs.physical_blocks[0, 0] * 16] = 100 * inputs.q[0, 0]
    inputs = replace(inputs, k_cache=cache_layout.key_cache(keys, 16), v_cache=np.ones_like(inputs.v_cache))
    assert np.abs(paged_attention_v2(shape, inputs) - (1 - 2e-6)).max() <= 4 * EPSILON
    whole = paged_attention_v1(replace(shape, partition_size=0), inputs)
    assert np.abs(whole - (1 - 1e-6)).max() <= 4 * EPSILON


def test_partitions_past_the_context_write_nothing() -> None:
    """S2-28: max_logits, exp_sums and out of a partition that exits at once stay as they were."""
    shape = KernelShape(head_size=32, itemsize=4, partition_size=16)
    inputs, exact = problem(shape, [17, 100], num_heads=2)
    parts = launch(shape, inputs)
    assert parts.out.shape == (2, 2, 7, 32)
    assert np.isnan(parts.out[0, :, 2:]).all()
    assert np.isnan(parts.max_logits[0, :, 2:]).all()
    assert np.isnan(parts.exp_sums[0, :, 2:]).all()
    assert np.isfinite(parts.out[0, :, :2]).all()
    assert np.isfinite(parts.out[1]).all()
    assert np.abs(paged_attention_v2(shape, inputs) - exact).max() <= tolerance(shape, 100)


def test_a_pool_full_of_nan_changes_nothing() -> None:
    """S2-29, H12: unused slots and foreign blocks hold NaN; results are bitwise those of a zeroed pool."""
    for shape in (
        KernelShape(head_size=64),
        KernelShape(head_size=64, itemsize=4),
        KernelShape(head_size=64, itemsize=4, partition_size=16),
    ):
        run = paged_attention_v2 if shape.partition_size else paged_attention_v1
        lens = [1, 15, 16, 17, 33]
        clean, _ = problem(shape, lens, unused=0.0)
        dirty, _ = problem(shape, lens, unused=np.nan)
        assert np.isnan(dirty.v_cache).any()
        assert np.array_equal(run(shape, dirty), run(shape, clean))


def test_without_zeroing_v_past_the_context_the_answer_is_nan() -> None:
    """S2-29: the zeroing is what saves the result, as 0 * NaN is NaN."""

    class Careless(ThreadBlock):
        def zero_past_context(self, v_vec: FloatArray, token_idx: IntArray) -> FloatArray:
            return v_vec

    shape = KernelShape(head_size=32, itemsize=4)
    inputs, _ = problem(shape, [17], unused=np.nan)
    assert np.isnan(launch(shape, inputs, Careless).out).all()


def test_block_numbers_are_widened_before_they_are_multiplied() -> None:
    """S2-30, H13: 8 KV heads of 128 pass 2^31 bytes at 1.05 million tokens, 2^31 elements at 2.1 million."""
    tokens = 2**31 // (8 * 128 * 2)
    assert tokens == 1_048_576
    number = np.int32(2 * tokens // 16 + 1)  # a block just past 2^31 elements
    block_stride = 8 * 128 * 16
    assert cache_address(number, block_stride, kv_head_idx=7, head_stride=128 * 16) == (
        (2 * tokens // 16 + 1) * block_stride + 7 * 128 * 16
    )
    wrapped = np.array([number], np.int32) * np.int32(block_stride)
    assert wrapped[0] < 2**31 < int(number) * block_stride  # what 32 bits would have made of it


def test_the_barrier_between_lv_and_output_is_needed() -> None:
    """S2-31: shared memory is used again; a warp that hands over early spoils logits still in use."""
    shape = KernelShape(head_size=64, itemsize=4)
    inputs, exact = problem(shape, [128], num_heads=1)

    def finish(hand_over_early: bool) -> Any:
        block, outputs = only_block(shape, inputs), outputs_for(inputs)
        block.load_query()
        for warp in range(4):
            block.multiply_keys(warp)
        block.reduce_qk_max()
        for warp in range(4):
            block.exponentiate(warp)
        block.normalize()
        for warp in (2, 3, 0, 1):
            block.multiply_values(warp)
            if hand_over_early and warp == 2:
                block.hand_over(2, 0)
        block.reduce_across_warps()
        block.store_output(outputs)
        return outputs.out[0, 0, 0]

    assert np.abs(finish(hand_over_early=False) - exact[0, 0]).max() <= tolerance(shape, 128)
    assert np.abs(finish(hand_over_early=True) - exact[0, 0]).max() > 1e-2


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("num_threads", [32, 128])
def test_every_compiled_shape_computes_attention(block_size: int, itemsize: int, num_threads: int) -> None:
    """S2-05, S2-32: block sizes, element sizes and thread counts against plain attention."""
    for head_size in (32, 80, 120, 256):
        shape = KernelShape(head_size, block_size, num_threads, itemsize=itemsize)
        inputs, exact = problem(shape, [1, block_size, block_size + 1, 3 * block_size - 1])
        assert np.abs(paged_attention_v1(shape, inputs) - exact).max() <= tolerance(shape, 3 * block_size)


def test_inputs_that_do_not_fit_are_refused_by_name() -> None:
    """S2-02: every array is checked before the first address is computed."""
    shape = KernelShape(head_size=32, itemsize=4)
    inputs, _ = problem(shape, [5, 9], num_heads=4, num_kv_heads=2)
    wrong: list[tuple[str, KernelInputs]] = [
        ("q has shape", replace(inputs, q=inputs.q[..., :16])),
        ("k_cache has shape", replace(inputs, k_cache=inputs.k_cache[:, :, :2])),
        ("v_cache has shape", replace(inputs, v_cache=inputs.v_cache[:, :, :, :8])),
        ("q has 3 heads", replace(inputs, q=inputs.q[:, :3])),
        ("strides", replace(inputs, q=inputs.q[:, :, ::-1])),
        ("context_lens", replace(inputs, context_lens=np.array([0, 9], np.int32))),
        ("context_lens", replace(inputs, context_lens=np.array([5, 17], np.int32))),
    ]
    for message, bad in wrong:
        with pytest.raises(ValueError, match=message):
            paged_attention_v1(shape, bad)
    with pytest.raises(ValueError, match="elements of 4 bytes"):
        paged_attention_v1(shape, replace(inputs, q=inputs.q.astype(np.float16)))
