"""One thread block of the historical kernel: registers, shared memory, shuffles, addresses.

Owns what one thread block holds while it runs. Which thread touches which data is in shape.py; the grid
and the order of the kernels in emulation.py. Statements of one method of ThreadBlock run without a
barrier between warps; run() places the barriers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.paged_cuda.shape import WARP_SIZE, IntArray, KernelShape

Array = NDArray[Any]
FloatArray = NDArray[np.float32]

FLOAT_MIN = np.float32(-np.finfo(np.float32).max)
SUM_GUARD = np.float32(1e-6)  # added to every sum before it divides
LANES = np.arange(WARP_SIZE)


@dataclass(frozen=True, slots=True)
class KernelInputs:
    """What a launch reads. Memory of q may be a slice of a fused qkv: its row stride is its own."""

    q: Array  # [num_seqs, num_heads, head_size]
    k_cache: Array  # [num_blocks, num_kv_heads, head_size / x, block_size, x]
    v_cache: Array  # [num_blocks, num_kv_heads, head_size, block_size]
    physical_blocks: NDArray[np.int32]  # [num_seqs, max_blocks]: block number of each logical block
    context_lens: NDArray[np.int32]  # [num_seqs]
    scale: float

    @property
    def q_stride(self) -> int:
        """Elements from one sequence's query to the next."""
        return self.q.strides[0] // self.q.itemsize

    @property
    def q_memory(self) -> Array:
        """q and what lies between its rows, as the pointer sees it."""
        num_seqs, num_heads, head_size = self.q.shape
        size = (num_seqs - 1) * self.q_stride + num_heads * head_size
        memory: Array = np.lib.stride_tricks.as_strided(self.q, (size,), (self.q.itemsize,), writeable=False)
        return memory


@dataclass(frozen=True, slots=True)
class KernelOutputs:
    """What a launch writes; the last two only when the context is partitioned."""

    out: Array  # [num_seqs, num_heads, max_num_partitions, head_size]
    max_logits: FloatArray  # [num_seqs, num_heads, max_num_partitions]
    exp_sums: FloatArray  # [num_seqs, num_heads, max_num_partitions]


def shuffle_xor(registers: FloatArray, mask: int) -> FloatArray:
    """The register of lane ^ mask, for each lane: registers [32, ...]."""
    others: FloatArray = registers[LANES ^ mask]
    return others


def shuffle_max(registers: FloatArray, first: int, last: int) -> FloatArray:
    """Maximum over lanes by xor shuffles with masks first, first / 2, .. last."""
    mask = first
    while mask >= last:
        registers = np.maximum(registers, shuffle_xor(registers, mask))
        mask //= 2
    return registers


def shuffle_sum(registers: FloatArray, first: int, last: int = 1) -> FloatArray:
    """Sum over lanes by xor shuffles with masks first, first / 2, .. last."""
    mask = first
    while mask >= last:
        registers = registers + shuffle_xor(registers, mask)
        mask //= 2
    return registers


