"""Prefixes that left the cache: by the fingerprint of their last page, with what became of them.

A ghost that comes back was missed: the page had been evicted, and a prompt computed it again. There are as
many as pages, hundreds a second come and go, and all lie in columns that are made once: a dict of them is
five times as large, and made anew every few minutes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

NO_SLOT = -1
GOLDEN, WORD_BITS = 0x9E3779B97F4A7C15, 64
"""Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3, 6.4): the upper bits of a product."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """A sealed page that was evicted at least once."""

    fingerprint: int
    parent_fingerprint: int  # 0: it was the first page of its prefix
    evicted_ms: float
    returns: int  # how often it was computed again
    is_gone: bool  # not in the cache right now


class Ghosts:
    """As many as the pool has pages; the one that left first is forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        bits = max(1, (2 * limit - 1).bit_length())  # half of the places are free at least
        self._shift, self._mask = WORD_BITS - bits, (1 << bits) - 1
        self._slot_at = _column(np.int32, 1 << bits, NO_SLOT)  # by hash, the next place if it is taken
        self._fingerprints = _column(np.uint64, limit)
        self._parents = _column(np.uint64, limit)
        self._evicted_ms = _column(np.float64, limit)
        self._returns = _column(np.uint32, limit)
        self._is_gone = _column(np.uint8, limit)
        # A ring in the order in which they left; the last place is the ring's head, before the oldest.
        self._older = _column(np.int32, limit + 1, limit)
        self._newer = _column(np.int32, limit + 1, limit)

    def __len__(self) -> int:
        return self._count

    def gone(self, least_returns: int = 0) -> Iterator[Ghost]:
        """Those that are not in the cache now and came back so often before, the newest first."""
        slot = self._older[self._limit]
        while slot != self._limit:
            if self._is_gone[slot] and self._returns[slot] >= least_returns:
                yield Ghost(
                    self._fingerprints[slot],
                    self._parents[slot],
                    self._evicted_ms[slot],
                    self._returns[slot],
                    True,
                )
            slot = self._older[slot]

    def returns_of(self, fingerprint: int) -> int:
        """How often a prefix came back."""
        slot = self._slot_at[self._place(fingerprint)]
        return 0 if slot == NO_SLOT else int(self._returns[slot])

    def leave(self, fingerprint: int, parent_fingerprint: int, clock_ms: float) -> None:
        """A sealed page lost its place."""
        if not self._limit:
            return
        slot = self._slot_at[self._place(fingerprint)]
        if slot == NO_SLOT:
            slot = self._new_slot()
            self._slot_at[self._place(fingerprint)] = slot
            self._fingerprints[slot], self._returns[slot] = fingerprint, 0
        else:
            self._unlink(slot)
        self._parents[slot], self._evicted_ms[slot], self._is_gone[slot] = parent_fingerprint, clock_ms, True
        newest, head = self._older[self._limit], self._limit
        self._older[slot], self._newer[slot] = newest, head
        self._newer[newest] = self._older[head] = slot

    def enter(self, fingerprints: Iterable[int]) -> None:
        """Pages were sealed; those that had been evicted are back."""
        for fingerprint in fingerprints:
            slot = self._slot_at[self._place(fingerprint)]
            if slot != NO_SLOT and self._is_gone[slot]:
                self._returns[slot] += 1
                self._is_gone[slot] = False

    def _new_slot(self) -> int:
        """One that was never used, or that of the oldest."""
        if self._count < self._limit:
            self._count += 1
            return self._count - 1
        oldest = int(self._newer[self._limit])
        self._unlink(oldest)
        self._forget(self._place(self._fingerprints[oldest]))
        return oldest

    def _unlink(self, slot: int) -> None:
        older, newer = self._older[slot], self._newer[slot]
        self._newer[older], self._older[newer] = newer, older

    def _home(self, fingerprint: int) -> int:
        return (fingerprint * GOLDEN >> self._shift) & self._mask

    def _place(self, fingerprint: int) -> int:
        """Where it is, or would be."""
        slot_at, fingerprints, mask = self._slot_at, self._fingerprints, self._mask
        place = self._home(fingerprint)
        while (slot := slot_at[place]) != NO_SLOT and fingerprints[slot] != fingerprint:
            place = (place + 1) & mask
        return place

    def _forget(self, place: int) -> None:
        """Empties a place; those behind it that were pushed on by it move up."""
        slot_at, mask = self._slot_at, self._mask
        gap = place
        slot_at[gap] = NO_SLOT
        while (slot := slot_at[place := (place + 1) & mask]) != NO_SLOT:
            home = self._home(self._fingerprints[slot])
            if (place - home) & mask >= (place - gap) & mask:  # its way from home goes over the gap
                slot_at[gap], slot_at[place] = slot, NO_SLOT
                gap = place


def _column(kind: type[np.generic], count: int, value: int = 0) -> Any:
    """Fixed numbers [count] as a memoryview: single ones are read faster so than from an array."""
    column = np.zeros(count, kind) if not value else np.full(count, value, kind)
    return column.data
