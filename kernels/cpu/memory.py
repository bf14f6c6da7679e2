"""Memory in huge pages, where the system gives them: weights, K and V are read through in every step.

One core of an EPYC 9004 reads 96 MB at 23 GB/s from small pages and at 34 GB/s from huge ones. Nothing is
touched until it is written, so what is not used costs nothing.
"""

import contextlib
import math
import mmap

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64  # a cache line
_SLAB = 32 << 20
HUGE_PAGE = 2 << 20


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the system has only promised."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(_mapped(num_bytes)[:num_bytes]).view(dtype).reshape(shape)


class Arena:
    """Many arrays in few large mappings; each lives as long as an array of it."""

    def __init__(self) -> None:
        self._slab = np.empty(0, dtype=np.uint8)
        self._used = 0

    def zeros(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """An array of its own cache lines."""
        if self._used + num_bytes > len(self._slab):
            self._slab = _mapped(max(num_bytes, _SLAB))
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._slab[start : start + num_bytes]


def _mapped(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Anonymous memory whose start is the start of a huge page."""
    size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do
            memory.madvise(advice)
    array = np.frombuffer(memory, dtype=np.uint8)
    start = -array.ctypes.data % HUGE_PAGE
    return array[start : start + size]
