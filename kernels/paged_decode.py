"""Attention of one query token per sequence over its row of the page table, split over the context.

Bytes that must move: 2 * sum(kv_lens) * num_kv_heads * head_dim * itemsize, once; everything else is small.
A program has the tile of its own number (see decode_plan.py), then takes others from a queue until none is
left. Slots are loaded one turn ahead, so that K and V wait for no other load. Chunks of one sequence are
merged by log-sum-exp by whichever program finishes last (Flash-Decoding, Dao et al. 2023; no second launch).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer
from kernels.decode_plan import RECORD, DecodePlan
from kernels.dependent_launch import dependent_launch
from kernels.launcher import launch as start_kernel

LOG2_E = 1.4426950408889634


def paged_decode(
    q: Tensor, kv: KvLayer, page_table: Tensor, plan: DecodePlan, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """Attention of q[i] over the first kv_lens[i] slots of row rows[i], as `plan_decode` was told them.

    q and result [num_spans, num_heads, head_dim]; kv.k, kv.v [num_slots, num_kv_heads, head_dim], contiguous;
    page_table int32 [num_rows, width]; `out`, contiguous, receives the result. Reads nothing past kv_lens, so
    unused slots may hold NaN.
    """
    num_spans, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    assert q.stride(2) == 1, "head_dim must be contiguous"
    assert kv.k.is_contiguous(), "K must be contiguous"
    assert kv.v.is_contiguous(), "V must be contiguous"
    assert num_spans <= plan.arrived.shape[0], f"plan is for {plan.arrived.shape[0]} spans, got {num_spans}"
    if out is None:
        out = torch.empty(num_spans, num_heads, head_dim, dtype=q.dtype, device=q.device)
    assert out.is_contiguous(), "out must be contiguous"
    group = num_heads // num_kv_heads
    row_bytes = triton.next_power_of_2(head_dim) * q.element_size()
    launch, num_programs = plan.launch_of(num_spans, row_bytes), plan.num_programs(num_spans, row_bytes)
    heads = (num_kv_heads, group, max(16, triton.next_power_of_2(group)))
    dims = (head_dim, triton.next_power_of_2(head_dim))
    lists = (plan.chunks, plan.num_chunks, plan.queue)
    scratch = (plan.partial, plan.partial_lse, plan.arrived)
    strides = (q.stride(0), q.stride(1), page_table.stride(0))
    is_dependent = dependent_launch(q.device)["PDL"]
    is_fp32 = q.dtype == torch.float32
    scales = (scale * kv.k_scale * LOG2_E, kv.v_scale)
    start_kernel(
        _decode_kernel,
        (num_programs,),
        (q, kv.k, kv.v, out, page_table, *lists, *scratch, *scales, num_programs, *strides),
        (*heads, *dims, RECORD, launch.warps, launch.block, is_fp32, is_dependent),
        num_warps=launch.warps,
        num_stages=launch.stages,
        is_dependent=is_dependent,
    )
    return out


@triton.jit(do_not_specialize=["scale", "v_scale", "num_programs"])
def _decode_kernel(
    q,
    k_pool,
    v_pool,
    out,
    page_table,
    chunks,
    num_chunks,
    queue,
    partial,
    partial_lse,
    arrived,
    scale,
    v_scale,
    num_programs,
    q_stride,
    q_head_stride,
    row_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    RECORD: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    HEADS: tl.constexpr = KV_HEADS * GROUP
    dims = tl.arange(0, DIM_PADDED)
    members = tl.arange(0, GROUP_PADDED)
    mask = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    # All at once, and before it is known whether the list has this entry: one latency instead of two.
    total = tl.load(num_chunks) * KV_HEADS
    span, row, begin, end, index, count = _entry(chunks, tile // KV_HEADS, RECORD)
    has_queue = total > num_programs
    while tile < total:
        taken = 0
        if has_queue:
            taken = tl.atomic_add(queue, 1, sem="relaxed")
        entry = tile // KV_HEADS
        head = tile % KV_HEADS
        table = page_table + row * row_width
        heads = head * GROUP + members
        q_at = q + span * q_stride + heads[:, None] * q_head_stride + dims[None, :]
        query = tl.load(q_at, mask=mask, other=0.0)
        acc, top, weight = _attend(
            query,
            k_pool + head * DIM,
            v_pool + head * DIM,
            table,
            begin,
            end,
            scale,
            KV_HEADS * DIM,
            DIM,
            DIM_PADDED,
            GROUP_PADDED,
            BLOCK,
            WARPS > 1,
            IS_FP32,
        )
        acc = acc * (v_scale / weight)[:, None]
        out_at = out + span * (HEADS * DIM)
        if count == 1:
            tl.store(out_at + heads[:, None] * DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)
        else:
            at = entry.to(tl.int64) * HEADS + heads
            tl.store(partial + at[:, None] * DIM + dims[None, :], acc, mask=mask)
            tl.store(partial_lse + at, top + tl.log2(weight), mask=members < GROUP)
            # The last program to arrive merges: the barrier orders this program's stores before the count.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + span * KV_HEADS + head, 1, sem="acq_rel")
            if before == count - 1:
                tl.debug_barrier()
                first = entry - index
                _merge(partial, partial_lse, out_at, first, count, head, HEADS, GROUP, DIM, DIM_PADDED, WARPS)
                tl.store(arrived + span * KV_HEADS + head, 0)
        tile = num_programs + taken
        if tile < total:
            span, row, begin, end, index, count = _entry(chunks, tile // KV_HEADS, RECORD)
    # One number is taken for each tile; whoever got the last of them is the last to look at the queue.
    if has_queue & (tile == num_programs + total - 1):
        tl.store(queue, 0)


@triton.jit
def _entry(chunks, entry, RECORD: tl.constexpr):
    """Of the list: span, row, first token, end, index among the span's chunks, their number."""
    record = chunks + entry * RECORD
    span = tl.load(record).to(tl.int64)
    row = tl.load(record + 1).to(tl.int64)
    begin = tl.load(record + 2)
    end = tl.load(record + 3)
    return span, row, begin, end, tl.load(record + 4), tl.load(record + 5)


