"""Bytes that are kept for minutes, in memory of their own.

The heap is no place for them. glibc cuts even a large block from a heap where one has the room; what is
small and comes to lie behind it keeps that heap as long when the block has gone. So one heap grows by the
other's size, and never shrinks.
"""

import mmap
from typing import NamedTuple

BLOCK_BYTES = 256 * 1024


class Place(NamedTuple):
    """Where something was written."""

    block: int
    begin: int
    end: int


class Blocks:
    """Written once, read often; goes back to the system as a whole when nobody holds it any more."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._free = 0  # bytes at the end of the last one
        self.num_bytes = 0  # written

    def add(self, data: bytes) -> Place:
        """A copy of `data`, in one piece."""
        if len(data) > self._free or not self._maps:
            size = max(1, -(-len(data) // BLOCK_BYTES)) * BLOCK_BYTES
            self._maps.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE))  # pages come as they are written
            self._free = size
        last = self._maps[-1]
        begin = len(last) - self._free
        end = begin + len(data)
        last[begin:end] = data
        self._free -= len(data)
        self.num_bytes += len(data)
        return Place(len(self._maps) - 1, begin, end)

    def read(self, place: Place) -> bytes:
        """What was written there."""
        return self._maps[place.block][place.begin : place.end]
