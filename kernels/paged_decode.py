"""Attention of one query token per sequence over its row of the page table, split over the context.

Bytes that must move: 2 * sum(kv_lens) * num_kv_heads * head_dim * itemsize, once; everything else is small.
A program has the tile of its own number and then takes others from a queue until none is left, or it has a
stretch of tiles (see decode_plan.py). Slots are loaded one turn ahead, so that K and V wait for no other
load. Chunks of one sequence are merged by log-sum-exp by whichever program finishes last (Flash-Decoding, Dao
et al. 2023; no second launch).

`paged_decode` finds q made and K and V stored. `paged_decode_product` takes the qkv product of a decode step:
each tile norms and rotates its own q, and the tiles of a sequence's last chunk do so with K, store K and V of
the new token and begin their sums with it, out of registers. No tile reads what the launch writes, so none
waits for another. All a tile reads but the product was there before the step, so in a chain of dependent
launches a program asks for list and slots, and for K and V as far as the loop's stages reach, before the
product is done.

Queries of a group are few, two to eight mostly: the tensor cores' tile has tokens, or V's dimensions, on its
side of 16 and queries on that of 8.

A lone sequence is for kernels.cluster_decode, where kernels.cluster_launch says so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer
from kernels.cluster_launch import cluster_launch
from kernels.decode_merge import merge_parts
from kernels.decode_plan import RECORD, DecodePlan
from kernels.dependent_launch import dependent_launch, wait_in_loop
from kernels.launcher import launch as start_kernel
from kernels.rotary_store import Rotary
from kernels.store_kv import to_pool

LOG2_E = 1.4426950408889634
FP16_LARGEST = tl.constexpr(65504.0)


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
    qkv: Tensor,
    kv: KvLayer,
    page_table: Tensor,
    plan: DecodePlan,
    rotary: Rotary,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """The same from the product: what `rotary_store` and then `paged_decode` leave, in one launch.

    qkv [num_spans, (num_heads + 2 * num_kv_heads) * head_dim]: row i is of the token at kv_lens[i] - 1, whose
    K and V are stored in that slot of row rows[i]. Slots before it must not be written by what runs in the
    same chain of dependent launches. Result [num_spans, num_heads, head_dim], in `out` where that is given.
    """
    num_spans, (_, num_kv_heads, head_dim) = qkv.shape[0], kv.k.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, f"qkv is {tuple(qkv.shape)}"
    assert qkv.stride(1) == 1, "qkv rows must be contiguous"
    assert rotary.cos_sin.shape[1] == head_dim, f"cos_sin is {tuple(rotary.cos_sin.shape)}"
    if out is None:
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
    clusters = cluster_launch(num_spans, num_heads, q.dtype, kv, plan.most_tokens)
    if plan.follows_batch and clusters is not None:
        from kernels.cluster_decode import launch_clusters  # where Gluon is not there it cannot be imported

        launch_clusters(q, kv, page_table, plan.spans, rotary, out, clusters, scale=scale)
        return
    group = num_heads // num_kv_heads
    row_bytes = triton.next_power_of_2(head_dim) * q.element_size()
    launch = plan.launch_of(num_spans, row_bytes, of_product=rotary is not None)
    num_programs = plan.num_programs(num_spans, row_bytes)
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
    # Asynchronous loads of e4m3 go through the multiprocessor's cache, being of 8 bytes: early ones must not.
    is_early = rotary is not None and kv.k.element_size() > 1
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
            is_fp32,
            rotary is not None,
            has_norm,
            is_early,
            plan.is_stretched(num_spans, row_bytes),
            launch.is_next_late,
            is_dependent,
        ),
        num_warps=launch.warps,
        num_stages=launch.stages if rotary is None else launch.product_stages or launch.stages,
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
    IS_FP32: tl.constexpr,
    OF_PRODUCT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    STRETCHED: tl.constexpr,
    NEXT_LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """OF_PRODUCT: q is the qkv product; EARLY: it is waited for in a tile's first turn, not before.
    MEMBERS: GROUP, padded to a power of two; the tensor cores' tile has ROWS, 8 at least.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    ROWS: tl.constexpr = max(8, MEMBERS)
    REPEAT: tl.constexpr = ROWS // MEMBERS
    dims = tl.arange(0, DIM_PADDED)
    dims_ok = dims < DIM
    tokens = tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    row_ok = (rows % REPEAT == 0) & (rows // REPEAT < GROUP)
    mask = row_ok[None, :] & dims_ok[:, None]
    if PDL:
        if not NEXT_LATE:
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
        # Past the end slots are of the last token again: what is read there counts nothing, and is no NaN.
        most = tl.maximum(stop - 1, 0)
        slot = tl.load(table + tl.minimum(begin + tokens, most), cache_modifier=".cg")
        k_head, v_head = k_pool + head * DIM, v_pool + head * DIM
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK, ROWS] if WARPS > 1 else [ROWS], tl.float32)
        acc = tl.zeros([DIM_PADDED, ROWS], tl.float32)
        turns_end = stop
        if not OF_PRODUCT:
            member = rows // REPEAT
            q_at = q + span * q_stride + (head * GROUP + member)[None, :] * q_head_stride
            query = tl.load(
                q_at + dims[:, None], mask=(member < GROUP)[None, :] & dims_ok[:, None], other=0.0
            )
        elif EARLY:
            query = tl.zeros([DIM_PADDED, ROWS], q.dtype.element_ty)
            turns_end = tl.maximum(stop, begin + 1)  # a turn, too, where there is the new token alone
        else:
            query, acc, top, weight = _take_product(
                q, span * q_stride, q_head_stride, head, table, last, is_last, cos_sin, cos_sin_stride,
                q_norm, k_norm, eps, k_head, v_head, k_inverse, v_inverse, scale, acc, top, weight,
                KV_HEADS, GROUP, MEMBERS, ROWS, DIM, DIM_PADDED, BLOCK, WARPS > 1, HAS_NORM, EARLY, PDL,
            )  # fmt: skip
        taken = 0
        if has_queue and not EARLY:
            taken = tl.atomic_add(queue, 1, sem="relaxed")
        for at in range(begin, turns_end, BLOCK):
            position = at + tokens
            inside = position < stop
            turn_slot = slot
            slot = tl.load(table + tl.minimum(position + BLOCK, most), cache_modifier=".cg")
            keys, values = _turn_of_pool(
                k_head, v_head, turn_slot, at < stop, KV_HEADS * DIM, DIM, DIM_PADDED
            )
            if EARLY:  # noqa: SIM102 - one is a constant
                if at == begin:
                    # By now K and V of the first turns are asked for.
                    query, acc, top, weight = _take_product(
                        q, span * q_stride, q_head_stride, head, table, last, is_last, cos_sin,
                        cos_sin_stride, q_norm, k_norm, eps, k_head, v_head, k_inverse, v_inverse, scale,
                        acc, top, weight, KV_HEADS, GROUP, MEMBERS, ROWS, DIM, DIM_PADDED, BLOCK,
                        WARPS > 1, HAS_NORM, EARLY, PDL,
                    )  # fmt: skip
                    if has_queue:  # the launch before takes from it, too, so behind the wait
                        taken = tl.atomic_add(queue, 1, sem="relaxed")
            acc, top, weight = _turn(query, keys, values, inside, acc, top, weight, scale, WARPS > 1, IS_FP32)
        total_weight = tl.sum(weight, 0) if WARPS > 1 else weight
        acc = acc * (v_scale / total_weight)[None, :]
        out_at = out + span * (HEADS * DIM)
        heads = head * GROUP + rows // REPEAT
        if count == 1:
            to = out_at + heads[None, :] * DIM + dims[:, None]
            tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
        else:
            part = entry.to(tl.int64) * HEADS + heads
            tl.store(partial + part[None, :] * DIM + dims[:, None], acc, mask=mask)
            tl.store(partial_lse + part, top + tl.log2(total_weight), mask=row_ok)
            # The last program to arrive merges: the barrier orders this program's stores before the count.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + span * KV_HEADS + head, 1, sem="acq_rel")
            if before == count - 1:
                tl.debug_barrier()
                parts_at = entry - index
                merge_parts(
                    partial, partial_lse, out_at, parts_at, count, head,
                    HEADS, GROUP, MEMBERS, DIM, DIM_PADDED, WARPS,
                )  # fmt: skip
                tl.store(arrived + span * KV_HEADS + head, 0)
        tile = tile + KV_HEADS if STRETCHED else num_programs + taken
        if tile < total:
            span, row, begin, end, index, count, last = _entry(chunks, tile // KV_HEADS, RECORD)
    # One number is taken for each tile; whoever got the last of them is the last to look at the queue.
    if has_queue & (tile == num_programs + total - 1):
        tl.store(queue, 0)
    if PDL:
        if NEXT_LATE:
            gdc_launch_dependents()
        gdc_wait()  # programs without a tile wait, too


@triton.jit
def _entry(chunks, entry, RECORD: tl.constexpr):
    """Of the list: see RECORD. Volatile: not out of a multiprocessor's cache, which may be of the last step,
    and not put off by compilers until it is known that the list has the entry.
    """
    record = chunks + entry * RECORD
    span = tl.load(record, volatile=True).to(tl.int64)
    row = tl.load(record + 1, volatile=True).to(tl.int64)
    begin = tl.load(record + 2, volatile=True)
    end = tl.load(record + 3, volatile=True)
    index = tl.load(record + 4, volatile=True)
    count = tl.load(record + 5, volatile=True)
    return span, row, begin, end, index, count, tl.load(record + 6, volatile=True)


@triton.jit
def _take_product(
    q,
    of_span,
    q_head_stride,
    head,
    table,
    last,
    is_last,
    cos_sin,
    cos_sin_stride,
    q_norm,
    k_norm,
    eps,
    k_head,
    v_head,
    k_inverse,
    v_inverse,
    scale,
    acc,
    top,
    weight,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_LATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Waits for the qkv product, whose row of this span begins at `of_span`: its queries [DIM_PADDED, ROWS]
    as the tensor cores take them, and the sums `acc`, `top` and `weight`. Where `is_last` these begin with
    the new token, which is stored in its slot.
    """
    REPEAT: tl.constexpr = ROWS // MEMBERS
    dims = tl.arange(0, DIM_PADDED)
    members = tl.arange(0, MEMBERS)
    dims_ok = dims < DIM
    cos, sin = _angles(cos_sin + last.to(tl.int64) * cos_sin_stride, dims, DIM)
    new_slot = tl.load(table + last, cache_modifier=".cg").to(tl.int64)
    if PDL:
        wait_in_loop()
    # All at once, and before it is known whether this tile has the new token.
    q_at = q + of_span + (head * GROUP + members)[:, None] * q_head_stride
    q_pair = _with_partners(q_at, dims, (members < GROUP)[:, None] & dims_ok[None, :], DIM)
    k_at = q + of_span + (KV_HEADS * GROUP + head) * q_head_stride
    new_ok = dims < tl.where(is_last, DIM, 0)
    k_pair = _with_partners(k_at + tl.zeros([1, 1], tl.int32), dims, new_ok[None, :], DIM)
    v_at = k_at + KV_HEADS * q_head_stride + dims
    v_of_product = tl.load(v_at, mask=new_ok, other=0.0, volatile=True)
    few = _norm_rotated(q_pair, dims, q_norm, cos, sin, eps, DIM, HAS_NORM).to(q.dtype.element_ty)
    if is_last:
        new_k = _norm_rotated(k_pair, dims, k_norm, cos, sin, eps, DIM, HAS_NORM)
        new_k = to_pool(tl.reshape(new_k, [DIM_PADDED]), k_inverse, k_head)
        new_v = to_pool(v_of_product, v_inverse, v_head)
        new_at = new_slot * (KV_HEADS * DIM) + dims
        tl.store(k_head + new_at, new_k, mask=dims_ok)
        tl.store(v_head + new_at, new_v, mask=dims_ok)
        new_k = new_k.to(q.dtype.element_ty).to(tl.float32)
        score = tl.sum(few.to(tl.float32) * new_k[None, :], 1) * scale
        top = tl.reshape(_repeated(score[:, None], REPEAT), [ROWS])
        acc += new_v.to(q.dtype.element_ty).to(tl.float32)[:, None]
        weight = tl.where(tl.arange(0, BLOCK)[:, None] == 0, 1.0, weight) if SUM_LATE else weight + 1.0
    if EARLY:
        query = tl.trans(_repeated(few, REPEAT))
    else:  # once a tile: without room in the shared memory of its own
        query = tl.broadcast_to(few[:, None, :], [MEMBERS, REPEAT, DIM_PADDED])
        query = tl.trans(tl.reshape(query, [ROWS, DIM_PADDED]))
    return query, acc, top, weight


@triton.jit
def _angles(angles, dims, DIM: tl.constexpr):
    """Cosine of each element, and sine with the sign that its partner is added with."""
    HALF: tl.constexpr = DIM // 2
    at = tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(angles + at, mask=dims < DIM, other=0.0)
    sin = tl.load(angles + HALF + at, mask=dims < DIM, other=0.0)
    return cos, tl.where(dims < HALF, -sin, sin)


@triton.jit
def _with_partners(at, dims, mask, DIM: tl.constexpr):
    """Heads that begin at the addresses `at` [N, 1], and of each element the one in the other half: none
    moves between threads. Volatile, or compilers put loads off until they are needed.
    """
    HALF: tl.constexpr = DIM // 2
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    value = tl.load(at + dims[None, :], mask=mask, other=0.0, volatile=True)
    return value, tl.load(at + partners[None, :], mask=mask, other=0.0, volatile=True)


@triton.jit
def _norm_rotated(pair, dims, norm, cos, sin, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads as `_with_partners` loads them, normed and rotated: fp32 [N, DIM_PADDED]."""
    HALF: tl.constexpr = DIM // 2
    value, partner = pair[0].to(tl.float32), pair[1].to(tl.float32)
    if HAS_NORM:
        partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
        gain = tl.load(norm + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        partner_gain = tl.load(norm + partners, mask=dims < DIM, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps)
        value = value * factor[:, None] * gain[None, :]
        partner = partner * factor[:, None] * partner_gain[None, :]
    return value * cos[None, :] + partner * sin[None, :]


@triton.jit
def _repeated(rows, TIMES: tl.constexpr):
    """Rows [N, D], each so often, 1 to 16, a power of two, one behind the other."""
    if TIMES > 1:
        rows = _twice(rows)
    if TIMES > 2:
        rows = _twice(rows)
    if TIMES > 4:
        rows = _twice(rows)
    if TIMES > 8:
        rows = _twice(rows)
    return rows


@triton.jit
def _twice(rows):
    """In registers: no element leaves its thread, as it would where a broadcast dimension is folded."""
    pairs = tl.permute(tl.join(rows, rows), (0, 2, 1))
    return tl.reshape(pairs, [2 * rows.shape[0], rows.shape[1]])


@triton.jit
def _turn_of_pool(
    k_head,
    v_head,
    slot,
    is_any,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """K [BLOCK, DIM_PADDED] and V [DIM_PADDED, BLOCK] of one head in the slots; zeros unless `is_any`. One
    condition for all: one for each token would be a fifth of a turn's instructions.
    """
    dims = tl.arange(0, DIM_PADDED)
    # Slots fit int32, offsets into a big pool do not.
    token = slot.to(tl.int64) * STRIDE
    readable = dims < tl.where(is_any, DIM, 0)
    keys = tl.load(k_head + (token[:, None] + dims[None, :]), mask=readable[None, :], other=0.0)
    # As the tensor cores take it: turned over by the load, not between threads.
    values = tl.load(v_head + (token[None, :] + dims[:, None]), mask=readable[:, None], other=0.0)
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
    """Keys [BLOCK, DIM_PADDED] and values [DIM_PADDED, BLOCK] into the sum of V `acc` [DIM_PADDED, ROWS], top
    score and weight. Heads are few, so they are on the tensor cores' side of 8, not on that of 16.

    SUM_LATE: weights of a head, which lie in several warps, are summed once, not in each turn.
    """
    precision: tl.constexpr = "ieee" if IS_FP32 else "tf32"
    if keys.dtype == tl.float8e4nv and not IS_FP32:
        # One instruction makes two of them fp16, and loses nothing; to bf16 it takes four.
        # NaN stays: a broken row must not answer as if it were whole.
        query = tl.clamp(query.to(tl.float32), -FP16_LARGEST, FP16_LARGEST, propagate_nan=tl.PropagateNan.ALL)
        query = query.to(tl.float16)
        keys, values = keys.to(tl.float16), values.to(tl.float16)
    scores = tl.dot(keys.to(query.dtype), query, input_precision=precision) * scale
    scores = tl.where(inside[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    weights = tl.exp2(scores - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    weight = weight * shrink[None, :] + weights if SUM_LATE else weight * shrink + tl.sum(weights, 0)
    acc = acc * shrink[None, :]
    acc = tl.dot(values.to(query.dtype), weights.to(query.dtype), acc, input_precision=precision)
    return acc, new_top, weight
