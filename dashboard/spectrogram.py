"""The pool over time: a column each second of bands of pages, and the figures of that second.

Owns ten minutes of them. A band is a run of neighbouring pages, 256 of them whatever the pool's size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvatlas.v1 import cache_pb2 as pb

MAX_BANDS = 256
COLUMN_MS = 1000.0
PLANES = ("active", "cached", "churn", "age")
"""Of a column, u8 each: share of ACTIVE pages, of CACHED or PINNED ones, pages changed in that second as a
share of the band (all x 255), and the age of the oldest ACTIVE page as 28 * log2(1 + seconds), saturated."""
AGE_PER_OCTAVE = 28.0
FIGURES = (
    "free", "active", "cached", "pinned", "reserved",
    "allocated", "evicted", "preempted",
    "hit_tokens", "miss_cold_tokens", "miss_evicted_tokens", "unaligned_tokens",
    "running", "waiting",
)  # fmt: skip
"""Of one second: pages by state, counters of the epoch (modulo 2^32), and the worker's load."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a column is made of."""

    states: NDArray[np.generic]  # u8 [page_count]
    born_ms: NDArray[np.generic]  # u32 [page_count]
    uptime_ms: int  # modulo 2^32
    figures: tuple[int, ...]  # as FIGURES


class Spectrogram:
    """Columns by number; the newest `capacity` are kept. Not thread-safe: LiveMap's lock guards it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.page_count = 0
        self.num_bands = 1
        self._columns = np.zeros((capacity, len(PLANES), 1), np.uint8)
        self._figures = np.zeros((capacity, len(FIGURES)), np.uint32)
        self._times = np.zeros(capacity, np.float64)
        self._is_cut = np.zeros(capacity, bool)
        self._changed = np.zeros(1, np.int64)  # per band, since the last column
        self.next_number = 0
        self._size_began = 0  # number of the first column of this size
        self._next_ms = -np.inf
        self._cut_next = False

    @property
    def first_number(self) -> int:
        """Of the oldest column held. Fewer than `capacity` are where nothing was heard for a while: none is
        older than as many seconds."""
        oldest = max(self._size_began, self.next_number - self._capacity)
        times = self._times[np.arange(oldest, self.next_number) % self._capacity]
        if len(times) == 0:
            return oldest
        return oldest + int(np.argmax(times > times[-1] - self._capacity * COLUMN_MS))

    def first_for(self, since: int) -> int:
        """Of the columns for a reader who has all before `since`; who is ahead of us read another process's
        columns, and gets all of ours."""
        return max(since if since <= self.next_number else 0, self.first_number)

    def resize(self, page_count: int, *, is_restart: bool) -> None:
        """A pool of this size from now on; columns of another size are dropped, and numbers go on."""
        self._cut_next = is_restart or self._cut_next
        self._next_ms = -np.inf
        if page_count == self.page_count:
            return
        self.page_count, self.num_bands = page_count, max(1, min(MAX_BANDS, page_count))
        self._columns = np.zeros((self._capacity, len(PLANES), self.num_bands), np.uint8)
        self._changed = np.zeros(self.num_bands, np.int64)
        self._size_began = self.next_number

    def band_starts(self) -> NDArray[np.int64]:
        """First page of each band, and the page count: [num_bands + 1]."""
        return np.arange(self.num_bands + 1, dtype=np.int64) * self.page_count // self.num_bands

    def count(self, page_ids: NDArray[np.uint32]) -> None:
        """Pages that changed."""
        bands = np.searchsorted(self.band_starts(), page_ids, side="right") - 1
        self._changed += np.bincount(bands, minlength=self.num_bands)[: self.num_bands]

    def is_due(self, clock_ms: float) -> bool:
        """Whether a second has passed."""
        return self.page_count > 0 and clock_ms >= self._next_ms

    def add(self, clock_ms: float, moment: Moment) -> None:
        """One column."""
        place = self.next_number % self._capacity
        self._columns[place] = self._column(moment)
        self._figures[place] = moment.figures
        self._times[place] = clock_ms
        self._is_cut[place], self._cut_next = self._cut_next, False
        self._changed[:] = 0
        self.next_number += 1
        self._next_ms = clock_ms + COLUMN_MS if self._next_ms == -np.inf else self._next_ms + COLUMN_MS
        if clock_ms >= self._next_ms:  # fell behind: a gap stays a gap
            self._next_ms = clock_ms + COLUMN_MS

    def columns(self, since: int) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.bool_]]:
        """Columns from number `since` on, oldest first: [n, 4, bands], times [n], whether a cut precedes."""
        at = self._places(since)
        return self._columns[at], self._times[at], self._is_cut[at]

    def figures(self, since: int) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
        """Figures of the same columns: [n, 14], times [n]."""
        at = self._places(since)
        return self._figures[at], self._times[at]

    def _places(self, since: int) -> NDArray[np.int64]:
        return np.arange(max(since, self.first_number), self.next_number) % self._capacity

    def _column(self, moment: Moment) -> NDArray[np.uint8]:
        starts = self.band_starts()
        sizes = np.diff(starts)
        is_active = moment.states == pb.PAGE_STATE_ACTIVE
        is_kept = (moment.states == pb.PAGE_STATE_CACHED) | (moment.states == pb.PAGE_STATE_PINNED)
        age = np.uint32(moment.uptime_ms) - moment.born_ms.astype(np.uint32)
        oldest = np.maximum.reduceat(np.where(is_active, age, 0), starts[:-1]) / 1000.0
        return np.stack(
            [
                np.add.reduceat(is_active, starts[:-1], dtype=np.int64) * 255 // sizes,
                np.add.reduceat(is_kept, starts[:-1], dtype=np.int64) * 255 // sizes,
                np.minimum(255, self._changed * 255 // sizes),
                np.minimum(255, AGE_PER_OCTAVE * np.log2(1.0 + oldest)),
            ]
        ).astype(np.uint8)
