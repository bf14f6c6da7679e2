"""Which products of a decode step kernels.sliced_product takes, and in which shape. Imports no kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gluon_there import gluon_is_there

FEW_ROWS, MOST_ROWS = 64, 128
"""Up to so many it was measured, and ahead; of more than the first those that add to a residual alone."""

MULTIPROCESSORS = 132  # of the device that shapes were measured on
SHARED_BYTES = 227 << 10  # of one of them, for a program's part of the weight and of the input
BLOCK = 128  # a program's part of the width is a multiple of it


@dataclass(frozen=True, slots=True)
class SlicedLaunch:
    """Launch shape; timings of the choices in docs/kernels/products.md."""

    outputs: int = 64  # a cluster, gated: of each half
    programs: int = 4  # of a cluster, which share the width and then the outputs
    warps: int = 4


def sliced_launch(
    x: Tensor, weight: Tensor, *, gated: bool = False, adds: bool = False
) -> SlicedLaunch | None:
    """The shape for x [num_rows, width] @ weight.T where the kernel is there and was the fastest, or None."""
    if not 1 < x.shape[0] <= MOST_ROWS or not is_there(x.device):
        return None
    if not (_is_read(x) and _is_read(weight)):
        return None
    return choose_launch(*weight.shape, gated=gated, adds=adds, num_rows=x.shape[0])


def choose_launch(
    weight_rows: int, width: int, *, gated: bool, adds: bool, num_rows: int = FEW_ROWS
) -> SlicedLaunch | None:
    """For products near those measured: half a wave of programs or a whole one, each with all of its part."""
    if num_rows <= FEW_ROWS:
        launch = SlicedLaunch() if adds else SlicedLaunch(programs=2, warps=8 if gated else 4)
        return launch if _fits(launch, weight_rows, width, gated, FEW_ROWS) else None
    choices = (SlicedLaunch(), SlicedLaunch(outputs=128, programs=8, warps=8)) if adds else ()
    return next((one for one in choices if _fits(one, weight_rows, width, gated, MOST_ROWS)), None)


def _fits(launch: SlicedLaunch, weight_rows: int, width: int, gated: bool, num_rows: int) -> bool:
    num_outputs = weight_rows // 2 if gated else weight_rows
    tile = weight_rows * launch.outputs // num_outputs
    part = width // launch.programs
    is_whole = num_outputs % launch.outputs == 0 and width % (launch.programs * BLOCK) == 0
    fits = 2 * (tile + num_rows) * part <= SHARED_BYTES
    programs = num_outputs // launch.outputs * launch.programs
    is_a_wave = MULTIPROCESSORS // 3 <= programs <= MULTIPROCESSORS
    return is_whole and fits and is_a_wave


def _is_read(matrix: Tensor) -> bool:
    """Whether it is copied 16 bytes at a time."""
    return matrix.dtype == torch.bfloat16 and matrix.data_ptr() % 16 == 0


def is_there(device: torch.device) -> bool:
    """Whether the kernel can run there."""
    return gluon_is_there("kernels.sliced_product", device)
