"""A histogram that one thread fills and others read as a frozen copy."""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

FrozenBuckets = tuple[tuple[int, ...], float]
"""Counts by bucket, not yet accumulated, the last one above all edges; and the sum of all values."""


class Buckets:
    """Counts of values by upper edge; a value on an edge belongs to the bucket below it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._frozen: FrozenBuckets | None = None

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._frozen = None

    def observe_all(self, values: "npt.NDArray[np.float64]") -> None:
        """Counts many values, float64 [n]."""
        if not len(values):
            return
        found = np.bincount(np.searchsorted(self._edges, values, side="left"), minlength=len(self._counts))
        self._counts = [before + more for before, more in zip(self._counts, found.tolist(), strict=True)]
        self._sum += float(values.sum())
        self._frozen = None

    def frozen(self) -> FrozenBuckets:
        """What was counted so far; the same object until something is counted again."""
        if self._frozen is None:
            self._frozen = (tuple(self._counts), self._sum)
        return self._frozen
