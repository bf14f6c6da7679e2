"""Causal attention of many queries per span over the span's row of the page table.

Flops: 4 * head_dim * num_heads * (keys seen by all queries). A program takes QUERIES consecutive queries
of one span and all query heads of one KV head, so that each key is loaded once for the whole group. `tiles`
lists (span, first query) pairs; it is built on the host, where prefill lengths are known.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch

TILE_ROWS = 64  # queries times heads of a group in one program


def queries_per_tile(group: int) -> int:
    """Queries of one tile for `group` query heads a KV head; a power of two."""
    return max(1, TILE_ROWS // int(triton.next_power_of_2(group)))


def list_tiles(q_lens: list[int], group: int) -> list[tuple[int, int]]:
    """(span, first query) of each tile, the longest spans' last tiles first: they take longest."""
    step = queries_per_tile(group)
    tiles = [(span, first) for span, length in enumerate(q_lens) for first in range(0, length, step)]
    return sorted(tiles, key=lambda tile: -tile[1])


def paged_prefill(q: Tensor, kv: KvLayer, batch: PagedBatch, tiles: Tensor, *, scale: float) -> Tensor:
    """Attention of every query token of the spans that `tiles` names.

    q and result [num_tokens, num_heads, head_dim]; kv.k, kv.v [num_slots, num_kv_heads, head_dim];
    tiles int32 [num_tiles, 2] of `list_tiles`. Query j of span i has position kv_lens[i] - q_len[i] + j.
    Slots past the span's tokens are never read: they may hold NaN.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    assert q.stride(2) == kv.k.stride(2) == kv.v.stride(2) == 1, "head_dim must be contiguous"
    group = num_heads // num_kv_heads
    padded = triton.next_power_of_2(group)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    _prefill_kernel[(tiles.shape[0], num_kv_heads)](
        q,
        kv.k,
        kv.v,
        out,
        batch.page_table,
        batch.rows,
        batch.kv_lens,
        batch.q_indptr,
        tiles,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        kv.k.stride(0),
        kv.k.stride(1),
        kv.v.stride(0),
        kv.v.stride(1),
        batch.page_table.stride(0),
        HEADS=num_heads,
        GROUP=group,
        GROUP_PADDED=padded,
        QUERIES=max(queries_per_tile(group), triton.cdiv(16, padded)),
        DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK=64 if head_dim <= 128 else 32,
        num_warps=4,
        num_stages=3 if head_dim <= 128 else 2,
    )
    return out


@triton.jit
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
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    row_width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = tl.load(tiles + tl.program_id(0) * 2).to(tl.int64)
    first = tl.load(tiles + tl.program_id(0) * 2 + 1)
    head = tl.program_id(1)
    start = tl.load(q_indptr + span)
    q_len = tl.load(q_indptr + span + 1) - start
    kv_len = tl.load(kv_lens + span)
    table = page_table + tl.load(rows + span).to(tl.int64) * row_width
    lane = tl.arange(0, QUERIES * GROUP_PADDED)
    query = first + lane // GROUP_PADDED
    member = lane % GROUP_PADDED
    dims = tl.arange(0, DIM_PADDED)
    mask = ((query < q_len) & (member < GROUP))[:, None] & (dims < DIM)[None, :]
    token = (start + query).to(tl.int64)
    heads = head * GROUP + member
    q_tile = tl.load(
        q + token[:, None] * q_stride + heads[:, None] * q_head_stride + dims[None, :], mask=mask, other=0.0
    )
    position = kv_len - q_len + query
    end = tl.minimum(kv_len, kv_len - q_len + first + QUERIES)
    # Keys before this are seen by every query of the tile: no mask.
    unmasked = ((kv_len - q_len + first + 1) // BLOCK) * BLOCK
    top = tl.full([QUERIES * GROUP_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES * GROUP_PADDED], tl.float32)
    acc = tl.zeros([QUERIES * GROUP_PADDED, DIM_PADDED], tl.float32)
    for at in range(0, end, BLOCK):
        key = at + tl.arange(0, BLOCK)
        inside = key < end
        slot = tl.load(table + key, mask=inside, other=0).to(tl.int64)
        load = inside[:, None] & (dims < DIM)[None, :]
        keys = tl.load(
            k_pool + slot[:, None] * k_stride + head * k_head_stride + dims[None, :], mask=load, other=0.0
        )
        scores = tl.dot(q_tile, tl.trans(keys)) * scale
        if at >= unmasked:
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        weight = weight * shrink + tl.sum(weights, 1)
        values = tl.load(
            v_pool + slot[:, None] * v_stride + head * v_head_stride + dims[None, :], mask=load, other=0.0
        )
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        top = new_top
    acc = acc / weight[:, None]
    tl.store(
        out + (token[:, None] * HEADS + heads[:, None]) * DIM + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=mask,
    )
