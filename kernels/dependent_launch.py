"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits where it must.

The rule for every kernel launched with `dependent_launch`: what earlier kernels of the step write is touched
after `gdc_wait` only, and every program waits, so that the end of a grid implies the end of all before it.
Before the wait a kernel may read what no kernel of the step writes: weights, and what steps before have left,
since the first launch of a step is an ordinary one. `gdc_launch_dependents` comes first, so that the next
kernel is resident, and its weights are on their way, before this one has finished.
CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, griddepcontrol.

It pays in a chain of such kernels, and a little where two of them follow each other between library kernels,
which neither begin early nor let others (docs/kernels/products.md). Launches are ordinary ones except within
`dependent_launches`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl

_scope = {"is_on": False, "is_allowed": True}


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments: PDL, the kernel's constant, and launch_pdl, Triton's option where it applies."""
    if _scope["is_on"] and _scope["is_allowed"] and _is_supported(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@contextmanager
def dependent_launches(is_on: bool = True) -> Iterator[None]:
    """Within, launches are dependent ones where the device knows them. For one thread at a time."""
    before = _scope["is_on"]
    _scope["is_on"] = is_on
    try:
        yield
    finally:
        _scope["is_on"] = before


def allow_dependent_launches(is_allowed: bool) -> None:
    """For comparisons: whether `dependent_launches` has any effect from now on."""
    _scope["is_allowed"] = is_allowed


@cache
def _is_supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_in_loop():
    """gdc_wait in a loop that is to be pipelined: Triton 3.9 pipelines none that has its own in it."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence():
    """This thread's writes are seen by the device before whatever it does next."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(
    matrix,
    first,
    end,
    begin,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Asks for a part of a matrix to be brought into the L2 cache: rows first .. first + ROWS - 1, none from
    `end` on, columns begin .. begin + COLUMNS - 1, none from WIDTH on.

    The matrix, its rows of WIDTH elements and `begin` lie at multiples of 16 bytes. LANES >= ROWS: the
    threads of the program, each of which asks for a piece of one row.
    """
    itemsize: tl.constexpr = matrix.dtype.element_ty.primitive_bitwidth // 8
    pieces: tl.constexpr = LANES // ROWS
    piece: tl.constexpr = (COLUMNS * itemsize + 16 * pieces - 1) // (16 * pieces) * 16
    lane = tl.arange(0, LANES)
    row = first + lane // pieces
    offset = (lane % pieces) * piece
    left = tl.minimum(COLUMNS, WIDTH - begin) * itemsize - offset
    size = tl.where(row < end, tl.minimum(left, piece), 0)
    address = matrix.to(tl.int64) + (row.to(tl.int64) * WIDTH + begin) * itemsize + offset
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
