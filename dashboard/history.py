"""The last minutes of a page map: key frames and deltas, compressed, so that a viewer can go back in time.

Owns memory and its bound; knows no clock: every entry carries the worker's. A key frame begins each epoch,
and one comes each minute, so that a look back applies 800 deltas at most. A key frame and its deltas come
and go as a whole, beside the heap: what lives for minutes among what lives for moments would keep it from
ever shrinking.
"""

import zlib
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dashboard.blocks import Blocks, Place
from dashboard.frames import Columns

KEY_FRAME_MS = 60_000.0
DELTA_MS = 100.0
EARLY_MS = 25.0  # a feed of ten a second is not late half of the time: its clock is in whole milliseconds
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Past:
    """The map at a past moment."""

    clock_ms: float
    columns: Columns
    used_ms: NDArray[np.uint32]  # last use, of the same clock as uptime_ms
    uptime_ms: int  # modulo 2^32


@dataclass(frozen=True, slots=True)
class _Entry:
    clock_ms: float
    uptime_ms: int
    count: int  # pages
    place: Place  # in the segment's blocks


@dataclass(slots=True)
class _Segment:
    """A key frame and the deltas that follow it, in time order."""

    blocks: Blocks = field(default_factory=Blocks)
    entries: list[_Entry] = field(default_factory=list)

    @property
    def start_ms(self) -> float:
        return self.entries[0].clock_ms

    def add(self, clock_ms: float, uptime_ms: int, count: int, packed: bytes) -> None:
        self.entries.append(_Entry(clock_ms, uptime_ms, count, self.blocks.add(packed)))

    def raw(self, entry: _Entry) -> bytes:
        return zlib.decompress(self.blocks.read(entry.place))


class History:
    """Entries in time order, oldest dropped by age and bytes. Not thread-safe: LiveMap's lock guards it."""

    def __init__(self, seconds: float, max_bytes: int = MAX_BYTES) -> None:
        self._span_ms = seconds * 1000.0
        self._max_bytes = max_bytes
        self._segments: deque[_Segment] = deque()
        self._last_key_ms = -np.inf
        self._last_ms = -np.inf
        self.restarts: deque[float] = deque(maxlen=64)  # moments at which another epoch began

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return sum(segment.blocks.num_bytes for segment in self._segments)

    @property
    def num_segments(self) -> int:
        """Key frames held, each with its deltas."""
        return len(self._segments)

    @property
    def start_ms(self) -> float | None:
        """The oldest moment that can be shown."""
        return self._segments[0].start_ms if self._segments else None

    @property
    def end_ms(self) -> float | None:
        """The newest."""
        return self._segments[-1].entries[-1].clock_ms if self._segments else None

    def is_due(self, clock_ms: float) -> bool:
        """Whether to write the next delta: each of a feed of ten a second, of faster ones 13 at most."""
        return clock_ms - self._last_ms >= DELTA_MS - EARLY_MS or clock_ms < self._last_ms

    def needs_key(self, clock_ms: float) -> bool:
        """Whether that should be a key frame."""
        return clock_ms - self._last_key_ms >= KEY_FRAME_MS or clock_ms < self._last_ms

    def add_key(self, clock_ms: float, uptime_ms: int, columns: Columns, used_ms: NDArray[np.uint32]) -> None:
        """The whole map."""
        self._last_key_ms = clock_ms
        segment = _Segment()
        segment.add(clock_ms, uptime_ms, len(columns), _pack(None, columns, used_ms))
        self._segments.append(segment)  # never empty: others read `start_ms` meanwhile
        self._settle(clock_ms)

    def add_delta(
        self,
        clock_ms: float,
        uptime_ms: int,
        page_ids: NDArray[np.uint32],
        columns: Columns,
        used_ms: NDArray[np.uint32],
    ) -> None:
        """Pages that changed since the last entry. A key frame comes before the first."""
        self._segments[-1].add(clock_ms, uptime_ms, len(page_ids), _pack(page_ids, columns, used_ms))
        self._settle(clock_ms)

    def at(self, clock_ms: float) -> Past | None:
        """The map at a moment; one before the start snaps to it. None: nothing is held."""
        if not self._segments:
            return None
        starts = [segment.start_ms for segment in self._segments]
        segment = self._segments[max(0, bisect_right(starts, clock_ms) - 1)]
        last = max(1, bisect_right(segment.entries, clock_ms, key=lambda entry: entry.clock_ms))
        key, *deltas = segment.entries[:last]
        _, columns, used = _unpack(segment.raw(key), key.count, is_key=True)
        for entry in deltas:
            page_ids, changed, changed_used = _unpack(segment.raw(entry), entry.count, is_key=False)
            for whole, part in zip(_arrays(columns), _arrays(changed), strict=True):
                whole[page_ids] = part
            used[page_ids] = changed_used
        shown = segment.entries[last - 1]
        return Past(shown.clock_ms, columns, used, shown.uptime_ms)

    def _settle(self, clock_ms: float) -> None:
        """Notes that something was written at that moment, and lets go of what is too old for it."""
        self._last_ms = clock_ms
        while len(self._segments) > 1 and self._is_surplus(clock_ms):
            self._segments.popleft()

    def _is_surplus(self, now_ms: float) -> bool:
        """Whether the oldest segment may go: another one follows it."""
        is_old = self._segments[0].start_ms < now_ms - self._span_ms - KEY_FRAME_MS
        return is_old or self.num_bytes > self._max_bytes


def _arrays(columns: Columns) -> tuple[NDArray[np.generic], ...]:
    return columns.owners, columns.fill, columns.states, columns.refs


def _pack(page_ids: NDArray[np.uint32] | None, columns: Columns, used_ms: NDArray[np.uint32]) -> bytes:
    parts: list[NDArray[Any]] = [] if page_ids is None else [page_ids.astype(np.uint32)]
    parts += [used_ms, columns.owners, columns.fill, columns.states, columns.refs]
    return zlib.compress(b"".join(part.tobytes() for part in parts), 1)


def _unpack(
    raw: bytes, count: int, *, is_key: bool
) -> tuple[NDArray[np.uint32], Columns, NDArray[np.uint32]]:
    place = 0

    def take(kind: type[np.generic]) -> NDArray[np.generic]:
        nonlocal place
        array = np.frombuffer(raw, kind, count, place).copy()
        place += array.nbytes
        return array

    page_ids = np.empty(0, np.uint32) if is_key else take(np.uint32)
    used, owners, fill = take(np.uint32), take(np.uint16), take(np.uint16)
    states, refs = take(np.uint8), take(np.uint8)
    return page_ids, Columns(states, refs, fill, owners), used  # type: ignore[arg-type, return-value]
