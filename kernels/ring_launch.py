"""Which products of a decode step kernels.ring_product takes, and in which shape. Imports no kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gluon_there import gluon_is_there

LEAST_ROWS, MOST_ROWS = 33, 64
"""Where it is ahead; with fewer rows another kernel of ours is as fast or faster, with more the library."""
MOST_OF_SMALL_LAYERS = 128
"""Rows in groups that run side by side (worker/execution/row_groups.py)."""

MULTIPROCESSORS = 132  # of the device that shapes were measured on
HEAD_OUTPUTS = 65_536


@dataclass(frozen=True, slots=True)
class RingLaunch:
    """Launch shape; timings of the choices in docs/kernels/products.md."""

    outputs: int = 128  # a program, 64 or more for every four warps; gated: of each half
    block: int = 64  # elements of the width a turn
    splits: int = 1  # programs that share the width of one tile
    warps: int = 8  # that multiply
    stages: int = 4  # turns in the ring
    programs: int = 1  # a multiprocessor, for which registers are shared out


def ring_launch(x: Tensor, weight: Tensor, *, gated: bool = False, adds: bool = False) -> RingLaunch | None:
    """The shape for x [num_rows, width] @ weight.T where the kernel is there and was the fastest, or None."""
    if not LEAST_ROWS <= x.shape[0] <= MOST_OF_SMALL_LAYERS or not is_there(x.device):
        return None
    if not (is_read(x) and is_read(weight)):
        return None
    return choose_launch(*weight.shape, gated=gated, adds=adds, num_rows=x.shape[0])


def choose_launch(
    weight_rows: int, width: int, *, gated: bool, adds: bool, num_rows: int = MOST_ROWS
) -> RingLaunch | None:
    """For products near those measured: one wave of programs with few multiprocessors idle, or a head."""

    def is_a_wave(programs: float) -> bool:
        return 0.7 * MULTIPROCESSORS <= programs <= MULTIPROCESSORS

    if width < 2048:
        return _of_small_layers(weight_rows, gated=gated, adds=adds, is_many=num_rows > MOST_ROWS)
    if num_rows > MOST_ROWS:
        return None
    if gated:
        return RingLaunch(stages=5) if is_a_wave(weight_rows / 256) else None
    if adds:
        is_long = width >= 8192 and is_a_wave(weight_rows / 32)
        return RingLaunch(outputs=64, splits=2, warps=4, stages=12) if is_long else None
    if weight_rows >= HEAD_OUTPUTS:
        return RingLaunch(stages=4, programs=2)
    return RingLaunch(outputs=64, warps=4, stages=12) if is_a_wave(weight_rows / 64) else None


def _of_small_layers(weight_rows: int, *, gated: bool, adds: bool, is_many: bool) -> RingLaunch | None:
    """Tiles of 64 outputs, in which all or most of a program's weight is on its way at once."""
    if adds:
        return None
    if weight_rows >= HEAD_OUTPUTS:
        return None if is_many else RingLaunch(outputs=64, warps=4, stages=6, programs=2)
    tiles = weight_rows / (128 if gated else 64)
    is_near = MULTIPROCESSORS / 3 <= tiles <= MULTIPROCESSORS / 2
    stages = (6 if gated else 9) if is_many else (8 if gated else 12)
    return RingLaunch(outputs=64, warps=4, stages=stages) if is_near else None


def is_read(matrix: Tensor) -> bool:
    """Whether the tensor copy engine can read it: rows of 2-byte elements at multiples of 16 bytes."""
    return matrix.dtype == torch.bfloat16 and matrix.shape[1] % 8 == 0 and matrix.data_ptr() % 16 == 0


def is_there(device: torch.device) -> bool:
    """Whether the kernel can run there."""
    return gluon_is_there("kernels.ring_product", device)
