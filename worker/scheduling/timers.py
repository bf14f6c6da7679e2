"""Times at which something of a request ends: deadline, queue timeout, longest duration.

Owns a heap of times. What happens then is not known here.
"""

from collections.abc import Collection
from enum import IntEnum
from heapq import heapify, heappop, heappush


class TimerKind(IntEnum):
    """What ends."""

    DEADLINE = 0
    QUEUE = 1
    DURATION = 2


class Timers:
    """Entries are plain numbers, so that no ended request is kept alive; dropped when due or pruned."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # time, key, kind

    def add(self, time: float, key: int, kind: TimerKind) -> None:
        """``key`` is due at ``time``."""
        heappush(self._heap, (time, key, int(kind)))

    @property
    def next_time(self) -> float | None:
        """Earliest time; may belong to something that ended."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[int, TimerKind]]:
        """What is due, earliest first; each is returned once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, key, kind = heappop(self._heap)
            found.append((key, TimerKind(kind)))
        return found

    def prune(self, live: Collection[int]) -> None:
        """Drops entries of what is not ``live`` once they are the majority."""
        if len(self._heap) > 64 + 6 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)
