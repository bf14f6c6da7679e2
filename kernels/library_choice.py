"""Which way of the library a product takes: a configuration of cuBLASLt that was measured, or torch's ways.

Timings by number of rows in docs/kernels/many-rows.md. The choice depends on shapes and the library's version
alone, so an answer never depends on what ran before. Where nothing was measured it is between cuBLAS and
cuBLASLt as torch calls them, which torch offers for the whole process
(torch.backends.cuda.preferred_blas_library): it is put back behind the product. For one thread at a time.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kernels.cublas_lt import Configuration, CublasLtError, LtProduct, LtShape, set_up, version

TABLE = Path(__file__).with_name("library_table.json")
"""For one device and one version of the library, by `python -m benchmarks.kernels.library_algorithms`; what
ships up to 120 rows is of an earlier form of that search, of fewer tiles (docs/kernels/many-rows.md)."""

LEAST_ROWS, MOST_ROWS = 65, 256  # of the table, and the least of what torch's ways were timed at
STEP = 8  # between the numbers of rows of the table, as between those of graphs
LONG_WIDTH, LONG_ROWS = 8192, 112  # a long row of the weight, and the most rows of the input with it
SHORT_ROWS = 232
LEAST_ELEMENTS, MOST_OUTPUTS = 16_000_000, 4096  # near 4,096 x 4,096 and 4,096 x 14,336, which were timed

log = logging.getLogger(__name__)

_refused: set[tuple[int, int, int, torch.device]] = set()
"""Shapes whose entry was accepted and did not run: at most as many as the table has, for each device."""


def prepare(device: torch.device) -> None:
    """Lets the library allocate, as it may not while a graph is captured."""
    if measured_on(device):
        try:
            set_up(device)
        except CublasLtError as error:  # who asks for a product is refused, too, and takes torch's way
            log.warning("event=library_table_unused why=%r", str(error))


def library_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [num_rows, width] @ weight [num_outputs, width].T, by the way of the library that is the fastest."""
    assert x.shape[1] == weight.shape[1], f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    shape = (x.shape[0], weight.shape[0], weight.shape[1], x.device)
    prepared = _prepared(*shape) if LEAST_ROWS <= x.shape[0] <= MOST_ROWS and _is_plain(x, weight) else None
    if prepared is not None and shape not in _refused:
        try:
            return prepared(x, weight)
        except CublasLtError as error:  # accepted, and refused when it was to run
            _refused.add(shape)
            _warn(shape, error)
    with faster_library(x.shape[0], weight):
        return linear(x, weight)


def padded_rows(x: Tensor) -> Tensor:
    """x [num_rows, width] with rows of zeros to the next number of rows that the table has: so a step with
    prompts, which has any number of tokens to sample, takes what decode steps have loaded. As it is outside.
    """
    num_rows = x.shape[0]
    missing = -num_rows % STEP if LEAST_ROWS <= num_rows <= MOST_ROWS else 0
    return pad(x, (0, 0, 0, missing)) if missing else x


@cache
def measured_on(device: torch.device) -> Mapping[tuple[int, int], Mapping[int, Configuration]]:
    """The table by outputs and width, then by rows; empty for another device or version of the library."""
    if not _is_hopper(device):
        return {}
    try:
        table = json.loads(TABLE.read_text())
        here = {"device": torch.cuda.get_device_name(device), "version": version()}
        if any(table[key] != value for key, value in here.items()):
            log.info("event=library_table_unused here=%s version=%s", table["device"], table["version"])
            return {}
        return {
            (part["outputs"], part["width"]): {int(n): Configuration(*c) for n, c in part["rows"].items()}
            for part in table["products"]
        }
    except (CublasLtError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("event=library_table_unused why=%r", str(error))
        return {}


def is_light(num_rows: int, weight: Tensor) -> bool:
    """Whether cuBLASLt is the faster of torch's two for x [num_rows, width] @ weight.T, bf16."""
    num_outputs, width = weight.shape
    most = LONG_ROWS if width >= LONG_WIDTH else SHORT_ROWS
    is_near = weight.dtype == torch.bfloat16 and num_outputs <= MOST_OUTPUTS
    is_near = is_near and weight.numel() >= LEAST_ELEMENTS
    return LEAST_ROWS <= num_rows <= most and is_near and _is_hopper(weight.device)


@contextmanager
def faster_library(num_rows: int, weight: Tensor) -> Iterator[None]:
    """Within, products go the way of torch's two that is faster for this one."""
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
def _prepared(num_rows: int, num_outputs: int, width: int, device: torch.device) -> LtProduct | None:
    """By the configuration that was the fastest for so many rows, or for the next multiple of `STEP`."""
    configuration = measured_on(device).get((num_outputs, width), {}).get(-(-num_rows // STEP) * STEP)
    if configuration is None:
        return None
    try:
        return LtProduct(LtShape(num_rows, num_outputs, width, device), configuration)
    except CublasLtError as error:
        _warn((num_rows, num_outputs, width, device), error)
        return None


def _warn(shape: tuple[int, int, int, torch.device], error: CublasLtError) -> None:
    log.warning("event=library_product_refused shape=%s why=%r", shape[:3], str(error))


def _is_plain(*matrices: Tensor) -> bool:
    """bf16, contiguous, at multiples of 16 bytes."""
    return all(
        matrix.dtype == torch.bfloat16 and matrix.is_contiguous() and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
