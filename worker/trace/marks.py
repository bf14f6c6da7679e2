"""Token ids for what-if: marks. No two prefixes end in the same one (pages/marked_prefixes.py).

A recording has no token ids, only keys of prefixes, one at each multiple of its granularity. Two prompts
have the same marks here exactly as far as they have the same keys, so they share a run of pages where they
did then, whatever the page size. What no key covers is its sequence's alone.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

MAX_MARKS = 0xFFFF_FFF0  # they are 'I'; a few are left for other uses


class Marks:
    """The marks of one trace: ``per_key`` for each of ``keys``, which repeat, and fresh ones.

    Raises ValueError where there are too many for 32 bits.
    """

    def __init__(self, keys: Sequence["array[int]"], per_key: int) -> None:
        self.per_key = per_key
        self._lengths = [len(part) for part in keys]
        every = np.frombuffer(b"".join(keys), dtype=np.uint64)
        # Asked for the inverse it sorts, which is faster.
        self._known, self._numbers = np.unique(every, return_inverse=True)
        self._next = 0
        self.fresh(len(self._known) * per_key)

    def fresh(self, count: int) -> range:
        """So many that stand nowhere else."""
        first, self._next = self._next, self._next + count
        if self._next > MAX_MARKS:
            raise ValueError(f"{self._next} units of different prefixes, at most {MAX_MARKS} are possible")
        return range(first, self._next)

    def of_each(self) -> Iterator[bytes]:
        """Those of each of the ``keys``, 'I', in their order."""
        units, at, size = self._units(self._numbers), 0, 4 * self.per_key
        for length in self._lengths:
            yield units[at : at + length * size]
            at += length * size

    def of(self, keys: "array[int]") -> bytes:
        """Those of some of the keys."""
        return self._units(np.searchsorted(self._known, np.frombuffer(keys, dtype=np.uint64)))

    def _units(self, numbers: npt.NDArray[np.intp]) -> bytes:
        firsts = numbers.astype(np.uint32) * np.uint32(self.per_key)
        return (firsts[:, None] + np.arange(self.per_key, dtype=np.uint32)).tobytes()
