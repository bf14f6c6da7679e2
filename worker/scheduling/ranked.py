"""Sequences in the order in which they are served: those that wait, and those whose prompt is computed.

Owns the order. Sorted by a rank that never changes (sequence.Rank): priority and aging are folded in.
"""

from bisect import bisect_left
from collections.abc import Iterator

from worker.scheduling.sequence import Rank, Sequence


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class RankedSequences:
    """Sequences by rank, first to be served first."""

    def __init__(self) -> None:
        self._entries: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

    def __getitem__(self, at: int) -> Sequence:
        return self._entries[at]

    def add(self, sequence: Sequence) -> int:
        """Puts it in its place; returns how many are before it."""
        entries = self._entries
        if not entries or entries[-1].rank < sequence.rank:  # mostly: it came last
            entries.append(sequence)
            return len(entries) - 1
        at = self.position(sequence.rank)
        entries.insert(at, sequence)
        return at

    def position(self, rank: Rank) -> int:
        """How many are before one of this rank."""
        return bisect_left(self._entries, rank, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out; it must be there."""
        entries = self._entries
        at = 0 if entries and entries[0] is sequence else self.position(sequence.rank)
        assert at < len(entries), f"{sequence} is not here"
        assert entries[at] is sequence, f"{sequence} is not here"
        del entries[at]
