"""What constraints cost: compiling, the cache of compiled ones, masks. Filled by several threads."""

import threading

from worker.readers.buckets import Buckets, FrozenBuckets
from worker.readers.metric_table import COMPILE_SECONDS, MASK_SECONDS


class ConstraintMeter:
    """Counts since the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled = Buckets(COMPILE_SECONDS)
        self._masks = Buckets(MASK_SECONDS)
        self._num_compiled = 0
        self._num_found = 0

    def compiled(self, seconds: float) -> None:
        """One that was not in the cache."""
        with self._lock:
            self._num_compiled += 1
            self._compiled.observe(seconds)

    def found(self) -> None:
        """One that was in the cache."""
        with self._lock:
            self._num_found += 1

    def masks(self, num_rows: int, seconds: float) -> None:
        """Masks of some rows of a step, made by one thread."""
        with self._lock:
            self._masks.observe(seconds / num_rows)

    @property
    def lookups(self) -> dict[tuple[str, ...], float]:
        """Of the cache, by result."""
        return {("hit",): self._num_found, ("miss",): self._num_compiled}

    def frozen(self) -> dict[tuple[str, tuple[str, ...]], FrozenBuckets]:
        """Both histograms by name and label values."""
        with self._lock:
            return {
                ("constraint_compile_seconds", ()): self._compiled.frozen(),
                ("constraint_mask_seconds", ()): self._masks.frozen(),
            }
