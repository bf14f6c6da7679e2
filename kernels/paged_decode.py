"""Attention of one query token per sequence over its row of the page table, split over the context.

Bytes that must move: 2 * sum(kv_lens) * num_kv_heads * head_dim * itemsize, once; everything else is small.
A program has the tile of its own number and then takes others from a queue until none is left, or it has a
stretch of tiles (see decode_plan.py). Slots are loaded one turn ahead, so that K and V wait for no other
load. Chunks of one sequence are merged by log-sum-exp by whichever program finishes last (Flash-Decoding, Dao
et al. 2023; no second launch).

`paged_decode` finds q made and K and V stored. `paged_decode_product` takes the qkv product of a decode step:
each tile norms and rotates its own q, and the tiles of a sequence's last chunk do so with K, store K and V of
the new token and begin their sums with it, out of registers. No tile reads what the launch writes, so none
waits for another; and all a tile reads but the product was there before the step, so in a chain of dependent
launches list, slots, angles and, in short tiles, K and V are on their way before the product is done.
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
from kernels.rotary_store import Rotary, stored

LOG2_E = 1.4426950408889634


def paged_decode(
    q: Tensor, kv: KvLayer, page_table: Tensor, plan: DecodePlan, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """Attention of q[i] over the first kv_lens[i] slots of row rows[i], as `plan_decode` was told them.

    q and result [num_spans, num_heads, head_dim]; kv.k, kv.v [num_slots, num_kv_heads, head_dim], contiguous;
    page_table int32 [num_rows, width]; `out`, contiguous, receives the result. Reads nothing past kv_lens, so
    unused slots may hold NaN.
    """
    assert q.stride(2) == 1, "head_dim must be contiguous"
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, kv, page_table, plan, scale, out, None)
    return out


def paged_decode_product(
    qkv: Tensor, kv: KvLayer, page_table: Tensor, plan: DecodePlan, rotary: Rotary, *, scale: float
) -> Tensor:
    """The same from the product: what `rotary_store` and then `paged_decode` leave, in one launch.

    qkv [num_spans, (num_heads + 2 * num_kv_heads) * head_dim]: row i is of the token at kv_lens[i] - 1, whose
    K and V are stored in that slot of row rows[i]. Slots before it must not be written by what runs in the
    same chain of dependent launches. Result [num_spans, num_heads, head_dim].
    """
    num_spans, (_, num_kv_heads, head_dim) = qkv.shape[0], kv.k.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, f"qkv is {tuple(qkv.shape)}"
    assert qkv.stride(1) == 1, "qkv rows must be contiguous"
    assert rotary.cos_sin.shape[1] == head_dim, f"cos_sin is {tuple(rotary.cos_sin.shape)}"
    out = torch.empty(num_spans, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _launch(qkv.unflatten(1, (-1, head_dim)), kv, page_table, plan, scale, out, rotary)
    return out


def _launch(
    q: Tensor,
    kv: KvLayer,
    page_table: Tensor,
    plan: DecodePlan,
    scale: float,
    out: Tensor,
    rotary: Rotary | None,
) -> None:
    num_spans, num_heads, head_dim = out.shape
    num_kv_heads = kv.k.shape[1]
    assert kv.k.is_contiguous(), "K must be contiguous"
    assert kv.v.is_contiguous(), "V must be contiguous"
    assert num_spans <= plan.arrived.shape[0], f"plan is for {plan.arrived.shape[0]} spans, got {num_spans}"
    assert out.is_contiguous(), "out must be contiguous"
    group = num_heads // num_kv_heads
    row_bytes = triton.next_power_of_2(head_dim) * q.element_size()
    launch, num_programs = plan.launch_of(num_spans, row_bytes), plan.num_programs(num_spans, row_bytes)
    heads = (num_kv_heads, group, triton.next_power_of_2(group))
    dims = (head_dim, triton.next_power_of_2(head_dim))
    lists = (plan.chunks, plan.num_chunks, plan.stretches, plan.queue)
    scratch = (plan.partial, plan.partial_lse, plan.arrived)
    strides = (q.stride(0), q.stride(1), page_table.stride(0))
    is_dependent = dependent_launch(q.device)["PDL"]
    is_fp32 = q.dtype == torch.float32
    scales = (scale * kv.k_scale * LOG2_E, kv.v_scale)
    angles, q_norm, k_norm, eps = q, None, None, 0.0
    if rotary is not None:
        angles, q_norm, k_norm, eps = rotary.cos_sin, rotary.q_norm, rotary.k_norm, rotary.eps
    has_norm = q_norm is not None
    gains = (q_norm if q_norm is not None else q, k_norm if k_norm is not None else q)
    of_product = (angles, *gains, eps, angles.stride(0), 1.0 / kv.k_scale, 1.0 / kv.v_scale)
    start_kernel(
        _decode_kernel,
        (num_programs,),
        (q, kv.k, kv.v, out, page_table, *lists, *scratch, *of_product, *scales, num_programs, *strides),
        (
            *heads,
            *dims,
            RECORD,
            launch.warps,
            launch.block,
            launch.is_at_once,
            launch.merge_numbers,
            is_fp32,
            rotary is not None,
            has_norm,
            plan.is_stretched(num_spans, row_bytes),
            is_dependent,
        ),
        num_warps=launch.warps,
        num_stages=launch.stages,
        max_registers=launch.max_registers,
        is_dependent=is_dependent,
    )


@triton.jit(do_not_specialize=["eps", "k_inverse", "v_inverse", "scale", "v_scale", "num_programs"])
def _decode_kernel(
    q,
    k_pool,
    v_pool,
    out,
    page_table,
    chunks,
    num_chunks,
    stretches,
    queue,
    partial,
    partial_lse,
    arrived,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    cos_sin_stride,
    k_inverse,
    v_inverse,
    scale,
    v_scale,
    num_programs,
    q_stride,
    q_head_stride,
    row_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    RECORD: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MERGE_NUMBERS: tl.constexpr,
    IS_FP32: tl.constexpr,
    OF_PRODUCT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STRETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """OF_PRODUCT: q is the qkv product. AT_ONCE: a tile of one turn loads K and V before anything else.
    MEMBERS: GROUP, padded to a power of two; the tensor cores' tile has ROWS, 16 at least.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    ROWS: tl.constexpr = max(16, MEMBERS)
    REPEAT: tl.constexpr = ROWS // MEMBERS
    members = tl.arange(0, MEMBERS)
    members_ok = (members < GROUP)[:, None] & (tl.arange(0, DIM_PADDED) < DIM)[None, :]
    dims = tl.arange(0, DIM_PADDED)
    dims_ok = dims < DIM
    tokens = tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    row_ok = (rows % REPEAT == 0) & (rows // REPEAT < GROUP)
    mask = row_ok[:, None] & dims_ok[None, :]
    if PDL:
        gdc_launch_dependents()
        if not OF_PRODUCT:
            gdc_wait()
    tile = tl.program_id(0)
    # All at once, and before it is known whether the list has this entry: one latency instead of two.
    total = tl.load(num_chunks, cache_modifier=".cg") * KV_HEADS
    span, row, begin, end, index, count, last = _entry(chunks, tile // KV_HEADS, RECORD)
    has_queue = total > num_programs
    if STRETCHED:
        # Its entry has the program's own number where there is but one wave.
        has_queue = False
        number = tile // KV_HEADS
        first = tl.load(stretches + number, cache_modifier=".cg")
        total = tl.load(stretches + number + 1, cache_modifier=".cg") * KV_HEADS
        if first != number:
            tile += (first - number) * KV_HEADS
            if tile < total:
                span, row, begin, end, index, count, last = _entry(chunks, first, RECORD)
    while tile < total:
        entry = tile // KV_HEADS
        head = tile % KV_HEADS
        table = page_table + row * row_width
        # The new token is not read from the pool where the product has it.
        is_last = index == count - 1
        stop = tl.where(is_last, end - 1, end) if OF_PRODUCT else end
        slot = tl.load(table + begin + tokens, mask=begin + tokens < stop, other=0, cache_modifier=".cg")
        k_head, v_head = k_pool + head * DIM, v_pool + head * DIM
        is_short = stop - begin <= BLOCK
        if AT_ONCE:
            early = begin + tokens < tl.where(is_short, stop, begin)
            # Past the multiprocessor's cache: in it may be what another sequence had in these slots.
            early_k, early_v = _turn_of_pool(
                k_head, v_head, slot, early, KV_HEADS * DIM, DIM, DIM_PADDED, ".cg"
            )
        if OF_PRODUCT:
            cos, sin = _angles(cos_sin + last.to(tl.int64) * cos_sin_stride, dims, DIM)
            new_slot = tl.load(table + last, cache_modifier=".cg").to(tl.int64)
            if PDL:
                gdc_wait()
        taken = 0
        if has_queue:
            taken = tl.atomic_add(queue, 1, sem="relaxed")
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS, BLOCK] if WARPS > 1 else [ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
        if OF_PRODUCT:
            q_at = q + span * q_stride + (head * GROUP + members)[:, None] * q_head_stride
            few = _norm_rotated(q_at, dims, members_ok, q_norm, cos, sin, eps, DIM, HAS_NORM)
            few = few.to(q.dtype.element_ty)
            query = tl.broadcast_to(few[:, None, :], [MEMBERS, REPEAT, DIM_PADDED])
            query = tl.reshape(query, [ROWS, DIM_PADDED])
            if is_last:
                k_at = q + span * q_stride + (HEADS + head) * q_head_stride
                one = tl.zeros([1, 1], tl.int32)
                new_k = _norm_rotated(
                    k_at + one, dims, dims_ok[None, :], k_norm, cos, sin, eps, DIM, HAS_NORM
                )
                new_k = stored(tl.reshape(new_k, [DIM_PADDED]), k_inverse, k_pool)
                new_v = tl.load(k_at + KV_HEADS * q_head_stride + dims, mask=dims_ok, other=0.0)
                new_v = stored(new_v, v_inverse, v_pool)
                new_at = new_slot * (KV_HEADS * DIM) + dims
                tl.store(k_head + new_at, new_k, mask=dims_ok)
                tl.store(v_head + new_at, new_v, mask=dims_ok)
                new_k = new_k.to(q.dtype.element_ty).to(tl.float32)
                score = tl.sum(few.to(tl.float32) * new_k[None, :], 1) * scale
                top = tl.reshape(tl.broadcast_to(score[:, None], [MEMBERS, REPEAT]), [ROWS])
                acc += new_v.to(q.dtype.element_ty).to(tl.float32)[None, :]
                weight = tl.where(tokens[None, :] == 0, 1.0, weight) if WARPS > 1 else weight + 1.0
        else:
            member = rows // REPEAT
            q_at = q + span * q_stride + (head * GROUP + member)[:, None] * q_head_stride
            query = tl.load(
                q_at + dims[None, :], mask=(member < GROUP)[:, None] & dims_ok[None, :], other=0.0
            )
        if AT_ONCE:  # noqa: SIM102 - one is a constant
            if is_short:
                acc, top, weight = _turn(
                    query, early_k, early_v, early, acc, top, weight, scale, WARPS > 1, IS_FP32
                )
                begin = stop
        for at in range(begin, stop, BLOCK):
            position = at + tokens
            inside = position < stop
            turn_slot = slot
            slot = tl.load(table + position + BLOCK, mask=position + BLOCK < stop, other=0)
            keys, values = _turn_of_pool(
                k_head, v_head, turn_slot, inside, KV_HEADS * DIM, DIM, DIM_PADDED, ""
            )
            acc, top, weight = _turn(query, keys, values, inside, acc, top, weight, scale, WARPS > 1, IS_FP32)
        total_weight = tl.sum(weight, 1) if WARPS > 1 else weight
        acc = acc * (v_scale / total_weight)[:, None]
        out_at = out + span * (HEADS * DIM)
        heads = head * GROUP + rows // REPEAT
        if count == 1:
            to = out_at + heads[:, None] * DIM + dims[None, :]
            tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
        else:
            part = entry.to(tl.int64) * HEADS + heads
            tl.store(partial + part[:, None] * DIM + dims[None, :], acc, mask=mask)
            tl.store(partial_lse + part, top + tl.log2(total_weight), mask=row_ok)
            # The last program to arrive merges: the barrier orders this program's stores before the count.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + span * KV_HEADS + head, 1, sem="acq_rel")
            if before == count - 1:
                tl.debug_barrier()
                parts_at = entry - index
                _merge(
                    partial, partial_lse, out_at, parts_at, count, head, HEADS, GROUP, MEMBERS, DIM,
                    DIM_PADDED, MERGE_NUMBERS * 32 * WARPS,
                )  # fmt: skip
                tl.store(arrived + span * KV_HEADS + head, 0)
        tile = tile + KV_HEADS if STRETCHED else num_programs + taken
        if tile < total:
            span, row, begin, end, index, count, last = _entry(chunks, tile // KV_HEADS, RECORD)
    # One number is taken for each tile; whoever got the last of them is the last to look at the queue.
    if has_queue & (tile == num_programs + total - 1):
        tl.store(queue, 0)
    if PDL:
        gdc_wait()  # programs without a tile wait, too


@triton.jit
def _entry(chunks, entry, RECORD: tl.constexpr):
    """Of the list: see RECORD. Not out of a cache of the multiprocessor's: it may be from the last step."""
    record = chunks + entry * RECORD
    span = tl.load(record, cache_modifier=".cg").to(tl.int64)
    row = tl.load(record + 1, cache_modifier=".cg").to(tl.int64)
    begin = tl.load(record + 2, cache_modifier=".cg")
    end = tl.load(record + 3, cache_modifier=".cg")
    index = tl.load(record + 4, cache_modifier=".cg")
    count = tl.load(record + 5, cache_modifier=".cg")
    return span, row, begin, end, index, count, tl.load(record + 6, cache_modifier=".cg")


@triton.jit
def _angles(angles, dims, DIM: tl.constexpr):
    """Cosine of each element, and sine with the sign that its partner is added with."""
    HALF: tl.constexpr = DIM // 2
    at = tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(angles + at, mask=dims < DIM, other=0.0)
    sin = tl.load(angles + HALF + at, mask=dims < DIM, other=0.0)
    return cos, tl.where(dims < HALF, -sin, sin)


@triton.jit
def _norm_rotated(at, dims, mask, norm, cos, sin, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads that begin at the addresses `at` [N, 1], normed and rotated: fp32 [N, DIM_PADDED].

    Each element's partner in the other half is loaded, too: no element moves between threads.
    """
    HALF: tl.constexpr = DIM // 2
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    value = tl.load(at + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(at + partners[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        gain = tl.load(norm + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        partner_gain = tl.load(norm + partners, mask=dims < DIM, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps)
        value = value * factor[:, None] * gain[None, :]
        partner = partner * factor[:, None] * partner_gain[None, :]
    return value * cos[None, :] + partner * sin[None, :]


@triton.jit
def _turn_of_pool(
    k_head,
    v_head,
    slot,
    inside,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    CACHE: tl.constexpr,
):
    """K and V of one head in the slots, [BLOCK, DIM_PADDED] each; zero where not `inside`."""
    dims = tl.arange(0, DIM_PADDED)
    # Slots fit int32, offsets into a big pool do not.
    offset = slot.to(tl.int64)[:, None] * STRIDE + dims[None, :]
    readable = inside[:, None] if DIM == DIM_PADDED else inside[:, None] & (dims < DIM)[None, :]
    keys = tl.load(k_head + offset, mask=readable, other=0.0, cache_modifier=CACHE)
    values = tl.load(v_head + offset, mask=readable, other=0.0, cache_modifier=CACHE)
    return keys, values


@triton.jit
def _turn(
    query,
    keys,
    values,
    inside,
    acc,
    top,
    weight,
    scale,
    SUM_LATE: tl.constexpr,
    IS_FP32: tl.constexpr,
):
    """Keys and values [BLOCK, DIM_PADDED] into the sum of V `acc` [ROWS, DIM_PADDED], top score, weight.

    SUM_LATE: weights of a row, which lie in several warps, are summed once, not in each turn.
    """
    precision: tl.constexpr = "ieee" if IS_FP32 else "tf32"
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=precision) * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    weight = weight * shrink[:, None] + weights if SUM_LATE else weight * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc, input_precision=precision)
    return acc, new_top, weight


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
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """The sum of `count` parts of one sequence for the heads of one group.

    NUMBERS of the parts a turn: all their loads are under way before the first is used, and no thread needs
    another's numbers. At most 16 parts: compilers take long for more.
    """
    AT_ONCE: tl.constexpr = max(1, min(16, NUMBERS // (MEMBERS * DIM_PADDED)))
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
