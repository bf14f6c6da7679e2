"""Prefixes that left the cache: by the fingerprint of their last page, with what became of them.

A ghost that comes back was missed: the page had been evicted, and a prompt computed it again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ghost:
    """A sealed page that was evicted at least once."""

    fingerprint: int
    parent_fingerprint: int  # 0: it was the first page of its prefix
    evicted_ms: float
    returns: int  # how often it was computed again
    is_gone: bool  # not in the cache right now


_Left = tuple[int, float, int, bool]
"""The other fields of a Ghost. There are as many as pages, and the collector of cycles, which looks at every
object over and over, leaves plain tuples of numbers alone."""


class Ghosts:
    """As many as the pool has pages; the one that left first is forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_fingerprint: OrderedDict[int, _Left] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_fingerprint)

    def gone(self, least_returns: int = 0) -> Iterator[Ghost]:
        """Those that are not in the cache now and came back so often before, the newest first."""
        for fingerprint, (parent, evicted_ms, returns, is_gone) in reversed(self._by_fingerprint.items()):
            if is_gone and returns >= least_returns:
                yield Ghost(fingerprint, parent, evicted_ms, returns, is_gone)

    def returns_of(self, fingerprint: int) -> int:
        """How often a prefix came back."""
        left = self._by_fingerprint.get(fingerprint)
        return left[2] if left is not None else 0

    def leave(self, fingerprint: int, parent_fingerprint: int, clock_ms: float) -> None:
        """A sealed page lost its place."""
        returns = self.returns_of(fingerprint)
        self._by_fingerprint[fingerprint] = (parent_fingerprint, clock_ms, returns, True)
        self._by_fingerprint.move_to_end(fingerprint)
        while len(self._by_fingerprint) > self._limit:
            self._by_fingerprint.popitem(last=False)

    def enter(self, fingerprints: Iterable[int]) -> None:
        """Pages were sealed; those that had been evicted are back."""
        for fingerprint in fingerprints:
            left = self._by_fingerprint.get(fingerprint)
            if left is not None and left[3]:
                self._by_fingerprint[fingerprint] = (left[0], left[1], left[2] + 1, False)
