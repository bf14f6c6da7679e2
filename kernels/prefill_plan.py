"""How a step's prefill queries are cut into tiles, the launch shape, and where a tile's keys are split.

A tile is some queries of one span. Tiles are listed on the host, where prefill lengths are known. Knows no
kernel: see paged_prefill.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
from torch import Tensor

TILE_ROWS = 128
"""Queries of one tile times heads of a group."""
MIN_KEYS = 1024
"""Keys of one part of a split tile."""
MAX_PARTS = 32


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Launch shape; timings of the choices in docs/kernels/prompt-attention.md."""

    block: int = 64  # keys a loop turn
    warps: int = 8
    stages: int = 2
    max_registers: int | None = 128


def prefill_launch(head_dim: int, dtype: torch.dtype) -> PrefillLaunch:
    """Two programs have to fit into one multiprocessor's registers and shared memory; of wide rows, one."""
    if dtype == torch.float32:
        return PrefillLaunch(block=16, max_registers=None)
    return PrefillLaunch() if head_dim <= 128 else PrefillLaunch(block=32, max_registers=None)


@cache
def queries_per_tile(group: int) -> int:
    """Queries of one tile for `group` query heads a KV head; a power of two."""
    return max(1, TILE_ROWS // int(triton.next_power_of_2(group)))


def list_tiles(q_lens: Sequence[int], group: int) -> list[tuple[int, int]]:
    """(span, first query) of each tile, the longest spans' last tiles first: they take longest."""
    step = queries_per_tile(group)
    if len(q_lens) == 1:  # a lone prompt waits for its first token, and numpy is slow where it is cold
        return [(0, first) for first in reversed(range(0, q_lens[0], step))]
    counts = [-(-length // step) for length in q_lens]
    tiles = np.empty((sum(counts), 2), dtype=np.int32)
    at = 0
    for span, count in enumerate(counts):
        tiles[at : at + count, 0] = span
        tiles[at : at + count, 1] = np.arange(0, count * step, step)
        at += count
    return [(span, first) for span, first in tiles[np.argsort(-tiles[:, 1], kind="stable")].tolist()]


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """Programs of one tile, and scratch for their parts; one for a step, read and written by every layer."""

    parts: Tensor  # int32 [1], on the device, so that a graph can hold the kernels
    partial: Tensor  # fp32 [num_programs, TILE_ROWS, head_dim]
    partial_lse: Tensor  # fp32 [num_programs, TILE_ROWS]

    @property
    def num_programs(self) -> int:
        """Room: at least tiles times KV heads times parts."""
        return self.partial.shape[0]


def num_parts(num_tiles: int, num_kv_heads: int, max_kv_len: int, device: torch.device) -> int:
    """Into how many parts keys are cut so that every multiprocessor has its two programs; 1: not at all."""
    programs = resident_programs(device)
    return max(1, min(programs // (num_tiles * num_kv_heads), max_kv_len // MIN_KEYS, MAX_PARTS))


@cache
def resident_programs(device: torch.device) -> int:
    """As many as run at once."""
    if device.type != "cuda":
        return 1
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def make_split(parts: Tensor, num_programs: int, head_dim: int) -> PrefillSplit:
    """Scratch for so many programs."""
    partial = torch.empty(num_programs, TILE_ROWS, head_dim, dtype=torch.float32, device=parts.device)
    return PrefillSplit(parts, partial, torch.empty_like(partial[:, :, 0]))
