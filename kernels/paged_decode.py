"""Attention of one query token per sequence over its row of the page table, split over the context.

Bytes that must move: 2 * sum(kv_lens) * num_kv_heads * head_dim * itemsize, once; everything else is small.
A program takes tiles (see decode_plan.py) from a queue until none is left. Slots are loaded one turn ahead,
so that K and V wait for no other load. Chunks of one sequence are merged by log-sum-exp by whichever program
finishes last (Flash-Decoding, Dao et al. 2023; no second launch).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer
from kernels.decode_plan import RECORD, DecodePlan
from kernels.dependent_launch import dependent_launch

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
    launch = plan.launch
    _decode_kernel[(plan.num_programs,)](
        q,
        kv.k,
        kv.v,
        out,
        page_table,
        plan.chunks,
        plan.num_chunks,
        plan.queue,
        plan.partial,
        plan.partial_lse,
        plan.arrived,
        scale * kv.k_scale * LOG2_E,
        kv.v_scale,
        plan.num_programs,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        RECORD=RECORD,
        WARPS=launch.warps,
        BLOCK=launch.block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
        **dependent_launch(q.device),
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
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    HEADS: tl.constexpr = KV_HEADS * GROUP
    dims = tl.arange(0, DIM_PADDED)
    members = tl.arange(0, GROUP_PADDED)
    mask = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(num_chunks) * KV_HEADS
    tile = tl.program_id(0)
    while tile < total:
        taken = tl.atomic_add(queue, 1, sem="relaxed")
        entry = tile // KV_HEADS
        head = tile % KV_HEADS
        record = chunks + entry * RECORD
        span = tl.load(record).to(tl.int64)
        table = page_table + tl.load(record + 1).to(tl.int64) * row_width
        begin = tl.load(record + 2)
        end = tl.load(record + 3)
        count = tl.load(record + 5)
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
            PRECISION,
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
                first = entry - tl.load(record + 4)
                _merge(partial, partial_lse, out_at, first, count, head, HEADS, GROUP, DIM, DIM_PADDED, WARPS)
                tl.store(arrived + span * KV_HEADS + head, 0)
        tile = num_programs + taken
    # One number is taken for each tile; whoever got the last of them is the last to look at the queue.
    if (tl.program_id(0) < total) & (tile == num_programs + total - 1):
        tl.store(queue, 0)


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
    PRECISION: tl.constexpr,
):
    """Slots begin .. end - 1 of a row: weighted sum of V [GROUP_PADDED, DIM_PADDED], top score, weight."""
    dims = tl.arange(0, DIM_PADDED)
    tokens = tl.arange(0, BLOCK)
    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PADDED], tl.float32)
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
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        weight = weight * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc, input_precision=PRECISION)
        top = new_top
    return acc, top, weight


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
    """The sum of `count` parts of one sequence for the heads of one group, AT_ONCE parts a turn."""
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    AT_ONCE: tl.constexpr = max(2, 2048 * WARPS // (MEMBERS * DIM_PADDED))
    dims = tl.arange(0, DIM_PADDED)
    parts = tl.arange(0, AT_ONCE)
    members = tl.arange(0, MEMBERS)
    real = members < GROUP
    heads = head * GROUP + members
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    weight = tl.zeros([MEMBERS], tl.float32)
    merged = tl.zeros([MEMBERS, DIM_PADDED], tl.float32)
    for j in tl.range(0, count, AT_ONCE, num_stages=1):
        here = (j + parts < count)[:, None] & real[None, :]
        at = (first + j + parts).to(tl.int64)[:, None] * HEADS + heads[None, :]
        readable = here[:, :, None] & (dims < DIM)[None, None, :]
        lse = tl.load(partial_lse + at, mask=here, other=float("-inf"), cache_modifier=".cg")
        part_at = partial + at[:, :, None] * DIM + dims[None, None, :]
        part = tl.load(part_at, mask=readable, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top > float("-inf"), new_top, 0.0)
        share = tl.exp2(lse - safe[None, :])
        shrink = tl.exp2(top - safe)
        merged = merged * shrink[:, None] + tl.sum(part * share[:, :, None], 0)
        weight = weight * shrink + tl.sum(share, 0)
        top = new_top
    merged = (merged / tl.where(real, weight, 1.0)[:, None]).to(out_at.dtype.element_ty)
    tl.store(
        out_at + heads[:, None] * DIM + dims[None, :], merged, mask=real[:, None] & (dims < DIM)[None, :]
    )
