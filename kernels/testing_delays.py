"""Delays at the hand-overs of compiled kernels: what is right by the luck of timing alone comes out.

For tests on a GPU. Before each barrier, arrival, copy, wait, count, and load or store of global memory a warp
sleeps in one of eight passes, up to some 4 us, so that any of them may be the last one.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

HAND_OVER = re.compile(
    r"\s*(@!?%p\d+\s+)?(bar\.sync|barrier\.|mbarrier\.|cp\.async|atom\.|wgmma\.(fence|wait)|fence\.|st\.global"
    r"|ld\.global|griddepcontrol|\{ \.reg \.u32 at;)"
)
SLEEP = """{{ .reg .b32 now, mark; .reg .pred sleeps;
mov.u32 now, %clock; mov.u32 mark, %ctaid.x; mad.lo.u32 now, mark, 40503, now;
mov.u32 mark, %warpid; mad.lo.u32 now, mark, 7919, now; xor.b32 now, now, {place};
mul.lo.u32 now, now, 2654435761; shr.u32 mark, now, 29; setp.eq.u32 sleeps, mark, {turn};
shr.u32 now, now, 17; and.b32 now, now, 4095; @sleeps nanosleep.u32 now; }}"""


def with_delays(ptx: str) -> str:
    """The same program, slower at its hand-overs."""
    lines: list[str] = []
    for number, line in enumerate(ptx.split("\n")):
        if HAND_OVER.match(line):
            lines.append(SLEEP.format(place=number * 977, turn=number % 8))
        lines.append(line)
    return "\n".join(lines)


def counted_too_early(ptx: str) -> str:
    """A fault, for tests of the above: a part of a sum is counted before all warps have stored it."""
    before, count, after = ptx.partition("atom.global")
    stored, barrier, between = before.rpartition("bar.sync")
    assert barrier, "no barrier before a count"
    return stored + "//" + barrier + between + count + after


@contextmanager
def compiled_anew(kernels: list[Any], cache: Path, change: Callable[[str], str]) -> Iterator[None]:
    """Within, these kernels of Triton are compiled from PTX that was changed; `cache`: an empty folder."""
    before = CUDABackend.make_ptx
    CUDABackend.make_ptx = lambda *args, **more: change(before(*args, **more))
    try:
        with knobs.cache.scope():
            knobs.cache.dir = str(cache)
            for kernel in kernels:
                kernel.device_caches.clear()
            yield
    finally:
        CUDABackend.make_ptx = before
        for kernel in kernels:
            kernel.device_caches.clear()
