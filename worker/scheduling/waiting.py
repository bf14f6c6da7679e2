"""The queue: sequences without a row, in the order in which they are to be admitted.

Owns the order. Sorted by a rank that never changes (sequence.Rank): priority and aging are folded in.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from worker.scheduling.sequence import Rank, Sequence


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class WaitingQueue:
    """One entry per request that was not admitted (its first live sample), and per preempted sequence."""

    def __init__(self) -> None:
        self._entries: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

    def first(self, count: int) -> list[Sequence]:
        """Copy of the first entries."""
        return self._entries[:count]

    def add(self, sequence: Sequence) -> int:
        """Puts it in its place; returns how many are before it."""
        insort(self._entries, sequence, key=_rank)
        return self.position(sequence)

    def position(self, sequence: Sequence) -> int:
        """How many are before it."""
        return bisect_left(self._entries, sequence.rank, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out; it must be there."""
        at = self.position(sequence)
        assert at < len(self._entries), f"{sequence} is not in the queue"
        assert self._entries[at] is sequence, f"{sequence} is not in the queue"
        del self._entries[at]
