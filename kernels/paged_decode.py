"""Attention of one query token per sequence over its row of the page table, split over the context.

Bytes that must move: 2 * sum(kv_lens) * num_kv_heads * head_dim * itemsize, once; everything else is
small. A *tile* is one chunk of one sequence for one KV head. `plan_decode` lists the chunks on the
device, once per step; every layer reuses the list, so a CUDA graph can hold both. Chunks of one
sequence are merged by log-sum-exp by whichever program finishes last (Flash-Decoding; no second launch).

The chunk size is a function of a sequence's own length and of `chunk_scale`, never of the batch, so with
a fixed `chunk_scale` a sequence's result does not depend on its company, bit for bit.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import KvLayer

MIN_CHUNK = 128
MAX_CHUNKS = 64
LARGE_BATCH = 32
"""Spans from which chunks are four times as long: there are enough of them, and merging costs bytes."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Launch shape; timings of the choices in docs/kernels.md."""

    block: int = 64  # tokens a loop turn
    warps: int = 4
    stages: int = 5
    programs_per_sm: int = 3


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Chunk list and scratch of decode attention; buffers are made once and live in the CUDA graph."""

    tiles: Tensor  # int32 [capacity, 2]: span, first token
    num_tiles: Tensor  # int32 [1]
    chunk_sizes: Tensor  # int32 [num_spans]
    partial: Tensor  # fp32 [num_spans, num_heads, MAX_CHUNKS, head_dim]
    partial_lse: Tensor  # fp32 [num_spans, num_heads, MAX_CHUNKS]
    arrived: Tensor  # int32 [num_spans, num_kv_heads], zero between launches
    num_programs: int
    chunk_scale: int
    launch: DecodeLaunch


def make_plan(
    num_spans: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    device: torch.device,
    *,
    chunk_scale: int = 1,
    launch: DecodeLaunch = DecodeLaunch(),
) -> DecodePlan:
    """Allocates the buffers for batches of at most `num_spans` spans of at most `max_kv_len` tokens."""
    chunks = min(MAX_CHUNKS, -(-max_kv_len // (MIN_CHUNK * chunk_scale)))
    programs = 4
    if device.type == "cuda":
        programs = launch.programs_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    return DecodePlan(
        tiles=torch.zeros(num_spans * chunks, 2, dtype=torch.int32, device=device),
        num_tiles=torch.zeros(1, dtype=torch.int32, device=device),
        chunk_sizes=torch.zeros(num_spans, dtype=torch.int32, device=device),
        partial=torch.empty(num_spans, num_heads, chunks, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_spans, num_heads, chunks, dtype=torch.float32, device=device),
        arrived=torch.zeros(num_spans, num_kv_heads, dtype=torch.int32, device=device),
        num_programs=min(programs, num_spans * chunks * num_kv_heads),
        chunk_scale=chunk_scale,
        launch=launch,
    )


def resized(plan: DecodePlan, num_spans: int) -> DecodePlan:
    """The plan's buffers for a batch of exactly `num_spans`; chunks grow where the batch fills the device."""
    room = num_spans * plan.partial.shape[2] * plan.arrived.shape[1]
    scale = 4 if num_spans >= LARGE_BATCH else 1
    return replace(plan, num_programs=min(plan.num_programs, room), chunk_scale=scale)


def plan_decode(plan: DecodePlan, kv_lens: Tensor) -> None:
    """Lists the chunks of `kv_lens` (int32 [num_spans]) into the plan, on the device."""
    num_spans = kv_lens.shape[0]
    assert num_spans <= plan.chunk_sizes.shape[0], (
        f"plan is for {plan.chunk_sizes.shape[0]} spans, got {num_spans}"
    )
    _plan_kernel[(1,)](
        kv_lens,
        plan.tiles,
        plan.num_tiles,
        plan.chunk_sizes,
        num_spans,
        SPANS=triton.next_power_of_2(num_spans),
        CHUNKS=plan.partial.shape[2],
        MIN=MIN_CHUNK * plan.chunk_scale,
    )