def qk_dot(q_vecs: FloatArray, k_vecs: FloatArray, thread_group_size: int) -> FloatArray:
    """[32]: dot product over the whole head, known to every lane of a thread group.

    q_vecs, k_vecs [32, num_vecs_per_thread, vec_size]: each lane multiplies its own part, then the
    group adds up its lanes.
    """
    partial = (q_vecs * k_vecs).sum(axis=(1, 2), dtype=np.float32)
    return shuffle_sum(partial, thread_group_size // 2)


def cache_address(number: np.int32, block_stride: int, kv_head_idx: int, head_stride: int) -> int:
    """Element offset of one head of one block. 64 bits before the product: a pool passes 2^31 elements."""
    return int(np.int64(number) * np.int64(block_stride) + np.int64(kv_head_idx) * np.int64(head_stride))


class ThreadBlock:
    """One head, one sequence, one partition. Registers have axes [warp, lane, ...]."""

    def __init__(
        self, shape: KernelShape, inputs: KernelInputs, head_idx: int, seq_idx: int, partition_idx: int
    ) -> None:
        self.shape, self.inputs = shape, inputs
        self.head_idx, self.seq_idx, self.partition_idx = head_idx, seq_idx, partition_idx
        num_kv_heads = inputs.k_cache.shape[1]
        self.kv_head_idx = head_idx // (inputs.q.shape[1] // num_kv_heads)
        self.context_len = int(inputs.context_lens[seq_idx])
        self.tokens = shape.partition_tokens(partition_idx, self.context_len)
        self.group_offset: IntArray = LANES % shape.thread_group_size  # the lane's place in its group
        # Shared memory starts as NaN: whatever is read must have been written.
        self.q_vecs: FloatArray = np.full(
            (shape.thread_group_size, shape.num_vecs_per_thread, shape.vec_size), np.nan, np.float32
        )
        self.shared: FloatArray = np.full(shape.shared_floats(len(self.tokens)), np.nan, np.float32)
        self.red_smem: FloatArray = np.full(2 * shape.num_warps, np.nan, np.float32)
        registers = (shape.num_warps, WARP_SIZE)
        self.qk_max: FloatArray = np.full(registers, FLOAT_MIN, np.float32)
        self.exp_sum: FloatArray = np.zeros(registers, np.float32)
        self.accs: FloatArray = np.zeros((*registers, shape.num_rows_per_thread), np.float32)

    @property
    def logits(self) -> FloatArray:
        """One fp32 entry per context token of the partition, at token_idx - start_token_idx."""
        return self.shared

    def run(self, outputs: KernelOutputs) -> None:
        """The whole kernel: each step is finished by all warps before the next begins."""
        if not self.tokens:
            return  # a partition past the context
        warps = range(self.shape.num_warps)
        self.load_query()
        for warp in warps:
            self.multiply_keys(warp)
        self.reduce_qk_max()
        for warp in warps:
            self.exponentiate(warp)
        self.normalize()
        self.store_partition(outputs)
        for warp in warps:
            self.multiply_values(warp)
        # Without a barrier here a fast warp would write its output over logits still in use.
        self.reduce_across_warps()
        self.store_output(outputs)

    # --- query -------------------------------------------------------------------------------------

    def load_query(self) -> None:
        """q_vecs[thread_group_offset][i]: neighbouring threads read neighbouring memory."""
        shape = self.shape
        q_ptr = self.seq_idx * self.inputs.q_stride + self.head_idx * shape.head_size
        for thread_idx in range(shape.num_threads):
            group_idx, group_offset = divmod(thread_idx, shape.thread_group_size)
            elements = shape.elements_of_thread(group_offset)
            for i in range(group_idx, shape.num_vecs_per_thread, shape.num_thread_groups):
                self.q_vecs[group_offset, i] = self.load(self.inputs.q_memory, q_ptr + elements[i])

    # --- query times keys --------------------------------------------------------------------------

    def multiply_keys(self, warp: int) -> None:
        """logits and the running qk_max of one warp's blocks: a thread group per key token."""
        start = self.tokens.start
        is_leader = self.group_offset == 0
        for block_idx in self.shape.blocks_of_warp(warp, self.tokens):
            block_offset = self.key_tokens(warp)
            k_vecs = self.load(self.inputs.k_cache.reshape(-1), self.key_addresses(warp, block_idx))
            dot = qk_dot(self.q_vecs[self.group_offset], k_vecs, self.shape.thread_group_size)
            qk = np.float32(self.inputs.scale) * dot
            token_idx = block_idx * self.shape.block_size + block_offset
            mask = token_idx >= self.context_len
            self.logits[token_idx[is_leader] - start] = np.where(mask, np.float32(0), qk)[is_leader]
            seen = is_leader & ~mask
            self.qk_max[warp, seen] = np.maximum(self.qk_max[warp, seen], qk[seen])

    def key_tokens(self, warp: int) -> IntArray:
        """[32]: offset in the block of the key token of each lane's group."""
        thread_idx = warp * WARP_SIZE + LANES
        return thread_idx // self.shape.thread_group_size % self.shape.block_size

    def key_addresses(self, warp: int, block_idx: int) -> IntArray:
        """[32, num_vecs_per_thread, vec_size]: elements of k_cache that each lane keeps in k_vecs."""
        k_ptr = self.block_address(self.inputs.k_cache, block_idx) + self.key_tokens(warp) * self.shape.x
        offsets = np.stack([self.shape.key_offsets(offset) for offset in range(self.shape.thread_group_size)])
        return k_ptr[:, None, None] + offsets[self.group_offset]

    # --- softmax -----------------------------------------------------------------------------------

    def reduce_qk_max(self) -> None:
        """The largest qk of the whole thread block, in every thread."""
        num_warps = self.shape.num_warps
        for warp in range(num_warps):
            # Lanes of one group hold one value: the last mask is the group's size.
            in_warp = shuffle_max(self.qk_max[warp], WARP_SIZE // 2, self.shape.thread_group_size)
            self.red_smem[warp] = in_warp[0]
        leaders = np.full(WARP_SIZE, FLOAT_MIN, np.float32)
        leaders[:num_warps] = self.red_smem[:num_warps]
        self.qk_max[:] = shuffle_max(leaders, num_warps // 2, 1)[0]

    def exponentiate(self, warp: int) -> None:
        """logits[i] = exp(logits[i] - qk_max) over real tokens only; masked entries never count."""
        for i in range(0, len(self.tokens), self.shape.num_threads):
            index = i + warp * WARP_SIZE + LANES
            active = index < len(self.tokens)
            value = np.exp(self.logits[index[active]] - self.qk_max[warp, active])
            self.logits[index[active]] = value
            self.exp_sum[warp, active] += value

    def normalize(self) -> None:
        """exp_sum of the thread block, then the division of every logit."""
        self.exp_sum[:] = self.block_sum(self.exp_sum)
        inv_sum = np.float32(1) / (self.exp_sum[0, 0] + SUM_GUARD)
        self.logits[: len(self.tokens)] *= inv_sum

    def block_sum(self, registers: FloatArray) -> np.float32:
        """Sum over all threads: within warps, their first lanes through red_smem, then across."""
        num_warps = self.shape.num_warps
        for warp in range(num_warps):
            self.red_smem[num_warps + warp] = shuffle_sum(registers[warp], WARP_SIZE // 2)[0]
        leaders = np.zeros(WARP_SIZE, np.float32)
        leaders[:num_warps] = self.red_smem[num_warps:]
        total: np.float32 = shuffle_sum(leaders, num_warps // 2)[0]
        return total

    # --- logits times values -----------------------------------------------------------------------

    def multiply_values(self, warp: int) -> None:
        """accs of one warp: outer loop over its blocks, inner loop over rows of V, then the row's lanes."""
        shape, dtype = self.shape, self.inputs.v_cache.dtype
        columns = np.stack([shape.value_tokens_of_lane(lane) for lane in range(WARP_SIZE)])
        rows = np.stack([shape.value_rows_of_lane(lane) for lane in range(WARP_SIZE)])
        for block_idx in shape.blocks_of_warp(warp, self.tokens):
            token_idx = block_idx * shape.block_size + columns
            logits_vec = self.logits[token_idx - self.tokens.start].astype(dtype).astype(np.float32)
            v_ptr = self.block_address(self.inputs.v_cache, block_idx)
            for i in range(shape.num_rows_per_thread):
                lanes = np.flatnonzero(rows[:, i] < shape.head_size)
                addresses = v_ptr + rows[lanes, i, None] * shape.block_size + columns[lanes]
                v_vec = self.load(self.inputs.v_cache.reshape(-1), addresses)
                v_vec = self.zero_past_context(v_vec, token_idx[lanes])
                self.accs[warp, lanes, i] += (logits_vec[lanes] * v_vec).sum(axis=1, dtype=np.float32)
        self.accs[warp] = shuffle_sum(self.accs[warp], shape.num_v_vecs_per_row // 2)

    def zero_past_context(self, v_vec: FloatArray, token_idx: IntArray) -> FloatArray:
        """V of tokens past the context may be anything, NaN included, and 0 * NaN is NaN."""
        return np.where(token_idx < self.context_len, v_vec, np.float32(0))

    # --- output ------------------------------------------------------------------------------------

    def reduce_across_warps(self) -> None:
        """Upper half of the warps hands its accs to the lower half, until warp 0 has the sum."""
        remaining = self.shape.num_warps
        while remaining > 1:
            half = remaining // 2
            for warp in range(half, remaining):
                self.hand_over(warp, warp - half)
            for warp in range(half):
                self.take_over(warp)
            remaining = half

    def hand_over(self, warp: int, place: int) -> None:
        """Writes a warp's accs to shared memory, which held the logits before."""
        lanes, rows = self.output_rows()
        self.shared[place * self.shape.head_size + rows] = self.accs[warp][lanes]

    def take_over(self, warp: int) -> None:
        """Adds what another warp handed over."""
        lanes, rows = self.output_rows()
        self.accs[warp][lanes] += self.shared[warp * self.shape.head_size + rows]

    def output_rows(self) -> tuple[tuple[IntArray, IntArray], IntArray]:
        """Which (lane, accumulator) holds a finished row, and the row's number."""
        rows = np.stack([self.shape.value_rows_of_lane(lane) for lane in range(WARP_SIZE)])
        writers = np.array([self.shape.writes_output(lane) for lane in range(WARP_SIZE)])
        lanes = np.nonzero(writers[:, None] & (rows < self.shape.head_size))
        return (lanes[0], lanes[1]), rows[lanes]

    def output_address(self, outputs: KernelOutputs) -> int:
        """out_ptr of this thread block, in elements."""
        _, num_heads, max_num_partitions, head_size = outputs.out.shape
        address: int = (
            self.seq_idx * num_heads * max_num_partitions * head_size
            + self.head_idx * max_num_partitions * head_size
            + self.partition_idx * head_size
        )
        return address

    def store_output(self, outputs: KernelOutputs) -> None:
        """Warp 0 writes head_size elements."""
        lanes, rows = self.output_rows()
        outputs.out.reshape(-1)[self.output_address(outputs) + rows] = self.accs[0][lanes]

    def store_partition(self, outputs: KernelOutputs) -> None:
        """What the reduce kernel needs to weigh this partition against the others."""
        if self.shape.partition_size:
            place = self.seq_idx, self.head_idx, self.partition_idx
            outputs.max_logits[place] = self.qk_max[0, 0]
            outputs.exp_sums[place] = self.exp_sum[0, 0]

    # --- memory ------------------------------------------------------------------------------------

    def block_address(self, cache: Array, block_idx: int) -> int:
        """First element of this head in a logical block's physical block."""
        head_stride = int(np.prod(cache.shape[2:]))
        number = self.inputs.physical_blocks[self.seq_idx, block_idx]
        return cache_address(number, cache.shape[1] * head_stride, self.kv_head_idx, head_stride)

    def load(self, memory: Array, addresses: IntArray) -> FloatArray:
        """Reads elements from global memory; products are fp32. The one door: a test can watch it."""
        return memory[addresses].astype(np.float32)
