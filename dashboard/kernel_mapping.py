"""Which lane of a warp reads what of a page: the historical PagedAttention kernel, as numbers to draw.

Pure arithmetic. `kernels/paged_cuda` executes the same mapping thread by thread; a test holds both
together. There a page is called a block. Source: vLLM's description of its kernel.
"""

from dataclasses import dataclass

WARP_SIZE = 32
FETCH_BYTES = 16
PAGE_SIZES = (8, 16, 32)  # the kernel was compiled for these
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 32, 256


@dataclass(frozen=True, slots=True)
class KernelMapping:
    """One head of one page."""

    page_size: int
    head_size: int
    num_warps: int = 4
    itemsize: int = 2  # bytes of an element of K and V

    @property
    def exists(self) -> bool:
        """Whether the kernel was ever compiled for this shape."""
        is_head = MIN_HEAD_SIZE <= self.head_size <= MAX_HEAD_SIZE
        return (
            self.page_size in PAGE_SIZES and is_head and self.head_size % (FETCH_BYTES // self.itemsize) == 0
        )

    @property
    def thread_group_size(self) -> int:
        """Threads that share one key token."""
        return max(WARP_SIZE // self.page_size, 1)

    @property
    def vec_size(self) -> int:
        """Elements of K that one thread reads together."""
        return max(FETCH_BYTES // (self.thread_group_size * self.itemsize), 1)

    @property
    def value_vec_size(self) -> int:
        """Tokens of V that one thread reads together, at one place of the head."""
        return min(FETCH_BYTES // self.itemsize, self.page_size)

    def key_lanes(self) -> list[list[int]]:
        """[head_size / vec_size, page_size]: the lane that multiplies each vec of each token's key."""
        group = self.thread_group_size
        return [
            [token % WARP_SIZE * group % WARP_SIZE + vec % group for token in range(self.page_size)]
            for vec in range(self.head_size // self.vec_size)
        ]

    def value_lanes(self) -> list[list[int]]:
        """[head_size, page_size / value_vec_size]: the lane that reads each vec of V."""
        per_row = self.page_size // self.value_vec_size
        rows_per_turn = WARP_SIZE // per_row
        return [
            [row % rows_per_turn * per_row + vec for vec in range(per_row)] for row in range(self.head_size)
        ]

    def warp_of(self, position: int) -> int:
        """The warp that takes the page at this position of a sequence: round robin."""
        return position % self.num_warps
