"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits where it must.

A kernel too small to fill the device can also take prefetching programs along (`Ahead`): they ask for the
weights of the next product, a library kernel that cannot begin early itself.

The rule for every kernel launched with `dependent_launch`: what earlier kernels of the step write is touched
after `gdc_wait` only, and every program waits, so that the end of a grid implies the end of all before it.
Before the wait a kernel may read what no kernel writes: weights. `gdc_launch_dependents` comes first, so that
the next kernel is resident, and its weights are on their way, before this one has finished.
CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, griddepcontrol.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

AHEAD_PROGRAMS = 64
"""Prefetching programs beside a small kernel: enough to ask for some MB in the time it takes."""

MAX_AHEAD_BYTES = 16 << 20
"""Of a larger weight only so much: what a small kernel's time is enough for, and the L2 cache holds."""

_switch = {"is_on": True}


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments: PDL, the kernel's constant, and launch_pdl, Triton's option where it applies."""
    if _switch["is_on"] and _is_supported(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def switch_dependent_launch(is_on: bool) -> None:
    """For comparisons: launches from now on are ordinary ones, or dependent again where supported."""
    _switch["is_on"] = is_on


def ahead_of(weight: Tensor | None, device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel that prefetches `weight`, which is contiguous, beside its own work."""
    if weight is None or not dependent_launch(device)["PDL"] or weight.data_ptr() % 16:
        return {"ahead": weight, "ahead_bytes": 0, "AHEAD": 0}
    num_bytes = min(weight.numel() * weight.element_size(), MAX_AHEAD_BYTES) // 16 * 16
    return {"ahead": weight, "ahead_bytes": num_bytes, "AHEAD": AHEAD_PROGRAMS}


@cache
def _is_supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(base, first, end, row_bytes: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Asks for matrix rows first .. first + ROWS - 1, none from `end` on, to be brought into the L2 cache.

    base: the matrix's int64 address, a multiple of 16 as is `row_bytes`; rows lie one behind another. LANES:
    the threads of the program, each of which asks for a part.
    """
    even: tl.constexpr = (ROWS * row_bytes + 16 * LANES - 1) // (16 * LANES) * 16
    part: tl.constexpr = even if even > 512 else 512
    begin = tl.arange(0, LANES) * part
    rows = tl.minimum(end - first, ROWS)
    size = tl.minimum(rows * row_bytes - begin, part)
    _prefetch_parts(base + first.to(tl.int64) * row_bytes + begin, size)


@triton.jit
def prefetch_share(base, num_bytes, program, PROGRAMS: tl.constexpr, LANES: tl.constexpr):
    """Asks for one program's share of `num_bytes`, a multiple of 16, from address `base`."""
    part = (num_bytes + 16 * PROGRAMS * LANES - 1) // (16 * PROGRAMS * LANES) * 16
    begin = (program * LANES + tl.arange(0, LANES)) * part
    _prefetch_parts(base + begin, tl.minimum(num_bytes - begin, part))


@triton.jit
def _prefetch_parts(address, size):
    """One request a thread; none where size is not positive."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
