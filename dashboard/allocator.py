"""How this process keeps memory, where the C library is glibc; elsewhere nothing is set.

Views run in threads of their own, and glibc gives each a heap: what one frees the others cannot use. It also
learns to keep ever larger blocks. Both make a process that holds the same all day grow for hours.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
ARENAS = 2
LARGE_BYTES = 256 * 1024  # go back to the system as soon as they are free; planes of large pools are
TRIM_BYTES = 1024 * 1024


def settle() -> None:
    """Before the first thread starts."""
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is None:
        return
    for parameter, value in (
        (M_ARENA_MAX, ARENAS),
        (M_MMAP_THRESHOLD, LARGE_BYTES),
        (M_TRIM_THRESHOLD, TRIM_BYTES),
    ):
        choose(parameter, value)
