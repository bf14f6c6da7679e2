"""Rows of a decode step in groups that run side by side: which rows, and on which streams.

A layer's attention waits for memory, its products for one another; while one group attends, another is
multiplied. Within a graph's capture the streams become branches of the graph. Knows no kernel.
"""

from collections.abc import Callable, Sequence

import torch

ALIGNED = 4
"""Rows: a group begins at a multiple of them, so of 16 bytes in columns of int32, as kernels expect."""


def group_slices(num_rows: int, num_groups: int) -> list[slice]:
    """Groups as even as their beginnings allow; none is larger than an even share, rounded up to them."""
    unit = num_groups * ALIGNED
    begins = [-(-num_rows * number // unit) * ALIGNED for number in range(num_groups)]
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], num_rows], strict=True)]


class Branches:
    """Streams for work that may run at the same time; without a GPU it runs one after the other."""

    def __init__(self, most: int, device: torch.device) -> None:
        others = most - 1 if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(others)]  # type: ignore[no-untyped-call]

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """The first on the current stream, each other on its own, which begins where the current one is now;
        what the current stream does next waits for all.
        """
        if not self._streams:
            for work in works:
                work()
            return
        current = torch.cuda.current_stream()
        streams = self._streams[: len(works) - 1]
        for stream in streams:
            stream.wait_stream(current)
        works[0]()
        for stream, work in zip(streams, works[1:], strict=True):
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            current.wait_stream(stream)
