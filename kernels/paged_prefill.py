"""Causal attention of many queries per span over the span's row of the page table.

Flops: 4 * head_dim * num_heads * (keys seen by all queries). A program takes QUERIES consecutive queries
of one span and all query heads of one KV head, so that each key is loaded once for the whole group. Two
programs share a multiprocessor, so that one's products hide the other's softmax. `tiles` lists (span, first
query) pairs; it is built on the host, where prefill lengths are known. The launch shape depends on the model
alone and blocks of keys begin at position 0, so a query's bits do not depend on the batch or on how its
prompt is cut.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer, PagedBatch
from kernels.dependent_launch import dependent_launch

TILE_ROWS = 128  # queries times heads of a group in one program
LOG2_E = 1.4426950408889634


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


def list_tiles(q_lens: list[int], group: int) -> list[tuple[int, int]]:
    """(span, first query) of each tile, the longest spans' last tiles first: they take longest."""
    step = queries_per_tile(group)
    tiles = [(span, first) for span, length in enumerate(q_lens) for first in range(0, length, step)]
    return sorted(tiles, key=lambda tile: -tile[1])


def paged_prefill(
    q: Tensor,
    kv: KvLayer,
    batch: PagedBatch,
    tiles: Tensor,
    *,
    scale: float,
    launch: PrefillLaunch | None = None,
) -> Tensor:
    """Attention of every query token of the spans that `tiles` names.

    q and result [num_tokens, num_heads, head_dim]; kv.k, kv.v [num_slots, num_kv_heads, head_dim],
    contiguous; tiles int32 [num_tiles, 2] of `list_tiles`. Query j of span i has position kv_lens[i] -
    q_len[i] + j. Slots past the span's tokens are never read: they may hold NaN.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    assert q.stride(2) == 1, "head_dim must be contiguous"
    assert kv.k.is_contiguous(), "K must be contiguous"
    assert kv.v.is_contiguous(), "V must be contiguous"
    group = num_heads // num_kv_heads
    padded = triton.next_power_of_2(group)
    launch = launch or prefill_launch(head_dim, q.dtype)
    on_device = {"maxnreg": launch.max_registers} if q.is_cuda and launch.max_registers else {}
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    _prefill_kernel[(tiles.shape[0] * num_kv_heads,)](
        q,
        kv.k,
        kv.v,
        out,
        batch.page_table,
        batch.rows,
        batch.kv_lens,
        batch.q_indptr,
        tiles,
        scale * kv.k_scale * LOG2_E,
        kv.v_scale,
        q.stride(0),
        q.stride(1),
        batch.page_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=padded,
        QUERIES=max(queries_per_tile(group), triton.cdiv(16, padded)),
        DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK=launch.block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
        **on_device,
        **dependent_launch(q.device),
    )
    return out


@triton.jit(do_not_specialize=["scale", "v_scale"])
def _prefill_kernel(
    q,
    k_pool,
    v_pool,
    out,
    page_table,
    rows,
    kv_lens,
    q_indptr,
    tiles,
    scale,
    v_scale,
    q_stride,
    q_head_stride,
    row_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = QUERIES * GROUP_PADDED
    STRIDE: tl.constexpr = KV_HEADS * DIM
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    span = tl.load(tiles + tile * 2).to(tl.int64)
    first = tl.load(tiles + tile * 2 + 1)
    start = tl.load(q_indptr + span)
    q_len = tl.load(q_indptr + span + 1) - start
    kv_len = tl.load(kv_lens + span)
    table = page_table + tl.load(rows + span).to(tl.int64) * row_width
    lane = tl.arange(0, ROWS)
    query = first + lane // GROUP_PADDED
    heads = head * GROUP + lane % GROUP_PADDED
    dims = tl.arange(0, DIM_PADDED)
    block = tl.arange(0, BLOCK)
    mask = ((query < q_len) & (lane % GROUP_PADDED < GROUP))[:, None] & (dims < DIM)[None, :]
    token = (start + query).to(tl.int64)
    q_at = q + token[:, None] * q_stride + heads[:, None] * q_head_stride + dims[None, :]
    queries = tl.load(q_at, mask=mask, other=0.0)
    position = kv_len - q_len + query
    end = tl.minimum(kv_len, kv_len - q_len + first + QUERIES)
    # Keys before this are seen by every query of the tile: no mask.
    unmasked = (kv_len - q_len + first + 1) // BLOCK * BLOCK
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    # Slots are loaded one turn ahead, so that keys wait for no load. Behind the end the last slot again: its
    # weights are zero, and what it holds are numbers.
    slot = tl.load(table + tl.minimum(block, end - 1))
    for at in range(0, unmasked, BLOCK):
        offset = slot.to(tl.int64)[:, None] * STRIDE + head * DIM + dims[None, :]
        slot = tl.load(table + tl.minimum(at + BLOCK + block, end - 1))
        scores = _scores(queries, k_pool + offset, dims, DIM, PRECISION)
        top, weight, acc = _add(
            scores, v_pool + offset, dims, scale, top, weight, acc, queries, DIM, PRECISION
        )
    for at in range(unmasked, end, BLOCK):
        offset = slot.to(tl.int64)[:, None] * STRIDE + head * DIM + dims[None, :]
        slot = tl.load(table + tl.minimum(at + BLOCK + block, end - 1))
        scores = _scores(queries, k_pool + offset, dims, DIM, PRECISION)
        scores = tl.where((at + block)[None, :] <= position[:, None], scores, float("-inf"))
        top, weight, acc = _add(
            scores, v_pool + offset, dims, scale, top, weight, acc, queries, DIM, PRECISION
        )
    acc = acc * (v_scale / weight)[:, None]
    out_at = out + (token[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * DIM + dims[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_rows(at, dims, DIM: tl.constexpr):
    """Rows of K or V; columns from DIM on are zero."""
    return tl.load(at) if dims.shape[0] == DIM else tl.load(at, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def _scores(queries, k_at, dims, DIM: tl.constexpr, PRECISION: tl.constexpr):
    keys = _load_rows(k_at, dims, DIM).to(queries.dtype)
    return tl.dot(queries, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def _add(scores, v_at, dims, scale, top, weight, acc, queries, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Online softmax: the sums after one more block of keys."""
    values = _load_rows(v_at, dims, DIM).to(queries.dtype)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    weight = weight * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(queries.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, weight, acc
