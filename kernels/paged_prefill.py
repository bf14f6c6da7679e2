"""Causal attention of many queries per span over the span's row of the page table.

Flops: 4 * head_dim * num_heads * (keys seen by all queries). A program takes QUERIES consecutive queries
of one span and all query heads of one KV head, so that each key is loaded once for the whole group. Two
programs share a multiprocessor, so that one's products hide the other's softmax. `tiles` lists (span, first
query) pairs; it is built on the host, where prefill lengths are known. The launch shape depends on the model
alone and blocks of keys begin at position 0, so a query's bits do not depend on the batch or on how its
prompt is cut. That costs where few tiles have a long context: a PrefillSplit cuts the keys of each tile among
several programs, and a second launch merges them by log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer, PagedBatch
from kernels.dependent_launch import dependent_launch
from kernels.launcher import launch as start_kernel
from kernels.prefill_plan import TILE_ROWS, PrefillLaunch, PrefillSplit, prefill_launch, queries_per_tile

MERGE_ROWS = 16
LOG2_E = 1.4426950408889634


def paged_prefill(
    q: Tensor,
    kv: KvLayer,
    batch: PagedBatch,
    tiles: Tensor,
    *,
    scale: float,
    launch: PrefillLaunch | None = None,
    split: PrefillSplit | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every query token of the spans that `tiles` names; into `out`, contiguous, if given.

    q and result [num_tokens, num_heads, head_dim]; kv.k, kv.v [num_slots, num_kv_heads, head_dim],
    contiguous; tiles int32 [num_tiles, 2] of `list_tiles`. Query j of span i has position kv_lens[i] -
    q_len[i] + j. Slots past the span's tokens are never read: they may hold NaN. With a `split` the bits of
    a query depend on the number of parts; tiles of a graph are at least num_programs / num_kv_heads then,
    those of an empty span behind all others.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    assert q.stride(2) == 1, "head_dim must be contiguous"
    assert kv.k.is_contiguous(), "K must be contiguous"
    assert kv.v.is_contiguous(), "V must be contiguous"
    group = num_heads // num_kv_heads
    padded = triton.next_power_of_2(group)
    launch = launch or prefill_launch(head_dim, q.dtype)
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape, f"out is {tuple(out.shape)}, q {tuple(q.shape)}"
    assert out.is_contiguous(), "out must be contiguous"
    parts = split.parts if split else 1
    num_programs = split.num_programs if split else tiles.shape[0] * num_kv_heads
    where = (batch.rows, batch.kv_lens, batch.q_indptr, tiles)
    scratch = (split.partial, split.partial_lse) if split else (out, out)
    strides = (q.stride(0), q.stride(1), batch.page_table.stride(0))
    shape = (num_kv_heads, group, padded, queries_per_tile(group), head_dim, triton.next_power_of_2(head_dim))
    is_fp32 = q.dtype == torch.float32
    is_dependent = dependent_launch(q.device)["PDL"]
    scales = (scale * kv.k_scale * LOG2_E, kv.v_scale)
    start_kernel(
        _prefill_kernel,
        (num_programs,),
        (q, kv.k, kv.v, out, *scratch, batch.page_table, *where, *scales, *strides, parts),
        (*shape, launch.block, split is not None, is_fp32, is_dependent),
        num_warps=launch.warps,
        num_stages=launch.stages,
        max_registers=launch.max_registers,
        is_dependent=is_dependent,
    )
    if split:
        start_kernel(
            _merge_kernel,
            (tiles.shape[0] * num_kv_heads, TILE_ROWS // MERGE_ROWS),
            (*scratch, out, *where[1:], parts),
            (*shape, MERGE_ROWS, is_dependent),
            num_warps=4,
            is_dependent=is_dependent,
        )
    return out


@triton.jit(do_not_specialize=["scale", "v_scale", "parts"])
def _prefill_kernel(
    q,
    k_pool,
    v_pool,
    out,
    partial,
    partial_lse,
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
    parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = QUERIES * GROUP_PADDED
    STRIDE: tl.constexpr = KV_HEADS * DIM
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Without a split a number of 1 that the compiler does not know: with a constant it spills more.
    num_parts = _num_parts(parts) if SPLIT else parts
    place = tl.program_id(0) // num_parts
    head = place % KV_HEADS
    lane = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    block = tl.arange(0, BLOCK)
    span, first, token, position, real = _queries(
        place // KV_HEADS, lane, kv_lens, q_indptr, tiles, GROUP, GROUP_PADDED, False
    )
    table = page_table + tl.load(rows + span).to(tl.int64) * row_width
    heads = head * GROUP + lane % GROUP_PADDED
    mask = real[:, None] & (dims < DIM)[None, :]
    q_at = q + token[:, None] * q_stride + heads[:, None] * q_head_stride + dims[None, :]
    queries = tl.load(q_at, mask=mask, other=0.0)
    # Keys before `unmasked` are seen by every query of the tile, those from `end` on by none.
    unmasked = (first + 1) // BLOCK * BLOCK
    end = tl.minimum(tl.load(kv_lens + span), first + QUERIES)
    begin = 0
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end, BLOCK), num_parts) * BLOCK
        begin = tl.program_id(0) % num_parts * share
        end = tl.minimum(end, begin + share)
        unmasked = tl.minimum(unmasked, end)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    # Slots are loaded one turn ahead, so that keys wait for no load. Behind the end the last slot again: its
    # weights are zero, and what it holds are numbers.
    slot = tl.load(table + tl.maximum(tl.minimum(begin + block, end - 1), 0))
    for at in range(begin, unmasked, BLOCK):
        offset = slot.to(tl.int64)[:, None] * STRIDE + head * DIM + dims[None, :]
        slot = tl.load(table + tl.minimum(at + BLOCK + block, end - 1))
        scores = _scores(queries, k_pool + offset, dims, DIM, IS_FP32)
        top, weight, acc = _add(
            scores, v_pool + offset, dims, scale, top, weight, acc, queries, DIM, False, IS_FP32
        )
    for at in range(tl.maximum(begin, unmasked), end, BLOCK):
        offset = slot.to(tl.int64)[:, None] * STRIDE + head * DIM + dims[None, :]
        slot = tl.load(table + tl.minimum(at + BLOCK + block, end - 1))
        scores = _scores(queries, k_pool + offset, dims, DIM, IS_FP32)
        scores = tl.where((at + block)[None, :] <= position[:, None], scores, float("-inf"))
        top, weight, acc = _add(
            scores, v_pool + offset, dims, scale, top, weight, acc, queries, DIM, SPLIT, IS_FP32
        )
    acc = acc * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
    if SPLIT:
        at = tl.program_id(0).to(tl.int64) * ROWS + lane
        lse = tl.where(weight > 0, top + tl.log2(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        tl.store(partial_lse + at, lse)
        tl.store(partial + at[:, None] * DIM + dims[None, :], acc, mask=mask)
    else:
        # Found anew: kept through the loops they would push other numbers out of the registers.
        _, _, token, _, real = _queries(
            place // KV_HEADS, lane, kv_lens, q_indptr, tiles, GROUP, GROUP_PADDED, True
        )
        heads = head * GROUP + lane % GROUP_PADDED
        out_at = out + (token[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * DIM + dims[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=real[:, None] & (dims < DIM)[None, :])


@triton.jit
def _num_parts(parts):
    """A graph that runs for nobody finds 0."""
    return tl.maximum(tl.load(parts), 1)


@triton.jit
def _queries(
    tile, lane, kv_lens, q_indptr, tiles, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, ANEW: tl.constexpr
):
    """Of a tile: its span and first position; of each lane: token, position, whether it is a query."""
    span = tl.load(tiles + tile * 2, volatile=ANEW).to(tl.int64)
    first = tl.load(tiles + tile * 2 + 1, volatile=ANEW)
    start = tl.load(q_indptr + span, volatile=ANEW)
    q_len = tl.load(q_indptr + span + 1, volatile=ANEW) - start
    cached = tl.load(kv_lens + span, volatile=ANEW) - q_len
    query = first + lane // GROUP_PADDED
    real = (query < q_len) & (lane % GROUP_PADDED < GROUP)
    return span, cached + first, (start + query).to(tl.int64), cached + query, real


@triton.jit
def _load_rows(at, dims, DIM: tl.constexpr):
    """Rows of K or V; columns from DIM on are zero."""
    return tl.load(at) if dims.shape[0] == DIM else tl.load(at, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def _scores(queries, k_at, dims, DIM: tl.constexpr, IS_FP32: tl.constexpr):
    keys = _load_rows(k_at, dims, DIM).to(queries.dtype)
    return tl.dot(queries, tl.trans(keys), input_precision="ieee" if IS_FP32 else "tf32")


@triton.jit
def _add(
    scores,
    v_at,
    dims,
    scale,
    top,
    weight,
    acc,
    queries,
    DIM: tl.constexpr,
    MAY_BE_BLIND: tl.constexpr,
    IS_FP32: tl.constexpr,
):
    """Online softmax: the sums after one more block of keys. A blind query has seen no key yet."""
    values = _load_rows(v_at, dims, DIM).to(queries.dtype)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = tl.where(new_top > float("-inf"), new_top, 0.0) if MAY_BE_BLIND else new_top
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(weights, 1)
    acc = tl.dot(
        weights.to(queries.dtype),
        values,
        acc * shrink[:, None],
        input_precision="ieee" if IS_FP32 else "tf32",
    )
    return new_top, weight, acc


@triton.jit
def _merge_kernel(
    partial,
    partial_lse,
    out,
    kv_lens,
    q_indptr,
    tiles,
    parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts of ROWS queries times heads of one tile, weighted by their log-sum-exp."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    lane = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    _, _, token, _, real = _queries(
        place // KV_HEADS, lane, kv_lens, q_indptr, tiles, GROUP, GROUP_PADDED, False
    )
    mask = real[:, None] & (dims < DIM)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    num_parts = _num_parts(parts)
    # An empty tile has no scratch.
    for part in range(tl.where(tl.max(real.to(tl.int32), 0) > 0, num_parts, 0)):
        at = (place * num_parts + part).to(tl.int64) * (QUERIES * GROUP_PADDED) + lane
        lse = tl.load(partial_lse + at)
        rows = tl.load(partial + at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        safe = tl.where(new_top > float("-inf"), new_top, 0.0)
        share = tl.exp2(lse - safe)
        shrink = tl.exp2(top - safe)
        merged = merged * shrink[:, None] + rows * share[:, None]
        weight = weight * shrink + share
        top = new_top
    merged = merged / tl.where(weight > 0, weight, 1.0)[:, None]
    heads = place % KV_HEADS * GROUP + lane % GROUP_PADDED
    out_at = out + (token[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * DIM + dims[None, :]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=mask)
