"""How this process keeps memory. What is said of heaps holds where the C library is glibc.

Views run in threads of their own, and glibc gives each a heap: what one frees the others cannot use, and it
wanders from one to the other. There is one for all; what threads hold of it most of the time, the
interpreter's lock, is one for all anyway. glibc also learns to keep ever larger blocks, and gives back what
is free at a heap's end alone. Arrow, which carries tables for Streamlit, brings an allocator of its own: one
more heap, of huge pages. And a closed tab's session is a cycle; Python's collector comes for it when there is
a quarter more than last time. All that makes a process which holds the same all day grow for hours: by the
most that it ever needed at once. What lives for minutes is not in the heap at all: blocks.py.
"""

import asyncio
import ctypes
import gc
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
ARENAS = 1
LARGE_BYTES = 256 * 1024  # go back to the system as soon as they are free; planes of large pools are
TRIM_BYTES = 1024 * 1024
TIDY_SECONDS = 60.0
ARROW_POOL = b"ARROW_DEFAULT_MEMORY_POOL"  # Arrow asks the environment for it when it is loaded


def settle() -> None:
    """Before the first thread starts and before Streamlit is imported."""
    library = ctypes.CDLL(None)
    choose = getattr(library, "mallopt", None)
    if choose is None:
        return
    library.setenv(ARROW_POOL, b"system", 0)  # unless someone has chosen
    for parameter, value in (
        (M_ARENA_MAX, ARENAS),
        (M_MMAP_THRESHOLD, LARGE_BYTES),
        (M_TRIM_THRESHOLD, TRIM_BYTES),
    ):
        choose(parameter, value)


NAMES = 40_000  # with those below more than fit beside those of Streamlit and all that it imports
IMMORTAL = 2**28  # references that CPython says of what it never frees, and no other has
LATER_NAMES = 25_000  # of what is imported with the first tabs, and room


def set_apart() -> None:
    """When all is loaded: the collector need not look at it again, which makes its pauses short."""
    settle_names()
    gc.collect()
    gc.freeze()


def settle_names() -> None:
    """Gives Python's table of interned strings the size at which it stays.

    Names that came and went leave holes that are not filled. When there is no room left the table is made
    anew for three times the names alive: 2 MiB more, after an hour of tabs. With this it happens now, for
    those that are alive then, too. So CPython's dictionaries grow since 3.7 (GROWTH_RATE in dictobject.c),
    which is no promise of the language: where they do otherwise, this is 3 MiB for nothing.
    """
    if names_stay():
        return
    alive = [sys.intern(f"a name of nobody {number}") for number in range(LATER_NAMES)]
    for number in range(NAMES):
        sys.intern(f"comes and goes {number}")
    del alive


def names_stay() -> bool:
    """Whether a name that nobody holds stays for ever: in CPython 3.12, and without a global lock."""
    name = "".join(("who", " asks"))  # made here: what stands in the code is held by it
    return sys.getrefcount(sys.intern(name)) >= IMMORTAL


async def keep_tidy() -> None:
    """Once a minute, until it is cancelled."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        await asyncio.to_thread(tidy)


def tidy() -> None:
    """Collects closed tabs, and gives free pages back from the middle of the heaps, too."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # milliseconds, without the interpreter's lock
