"""The last minutes of a page map: key frames and deltas, compressed, so that a viewer can go back in time.

Owns memory and its bound; knows no clock: every entry carries the worker's. A key frame begins each epoch,
and one comes each minute, so that a look back applies 600 deltas at most.
"""

import zlib
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dashboard.frames import Columns

KEY_FRAME_MS = 60_000.0
DELTA_MS = 100.0
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
    is_key: bool
    count: int
    packed: bytes


class History:
    """Entries in time order, oldest dropped by age and bytes. Not thread-safe: LiveMap's lock guards it."""

    def __init__(self, seconds: float, max_bytes: int = MAX_BYTES) -> None:
        self._span_ms = seconds * 1000.0
        self._max_bytes = max_bytes
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._last_key_ms = -np.inf
        self._last_ms = -np.inf
        self.restarts: deque[float] = deque(maxlen=64)  # moments at which another epoch began

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return self._bytes

    @property
    def start_ms(self) -> float | None:
        """The oldest moment that can be shown."""
        return self._entries[0].clock_ms if self._entries else None

    @property
    def end_ms(self) -> float | None:
        """The newest."""
        return self._entries[-1].clock_ms if self._entries else None

    def is_due(self, clock_ms: float) -> bool:
        """Whether the next delta should be written: ten a second are kept."""
        return clock_ms - self._last_ms >= DELTA_MS or clock_ms < self._last_ms

    def needs_key(self, clock_ms: float) -> bool:
        """Whether that should be a key frame."""
        return clock_ms - self._last_key_ms >= KEY_FRAME_MS or clock_ms < self._last_ms

    def add_key(self, clock_ms: float, uptime_ms: int, columns: Columns, used_ms: NDArray[np.uint32]) -> None:
        """The whole map."""
        self._last_key_ms = clock_ms
        self._add(_Entry(clock_ms, uptime_ms, True, len(columns), _pack(None, columns, used_ms)))

    def add_delta(
        self,
        clock_ms: float,
        uptime_ms: int,
        page_ids: NDArray[np.uint32],
        columns: Columns,
        used_ms: NDArray[np.uint32],
    ) -> None:
        """Pages that changed since the last entry."""
        self._add(_Entry(clock_ms, uptime_ms, False, len(page_ids), _pack(page_ids, columns, used_ms)))

    def at(self, clock_ms: float) -> Past | None:
        """The map at a moment; one before the start snaps to it. None: nothing is held."""
        if not self._entries:
            return None
        entries = list(self._entries)
        last = max(0, bisect_right(entries, clock_ms, key=lambda entry: entry.clock_ms) - 1)
        first = next(number for number in range(last, -1, -1) if entries[number].is_key)
        _, columns, used = _unpack(entries[first])
        for entry in entries[first + 1 : last + 1]:
            page_ids, changed, changed_used = _unpack(entry)
            for whole, part in zip(_arrays(columns), _arrays(changed), strict=True):
                whole[page_ids] = part
            used[page_ids] = changed_used
        return Past(entries[last].clock_ms, columns, used, entries[last].uptime_ms)

    def _add(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._bytes += len(entry.packed)
        self._last_ms = entry.clock_ms
        while len(self._entries) > 1 and self._is_surplus(entry.clock_ms):
            self._drop_oldest()

    def _is_surplus(self, now_ms: float) -> bool:
        """Whether the oldest key frame with its deltas may go: another one follows it."""
        has_next_key = any(entry.is_key for number, entry in enumerate(self._entries) if number)
        is_old = self._entries[0].clock_ms < now_ms - self._span_ms - KEY_FRAME_MS
        return has_next_key and (is_old or self._bytes > self._max_bytes)

    def _drop_oldest(self) -> None:
        """A key frame and the deltas up to the next one."""
        self._bytes -= len(self._entries.popleft().packed)
        while self._entries and not self._entries[0].is_key:
            self._bytes -= len(self._entries.popleft().packed)


def _arrays(columns: Columns) -> tuple[NDArray[np.generic], ...]:
    return columns.owners, columns.fill, columns.states, columns.refs


def _pack(page_ids: NDArray[np.uint32] | None, columns: Columns, used_ms: NDArray[np.uint32]) -> bytes:
    parts: list[NDArray[Any]] = [] if page_ids is None else [page_ids.astype(np.uint32)]
    parts += [used_ms, columns.owners, columns.fill, columns.states, columns.refs]
    return zlib.compress(b"".join(part.tobytes() for part in parts), 1)


def _unpack(entry: _Entry) -> tuple[NDArray[np.uint32], Columns, NDArray[np.uint32]]:
    raw, place, count = zlib.decompress(entry.packed), 0, entry.count

    def take(kind: type[np.generic]) -> NDArray[np.generic]:
        nonlocal place
        array = np.frombuffer(raw, kind, count, place).copy()
        place += array.nbytes
        return array

    page_ids = np.empty(0, np.uint32) if entry.is_key else take(np.uint32)
    used, owners, fill = take(np.uint32), take(np.uint16), take(np.uint16)
    states, refs = take(np.uint8), take(np.uint8)
    return page_ids, Columns(states, refs, fill, owners), used  # type: ignore[arg-type, return-value]