@triton.jit
def _attend(
    query,
    k_head,
    v_head,
    table,
    begin,
    end,
    scale,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_LATE: tl.constexpr,
    IS_FP32: tl.constexpr,
):
    """Slots begin .. end - 1 of a row: weighted sum of V [GROUP_PADDED, DIM_PADDED], top score, weight.

    SUM_LATE: weights of a row, which lie in several warps, are summed once, not in each turn.
    """
    dims = tl.arange(0, DIM_PADDED)
    tokens = tl.arange(0, BLOCK)
    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PADDED, BLOCK] if SUM_LATE else [GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    slot = tl.load(table + begin + tokens, mask=begin + tokens < end, other=0)
    for at in range(begin, end, BLOCK):
        position = at + tokens
        inside = position < end
        # Slots fit int32, offsets into a big pool do not.
        offset = slot.to(tl.int64)[:, None] * STRIDE + dims[None, :]
        slot = tl.load(table + position + BLOCK, mask=position + BLOCK < end, other=0)
        readable = inside[:, None] if DIM == DIM_PADDED else inside[:, None] & (dims < DIM)[None, :]
        keys = tl.load(k_head + offset, mask=readable, other=0.0)
        values = tl.load(v_head + offset, mask=readable, other=0.0)
        scores = (
            tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee" if IS_FP32 else "tf32")
            * scale
        )
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        weight = weight * shrink[:, None] + weights if SUM_LATE else weight * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(
            weights.to(query.dtype),
            values.to(query.dtype),
            acc,
            input_precision="ieee" if IS_FP32 else "tf32",
        )
        top = new_top
    return acc, top, tl.sum(weight, 1) if SUM_LATE else weight


@triton.jit
def _merge(
    partial,
    partial_lse,
    out_at,
    first,
    count,
    head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The sum of `count` parts of one sequence for the heads of one group.

    AT_ONCE parts a turn, 64 numbers a thread: all their loads are under way before the first is used, and no
    thread needs another's numbers.
    """
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    AT_ONCE: tl.constexpr = max(1, 2048 * WARPS // (MEMBERS * DIM_PADDED))
    dims = tl.arange(0, DIM_PADDED)
    members = tl.arange(0, MEMBERS)
    real = members < GROUP
    mask = real[:, None] & (dims < DIM)[None, :]
    heads = head * GROUP + members
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    weight = tl.zeros([MEMBERS], tl.float32)
    merged = tl.zeros([MEMBERS, DIM_PADDED], tl.float32)
    for j in tl.range(0, count, AT_ONCE, num_stages=1):
        at = (first + j).to(tl.int64) * HEADS + heads
        left = count - j + 0 * members
        new_top = top
        for part in tl.static_range(AT_ONCE):
            lse_at = partial_lse + at + part * HEADS
            lse = tl.load(lse_at, mask=real & (left > part), other=float("-inf"), cache_modifier=".cg")
            new_top = tl.maximum(new_top, lse)
        safe = tl.where(real, new_top, 0.0)
        shrink = tl.exp2(top - safe)
        merged = merged * shrink[:, None]
        weight = weight * shrink
        for part in tl.static_range(AT_ONCE):
            lse_at = partial_lse + at + part * HEADS
            lse = tl.load(lse_at, mask=real & (left > part), other=float("-inf"), cache_modifier=".cg")
            part_at = partial + (at + part * HEADS)[:, None] * DIM + dims[None, :]
            rows = tl.load(part_at, mask=mask & (left > part)[:, None], other=0.0, cache_modifier=".cg")
            share = tl.exp2(lse - safe)
            merged += rows * share[:, None]
            weight += share
        top = new_top
    merged = (merged / tl.where(real, weight, 1.0)[:, None]).to(out_at.dtype.element_ty)
    tl.store(out_at + heads[:, None] * DIM + dims[None, :], merged, mask=mask)
