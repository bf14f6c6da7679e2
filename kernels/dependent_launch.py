"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits where it must.

The rule for every kernel launched with `dependent_launch`: what earlier kernels of the step write is touched
after `gdc_wait` only, and every program waits, so that the end of a grid implies the end of all before it.
Before the wait a kernel may read what no kernel writes: weights. `gdc_launch_dependents` comes first, so that
the next kernel is resident, and its weights are on their way, before this one has finished.
CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, griddepcontrol.
"""

from functools import cache

import torch
import triton
import triton.language as tl

_switch = {"is_on": True}


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments: PDL, the kernel's constant, and launch_pdl, Triton's option where it applies."""
    if _switch["is_on"] and _is_supported(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def switch_dependent_launch(is_on: bool) -> None:
    """For comparisons: launches from now on are ordinary ones, or dependent again where supported."""
    _switch["is_on"] = is_on


@cache
def _is_supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(base, first, end, row_bytes: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Asks for matrix rows first .. first + ROWS - 1, none from `end` on, to be brought into the L2 cache.

    base: the matrix's int64 address, a multiple of 16 as is `row_bytes`; rows lie one behind another. LANES:
    the threads of the program, each of which asks for a part.
    """
    part: tl.constexpr = max(512, (ROWS * row_bytes + 16 * LANES - 1) // (16 * LANES) * 16)
    begin = tl.arange(0, LANES) * part
    rows = tl.minimum(end - first, ROWS)
    size = tl.minimum(rows * row_bytes - begin, part)
    address = base + first.to(tl.int64) * row_bytes + begin
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
