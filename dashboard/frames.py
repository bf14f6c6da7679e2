"""Binary frames of the page feed: numpy columns → the bytes that components/decode.js reads.

A header of 24 bytes, then columns in falling width, little endian, so that the browser maps each of them
without a copy. Pure; golden bytes of each kind are in tests/golden. Layout: docs/dashboard.md.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VERSION = 1
SNAPSHOT, DELTA, LISTS = 1, 2, 3
DEFLATED, WIDE_FILL, PAST, ALL_LISTS = 1, 2, 4, 8
HEADER = struct.Struct("<BBHIQd")
PAGES_PER_PART = 65_536
SEALED_BIT, PINNED_BIT, USED_BIT = 8, 16, 32
"""Of the state byte; bits 0-2 are PageState. USED: since the viewer's last frame."""

_LEVEL = 1  # of zlib: a higher one takes three times as long for a tenth less


@dataclass(frozen=True, slots=True)
class Columns:
    """Pages as they are drawn: equal lengths."""

    states: NDArray[np.uint8]  # PageState and bits
    refs: NDArray[np.uint8]  # saturated
    fill: NDArray[np.uint16]  # slots that hold a token
    owners: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.states)

    def tail(self, is_wide: bool, at: slice = slice(None)) -> bytes:
        """All columns in falling width."""
        fill = self.fill[at]
        parts = [self.owners[at].astype("<u2").tobytes()]
        parts += [fill.astype("<u2").tobytes()] if is_wide else []
        parts += [self.states[at].tobytes(), self.refs[at].tobytes()]
        parts += [] if is_wide else [fill.astype(np.uint8).tobytes()]
        return b"".join(parts)


def delta(
    revision: int, clock_ms: float, page_ids: NDArray[np.uint32], columns: Columns, *, is_wide: bool
) -> bytes:
    """Pages that changed, with what they are now. None: the heartbeat."""
    flags = WIDE_FILL if is_wide else 0
    header = HEADER.pack(DELTA, VERSION, flags, len(page_ids), revision, clock_ms)
    return header + page_ids.astype("<u4").tobytes() + columns.tail(is_wide)


def snapshot_parts(
    revision: int,
    clock_ms: float,
    idle_ms: NDArray[np.uint32],
    columns: Columns,
    *,
    is_wide: bool,
    is_past: bool = False,
) -> Iterator[bytes]:
    """The whole map in parts of at most 65 536 pages; the last has 0 parts left."""
    count = max(1, -(-len(columns) // PAGES_PER_PART))
    flags = DEFLATED | (WIDE_FILL if is_wide else 0) | (PAST if is_past else 0)
    for number in range(count):
        at = slice(number * PAGES_PER_PART, (number + 1) * PAGES_PER_PART)
        size = len(idle_ms[at])
        header = HEADER.pack(SNAPSHOT, VERSION, flags, size, revision, clock_ms)
        place = struct.pack("<II", number * PAGES_PER_PART, count - 1 - number)
        body = idle_ms[at].astype("<u4").tobytes() + columns.tail(is_wide, at)
        yield header + place + zlib.compress(body, _LEVEL)


def lists(
    revision: int,
    clock_ms: float,
    owners: Sequence[int],
    page_lists: Sequence[NDArray[np.uint32]],
    *,
    is_all: bool = False,
) -> bytes:
    """Pages of changed sequences in token order; an empty list ends one. `is_all`: there are no others."""
    start = np.zeros(len(owners) + 1, "<u4")
    np.cumsum([len(pages) for pages in page_lists], out=start[1:])
    pages = np.concatenate([*page_lists, np.empty(0, np.uint32)]).astype("<u4")
    flags = ALL_LISTS if is_all else 0
    header = HEADER.pack(LISTS, VERSION, flags, len(owners), revision, clock_ms)
    return header + start.tobytes() + pages.tobytes() + np.array(owners, "<u2").tobytes()
