"""How each row of the page table is sampled, as columns on the device; the dummy row has an entry too.

Owns the columns' format and how rows are written. A CUDA graph holds the columns' addresses, so they are
made once and written in place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_COLUMNS = 7
LOWEST_TEMPERATURE = 1e-5
"""Below it logit / temperature leaves what float32 can tell apart: greedy."""
_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """Views of one int32 matrix, so that a step's new rows travel in one copy."""

    matrix: Tensor  # int32 [NUM_COLUMNS, num_rows]: the columns below, in this order
    temperature: Tensor  # fp32 [num_rows]; 0: greedy
    top_k: Tensor  # int32 [num_rows]; 0: off
    top_p: Tensor  # fp32 [num_rows]; 1: off
    log_min_p: Tensor  # fp32 [num_rows]; -inf: off
    seed_low: Tensor  # int32 [num_rows], the bits of a uint32
    seed_high: Tensor  # int32 [num_rows], the bits of a uint32
    choice: Tensor  # int32 [num_rows]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sequence's values. With top_k 1 nothing is left to draw: it is greedy, ties and all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits, with or without sign
    choice: int = 0


def make_columns(num_rows: int, device: torch.device) -> SampleColumns:
    """All rows greedy."""
    matrix = torch.zeros(NUM_COLUMNS, num_rows, dtype=torch.int32, device=device)
    columns = SampleColumns(
        matrix=matrix,
        temperature=matrix[0].view(torch.float32),
        top_k=matrix[1],
        top_p=matrix[2].view(torch.float32),
        log_min_p=matrix[3].view(torch.float32),
        seed_low=matrix[4],
        seed_high=matrix[5],
        choice=matrix[6],
    )
    columns.top_p.fill_(1.0)
    columns.log_min_p.fill_(float("-inf"))
    return columns


def write_rows(columns: SampleColumns, rows: Sequence[int], values: Sequence[SampleRow]) -> None:
    """Sets these rows, in one copy and one scatter."""
    if not rows:
        return
    device = columns.matrix.device
    host = torch.empty(NUM_COLUMNS + 1, len(rows), dtype=torch.int32, pin_memory=device.type == "cuda")
    into = host.numpy()
    into[:NUM_COLUMNS] = matrix_of(values)
    into[NUM_COLUMNS] = np.asarray(rows, dtype=np.int32)
    moved = host.to(device, non_blocking=True)
    columns.matrix[:, moved[NUM_COLUMNS].long()] = moved[:NUM_COLUMNS]


def matrix_of(values: Sequence[SampleRow]) -> NDArray[np.int32]:
    """Rows as columns of SampleColumns.matrix: [NUM_COLUMNS, len(values)].

    Number by number: a row is often alone, and seven arrays of one number take ten times as long.
    """
    matrix = np.empty((NUM_COLUMNS, len(values)), dtype=np.int32)
    as_floats, as_bits = matrix.view(np.float32), matrix.view(np.uint32)
    for at, value in enumerate(values):
        as_floats[0, at] = _temperature(value)
        matrix[1, at] = min(value.top_k, _MOST_INT32)  # a request's has 32 bits without a sign
        as_floats[2, at] = value.top_p
        as_floats[3, at] = np.log(np.float32(value.min_p)) if value.min_p > 0.0 else -math.inf
        as_bits[4, at] = value.seed & 0xFFFFFFFF
        as_bits[5, at] = value.seed >> 32 & 0xFFFFFFFF
        matrix[6, at] = value.choice
    return matrix


def _temperature(value: SampleRow) -> float:
    is_random = value.temperature >= LOWEST_TEMPERATURE and value.top_k != 1
    return value.temperature if is_random else 0.0
