"""Which batch sizes get a CUDA graph, and which of them a batch is padded to. Captures nothing itself."""

from collections.abc import Sequence


def capture_sizes(max_batch: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, then every eighth, up to max_batch; the largest first.

    The largest is captured first, so that the smaller ones find their memory in its pool.
    """
    sizes = [size for size in (1, 2, 4, *range(8, max_batch + 1, 8)) if size <= max_batch]
    if max_batch not in sizes:
        sizes.append(max_batch)
    return sorted(sizes, reverse=True)


def kernel_sizes(sizes: Sequence[int]) -> list[int]:
    """Of `sizes`, enough to meet every kernel: the largest and the powers of two, large ones first."""
    powers = [size for size in sizes if size & (size - 1) == 0]
    return sorted({max(sizes), *powers}, reverse=True)


def padded_size(batch_size: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds the batch; None when none does."""
    return min((size for size in sizes if size >= batch_size), default=None)
