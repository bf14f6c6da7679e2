"""Which way of the library a product of a large layer takes: cuBLAS, or cuBLASLt where that was faster.

Timings by number of rows in docs/kernels.md. The choice depends on shapes alone, so an answer never depends
on what ran before. torch offers it for the whole process (torch.backends.cuda.preferred_blas_library), so it
is put back behind the product: for one thread at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

LEAST_ROWS = 65
LONG_WIDTH, LONG_ROWS = 8192, 112  # a long row of the weight, and the most rows of the input with it
SHORT_ROWS = 232
LEAST_ELEMENTS, MOST_OUTPUTS = 16_000_000, 4096  # near 4,096 x 4,096 and 4,096 x 14,336, which were timed


def is_light(num_rows: int, weight: Tensor) -> bool:
    """Whether cuBLASLt is the faster for x [num_rows, width] @ weight.T, bf16."""
    num_outputs, width = weight.shape
    most = LONG_ROWS if width >= LONG_WIDTH else SHORT_ROWS
    is_near = weight.dtype == torch.bfloat16 and num_outputs <= MOST_OUTPUTS
    is_near = is_near and weight.numel() >= LEAST_ELEMENTS
    return LEAST_ROWS <= num_rows <= most and is_near and _is_hopper(weight.device)


@contextmanager
def faster_library(num_rows: int, weight: Tensor) -> Iterator[None]:
    """Within, products go the way that is faster for this one."""
    if not is_light(num_rows, weight):
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