def paged_decode(
    q: Tensor,
    kv: KvLayer,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    plan: DecodePlan,
    *,
    scale: float,
) -> Tensor:
    """Attention of q[i] over the first kv_lens[i] slots of row rows[i].

    q and result [num_spans, num_heads, head_dim]; kv.k, kv.v [num_slots, num_kv_heads, head_dim];
    page_table int32 [num_rows, width]. `plan_decode` ran for these kv_lens. Reads nothing past kv_lens, so
    unused slots may hold NaN.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    assert q.stride(2) == kv.k.stride(2) == kv.v.stride(2) == 1, "head_dim must be contiguous"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = num_heads // num_kv_heads
    _decode_kernel[(plan.num_programs,)](
        q,
        kv.k,
        kv.v,
        out,
        page_table,
        rows,
        kv_lens,
        plan.tiles,
        plan.num_tiles,
        plan.chunk_sizes,
        plan.partial,
        plan.partial_lse,
        plan.arrived,
        scale * 1.4426950408889634,
        plan.num_programs,
        q.stride(0),
        q.stride(1),
        kv.k.stride(0),
        kv.k.stride(1),
        kv.v.stride(0),
        kv.v.stride(1),
        page_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        CHUNKS=plan.partial.shape[2],
        BLOCK=plan.launch.block,
        num_warps=plan.launch.warps,
        num_stages=plan.launch.stages,
    )
    return out


@triton.jit
def _plan_kernel(
    kv_lens,
    tiles,
    num_tiles,
    chunk_sizes,
    num_spans,
    SPANS: tl.constexpr,
    CHUNKS: tl.constexpr,
    MIN: tl.constexpr,
):
    span = tl.arange(0, SPANS)
    real = span < num_spans
    length = tl.load(kv_lens + span, mask=real, other=0)
    # Smallest MIN * 2^k that needs at most CHUNKS chunks; grows with the square root of the length.
    chunk = tl.full([SPANS], MIN, tl.int32)
    for _ in range(12):
        chunk = tl.where((chunk * CHUNKS < length) | (chunk * chunk < length * 16), chunk * 2, chunk)
    tl.store(chunk_sizes + span, chunk, mask=real)
    count = tl.where(real, (length + chunk - 1) // chunk, 0)
    first = tl.cumsum(count, 0) - count
    for j in range(CHUNKS):
        here = j < count
        tl.store(tiles + (first + j) * 2, span, mask=here)
        tl.store(tiles + (first + j) * 2 + 1, j * chunk, mask=here)
    tl.store(num_tiles, tl.sum(count, 0))


@triton.jit
def _decode_kernel(
    q,
    k_pool,
    v_pool,
    out,
    page_table,
    rows,
    kv_lens,
    tiles,
    num_tiles,
    chunk_sizes,
    partial,
    partial_lse,
    arrived,
    scale,
    num_programs,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    row_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dims = tl.arange(0, DIM_PADDED)
    members = tl.arange(0, GROUP_PADDED)
    dim_ok = dims < DIM
    member_ok = members < GROUP
    total = tl.load(num_tiles) * KV_HEADS
    for work in range(tl.program_id(0), total, num_programs):
        tile = work // KV_HEADS
        head = work % KV_HEADS
        span = tl.load(tiles + tile * 2).to(tl.int64)
        begin = tl.load(tiles + tile * 2 + 1)
        length = tl.load(kv_lens + span)
        chunk = tl.load(chunk_sizes + span)
        end = tl.minimum(begin + chunk, length)
        row = tl.load(rows + span).to(tl.int64)
        heads = head * GROUP + members
        q_at = q + span * q_stride + heads[:, None] * q_head_stride + dims[None, :]
        query = tl.load(q_at, mask=member_ok[:, None] & dim_ok[None, :], other=0.0)
        top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total_weight = tl.zeros([GROUP_PADDED], tl.float32)
        acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
        table = page_table + row * row_width
        for at in range(begin, end, BLOCK):
            position = at + tl.arange(0, BLOCK)
            inside = position < end
            # Slots fit int32, offsets into a big pool do not.
            slot = tl.load(table + position, mask=inside, other=0).to(tl.int64)
            keys = tl.load(
                k_pool + slot[:, None] * k_stride + head * k_head_stride + dims[None, :],
                mask=inside[:, None] & dim_ok[None, :],
                other=0.0,
            )
            scores = tl.dot(query, tl.trans(keys)) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total_weight = total_weight * shrink + tl.sum(weights, 1)
            values = tl.load(
                v_pool + slot[:, None] * v_stride + head * v_head_stride + dims[None, :],
                mask=inside[:, None] & dim_ok[None, :],
                other=0.0,
            )
            acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
            top = new_top
        acc = acc / total_weight[:, None]
        mask = member_ok[:, None] & dim_ok[None, :]
        out_at = out + (span * KV_HEADS * GROUP + heads[:, None]) * DIM + dims[None, :]
        count = (length + chunk - 1) // chunk
        if count == 1:
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=mask)
        else:
            lse = top + tl.log2(total_weight)
            base = (span * KV_HEADS * GROUP + heads) * CHUNKS
            index = begin // chunk
            tl.store(partial + (base[:, None] + index) * DIM + dims[None, :], acc, mask=mask)
            tl.store(partial_lse + base + index, lse, mask=member_ok)
            # The last program to arrive merges: the barrier orders this program's stores before the count.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + span * KV_HEADS + head, 1, sem="acq_rel")
            if before == count - 1:
                tl.debug_barrier()
                merged = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
                weight = tl.zeros([GROUP_PADDED], tl.float32)
                highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
                for j in range(count):
                    part_lse = tl.load(
                        partial_lse + base + j, mask=member_ok, other=0.0, cache_modifier=".cg"
                    )
                    part = tl.load(
                        partial + (base[:, None] + j) * DIM + dims[None, :],
                        mask=mask,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_highest = tl.maximum(highest, part_lse)
                    old = tl.exp2(highest - new_highest)
                    new = tl.exp2(part_lse - new_highest)
                    merged = merged * old[:, None] + part * new[:, None]
                    weight = weight * old + new
                    highest = new_highest
                tl.store(out_at, (merged / weight[:, None]).to(out.dtype.element_ty), mask=mask)
                tl.store(arrived + span * KV_HEADS + head, 0)
