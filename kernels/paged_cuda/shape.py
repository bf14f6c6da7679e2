"""The compile-time constants of the historical kernel, and which thread touches which data.

Owns numbers and index arithmetic only; no memory, no sequence. A name here is the document's constant
in lower case (THREAD_GROUP_SIZE is `thread_group_size`), so that a CUDA kernel and a page that explains
it can use the same words. The document's "block" is what the rest of this program calls a page, and
its "thread block" is the CUDA term.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WARP_SIZE = 32
FETCH_BYTES = 16  # what one thread group reads of K, and one thread of V, at a time

BLOCK_SIZES = (8, 16, 32)  # the sizes that were compiled
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 32, 256

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Template arguments, and everything that follows from them.

    partition_size counts context tokens of one partition; 0 means that the context is not partitioned.
    Raises ValueError for a shape that was never compiled.
    """

    head_size: int
    block_size: int = 16
    num_threads: int = 128
    partition_size: int = 0
    itemsize: int = 2  # bytes of one element of q, K and V

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {self.block_size}: the kernel exists for {BLOCK_SIZES}")
        if not MIN_HEAD_SIZE <= self.head_size <= MAX_HEAD_SIZE or self.head_size % self.x:
            raise ValueError(
                f"head_size {self.head_size}: the kernel exists for multiples of {self.x} "
                f"in {MIN_HEAD_SIZE}..{MAX_HEAD_SIZE}"
            )
        if self.num_warps not in (1, 2, 4, 8, 16, 32) or self.num_threads % WARP_SIZE:
            raise ValueError(f"num_threads {self.num_threads}: 1, 2, 4, 8, 16 or 32 warps of {WARP_SIZE}")
        if self.partition_size < 0 or self.partition_size % self.block_size:
            raise ValueError(
                f"partition_size {self.partition_size}: whole blocks of {self.block_size} tokens"
            )

    # --- threads ---------------------------------------------------------------------------------

    @property
    def num_warps(self) -> int:
        """Warps of a thread block."""
        return self.num_threads // WARP_SIZE

    @property
    def thread_group_size(self) -> int:
        """Threads that share one key token; as many groups as there are tokens in a block fill a warp."""
        return max(WARP_SIZE // self.block_size, 1)

    @property
    def num_thread_groups(self) -> int:
        """Thread groups of a thread block."""
        return self.num_threads // self.thread_group_size

    # --- query and key: a thread group reads 16 bytes at a time -------------------------------------

    @property
    def x(self) -> int:
        """Innermost axis of k_cache: elements that one thread group reads together."""
        return FETCH_BYTES // self.itemsize

    @property
    def vec_size(self) -> int:
        """Elements of q or K that one thread reads together."""
        return max(FETCH_BYTES // (self.thread_group_size * self.itemsize), 1)

    @property
    def num_vecs(self) -> int:
        """Vecs of one head of one token, over all threads of its group."""
        return self.head_size // self.vec_size

    @property
    def num_elems_per_thread(self) -> int:
        """Elements of one key token that one thread multiplies."""
        return self.head_size // self.thread_group_size

    @property
    def num_vecs_per_thread(self) -> int:
        """The same in vecs."""
        return self.num_elems_per_thread // self.vec_size

    # --- value: each thread reads 16 bytes, neighbouring tokens of one head position --------------

    @property
    def v_vec_size(self) -> int:
        """Tokens of one row of V that one thread reads together."""
        return min(FETCH_BYTES // self.itemsize, self.block_size)

    @property
    def num_v_vecs_per_row(self) -> int:
        """Lanes that share one row (one head position) of a block of V."""
        return self.block_size // self.v_vec_size

    @property
    def num_rows_per_iter(self) -> int:
        """Rows of V that a warp covers in one inner iteration."""
        return WARP_SIZE // self.num_v_vecs_per_row

    @property
    def num_rows_per_thread(self) -> int:
        """Inner iterations over a block of V, and accumulators of a thread."""
        return -(-self.head_size // self.num_rows_per_iter)

    # --- context ----------------------------------------------------------------------------------

    def num_context_blocks(self, context_len: int) -> int:
        """Blocks that hold a context."""
        return -(-context_len // self.block_size)

    def num_partitions(self, context_len: int) -> int:
        """Partitions that a context needs: axis z of the grid for the longest one."""
        return 1 if self.partition_size == 0 else -(-context_len // self.partition_size)

    def partition_tokens(self, partition_idx: int, context_len: int) -> range:
        """Context tokens of a partition; empty where the thread block exits at once."""
        if self.partition_size == 0:
            return range(context_len)
        start = partition_idx * self.partition_size
        return range(min(start, context_len), min(start + self.partition_size, context_len))

    def blocks_of_warp(self, warp_idx: int, tokens: range) -> range:
        """Logical blocks of one warp, round robin over the blocks that hold `tokens`."""
        start = tokens.start // self.block_size
        return range(start + warp_idx, self.num_context_blocks(tokens.stop), self.num_warps)

    # --- which thread reads what --------------------------------------------------------------------

    def vecs_of_thread(self, thread_group_offset: int) -> IntArray:
        """[num_vecs_per_thread]: vecs of q and of each key token read by this member of a group."""
        return thread_group_offset + np.arange(self.num_vecs_per_thread) * self.thread_group_size

    def elements_of_thread(self, thread_group_offset: int) -> IntArray:
        """[num_vecs_per_thread, vec_size]: the same as positions in the head."""
        return self.vecs_of_thread(thread_group_offset)[:, None] * self.vec_size + np.arange(self.vec_size)

    def key_offsets(self, thread_group_offset: int) -> IntArray:
        """[num_vecs_per_thread, vec_size]: the same as offsets from k_ptr, with K split by x."""
        element = self.elements_of_thread(thread_group_offset)
        return element // self.x * self.block_size * self.x + element % self.x

    def value_tokens_of_lane(self, lane: int) -> IntArray:
        """[v_vec_size]: offsets in the block of the tokens whose V this lane reads, in every row."""
        return lane % self.num_v_vecs_per_row * self.v_vec_size + np.arange(self.v_vec_size)

    def value_rows_of_lane(self, lane: int) -> IntArray:
        """[num_rows_per_thread]: head position of each accumulator; past head_size it is idle."""
        return lane // self.num_v_vecs_per_row + np.arange(self.num_rows_per_thread) * self.num_rows_per_iter

    def writes_output(self, lane: int) -> bool:
        """After the reduction of its row all lanes of the row hold the sum: the first one writes it."""
        return lane % self.num_v_vecs_per_row == 0

    def shared_floats(self, num_tokens: int) -> int:
        """fp32 numbers of shared memory: the logits, later reused for the outputs of half the warps."""
        padded = self.num_context_blocks(num_tokens) * self.block_size
        return max(padded, self.num_warps // 2 * self.head_size)
