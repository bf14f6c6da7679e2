"""How a step's prefill queries are cut into tiles, the launch shape, and where a tile's keys are split.

A tile is some queries of one span. Tiles are listed on the host, where prefill lengths are known. Knows no
kernel: see paged_prefill.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

TILE_ROWS = 128
"""Queries of one tile times heads of a group."""
MIN_KEYS = 1024
"""Keys of one part of a split tile."""
MAX_PARTS = 32


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Launch shape; timings of the choices in docs/kernels.md."""

    block: int = 64  # keys a loop turn
    warps: int = 8
    stages: int = 2
    max_registers: int | None = 128


def prefill_launch(head_dim: int, dtype: torch.dtype) -> PrefillLaunch:
    """Two programs have to fit into one multiprocessor's registers and shared memory; of wide rows, one."""
    if dtype == torch.float32:
        return PrefillLaunch(block=16, max_registers=None)
    return PrefillLaunch() if head_dim <= 128 else PrefillLaunch(block=32, max_registers=None)


def queries_per_tile(group: int) -> int:
    """Queries of one tile for `group` query heads a KV head; a power of two."""
    return max(1, TILE_ROWS // int(triton.next_power_of_2(group)))


def list_tiles(q_lens: Sequence[int], group: int) -> list[tuple[int, int]]:
    """(span, first query) of each tile, the longest spans' last tiles first: they take longest."""
    return [(span, first) for span, first in tile_array(q_lens, group).tolist()]


def tile_array(q_lens: Sequence[int], group: int) -> NDArray[np.int32]:
    """`list_tiles` as int32 [num_tiles, 2]."""
    step = queries_per_tile(group)
    counts = [-(-length // step) for length in q_lens]
    tiles = np.empty((sum(counts), 2), dtype=np.int32)
    at = 0
    for span, count in enumerate(counts):
        tiles[at : at + count, 0] = span
        tiles[at : at + count, 1] = np.arange(0, count * step, step)
        at += count
    return tiles[np.argsort(-tiles[:, 1], kind="stable")]


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """Programs of one tile, and scratch for their parts; one for a step, read and written by every layer."""

    parts: int
    partial: Tensor  # fp32 [num_tiles, num_kv_heads, parts, TILE_ROWS, head_dim]
    partial_lse: Tensor  # fp32 [num_tiles, num_kv_heads, parts, TILE_ROWS]


def make_split(
    num_tiles: int, num_kv_heads: int, head_dim: int, max_kv_len: int, device: torch.device
) -> PrefillSplit | None:
    """A split that gives every multiprocessor its two programs; None where there is no need."""
    parts = num_parts(num_tiles, num_kv_heads, max_kv_len, device)
    return split_in(parts, num_tiles, num_kv_heads, head_dim, device) if parts > 1 else None


def num_parts(num_tiles: int, num_kv_heads: int, max_kv_len: int, device: torch.device) -> int:
    """Into how many parts the keys of each tile are cut; 1: not at all."""
    if device.type != "cuda":
        return 1
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(programs // (num_tiles * num_kv_heads), max_kv_len // MIN_KEYS, MAX_PARTS))


def split_in(
    parts: int, num_tiles: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> PrefillSplit:
    """Scratch for a given number of parts."""
    shape = (num_tiles, num_kv_heads, parts, TILE_ROWS)
    return PrefillSplit(
        parts,
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
