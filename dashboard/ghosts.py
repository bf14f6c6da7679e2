"""Prefixes that left the cache: by the fingerprint of their last page, with what became of them.

A ghost that comes back was missed: the page had been evicted, and a prompt computed it again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


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
        self._by_fingerprint: OrderedDict[int, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_fingerprint)

    def gone(self) -> Iterator[Ghost]:
        """Those that are not in the cache now, the newest first."""
        return (ghost for ghost in reversed(self._by_fingerprint.values()) if ghost.is_gone)

    def returns_of(self, fingerprint: int) -> int:
        """How often a prefix came back."""
        ghost = self._by_fingerprint.get(fingerprint)
        return ghost.returns if ghost is not None else 0

    def leave(self, fingerprint: int, parent_fingerprint: int, clock_ms: float) -> None:
        """A sealed page lost its place."""
        returns = self.returns_of(fingerprint)
        self._by_fingerprint[fingerprint] = Ghost(fingerprint, parent_fingerprint, clock_ms, returns, True)
        self._by_fingerprint.move_to_end(fingerprint)
        while len(self._by_fingerprint) > self._limit:
            self._by_fingerprint.popitem(last=False)

    def enter(self, fingerprints: Iterable[int]) -> None:
        """Pages were sealed; those that had been evicted are back."""
        for fingerprint in fingerprints:
            ghost = self._by_fingerprint.get(fingerprint)
            if ghost is not None and ghost.is_gone:
                self._by_fingerprint[fingerprint] = replace(ghost, returns=ghost.returns + 1, is_gone=False)
