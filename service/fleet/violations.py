"""What a worker's live audit found, as its feed told it: the newest of it, for those who watch.

Owns at most 100 violations. They are no part of the mirror: a snapshot does not bring them back.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from kvatlas.v1 import cache_pb2

MAX_KEPT = 100


class ViolationLog:
    """Violations numbered from 1 in the order in which they came; old ones fall out."""

    def __init__(self) -> None:
        self._kept: deque[cache_pb2.IntegrityViolation] = deque(maxlen=MAX_KEPT)
        self.total = 0

    def add(self, violations: Iterable[cache_pb2.IntegrityViolation]) -> None:
        """Newest last."""
        for violation in violations:
            self._kept.append(violation)
            self.total += 1

    def after(self, number: int) -> Sequence[cache_pb2.IntegrityViolation]:
        """Those that came after the violation of this number, as far as they are still here."""
        missing = min(self.total - number, len(self._kept))
        return list(self._kept)[len(self._kept) - missing :]
