"""What was evicted: enough to tell a miss that a larger pool would have avoided from a cold one.

Owns a ring of fingerprints, bounded whatever the traffic.
"""

from array import array
from collections.abc import Iterable


class EvictedPrefixes:
    """Fingerprints of the last ``capacity`` evicted pages; older ones are forgotten and count as cold."""

    def __init__(self, capacity: int) -> None:
        self._ring = array("Q", bytes(8 * capacity))
        self._places: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, fingerprint: int) -> bool:
        return fingerprint in self._places

    def add(self, fingerprint: int) -> None:
        """Remembers one, forgetting the oldest."""
        self.add_all((fingerprint,))

    def add_all(self, fingerprints: Iterable[int]) -> None:
        """Remembers each, forgetting as many of the oldest."""
        at, places, ring, capacity = self._next, self._places, self._ring, len(self._ring)
        if not capacity:
            return
        for fingerprint in fingerprints:
            oldest = ring[at]
            if places.get(oldest) == at:
                del places[oldest]
            ring[at] = fingerprint
            places[fingerprint] = at
            at += 1
            if at == capacity:
                at = 0
        self._next = at

    def discard_all(self, fingerprints: Iterable[int]) -> None:
        """They are cached again."""
        places = self._places
        for fingerprint in fingerprints:
            if fingerprint in places:
                del places[fingerprint]

    def clear(self) -> None:
        """Forgets all."""
        self._places.clear()
