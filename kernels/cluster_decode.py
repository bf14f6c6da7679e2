"""Decode attention of a lone sequence on Hopper: a cluster of programs shares it for each KV head.

Bytes: K and V, once. There is no list of chunks and no merge through memory: tokens go to the warps of a
cluster sixteen at a time, in turn, and each warp has sums of its own and waits for no other. At the end a
program adds up its warps' and gives to each program of the cluster a slice of V's dimensions. That is a store
into the shared memory of another, which a barrier there counts (PTX ISA, st.async), so none waits but for
what it needs.

K and V go from memory to registers as the tensor cores take them: a thread loads 16 bytes of a token, and
which dimension of K an element stands for does not matter, as long as it is the same one of q; V's are in
an order of their own until the end. Queries of a group are few, so tokens, or V's dimensions, are on the
tensor cores' side of 16, and queries on that of 8.

What q is, the product of a decode step or queries, and what is read before the wait for it, is as in
kernels.paged_decode, which launches this kernel. It is written in Gluon, Triton's lower level
(triton/experimental/gluon), which has no interpreter; kernels.cluster_launch says where it is used. A program
of Triton's is a whole cluster here: layouts say that all of its programs hold the same, as in
kernels.sliced_product, but for the end, and what all hold only the first one stores.
"""

from math import e, log2

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.batch import KvLayer
from kernels.cluster_exchange import add_up, all_expect, expect, give, merge, wait_for_all
from kernels.cluster_launch import ClusterLaunch
from kernels.cluster_layouts import (
    added_layout,
    halves_layout,
    line_layout,
    multiplied_layout,
    new_value_layout,
    power_of_two,
    shared_layout,
    values_layout,
)
from kernels.dependent_launch import dependent_launch
from kernels.launcher import launch as start_kernel
from kernels.rotary_store import Rotary

LOWEST = gl.constexpr(-1.0e30)  # a score of no token: finite, so that a warp without any has no NaN


def launch_clusters(
    q: Tensor,
    kv: KvLayer,
    page_table: Tensor,
    spans: Tensor,
    rotary: Rotary | None,
    out: Tensor,
    launch: ClusterLaunch,
    *,
    scale: float,
) -> None:
    """q [num_spans, heads, head_dim]: queries, or with `rotary` the qkv product; spans int32 [num_spans, 2]:
    row and length of each; out [num_spans, num_heads, head_dim]. Only kernels.paged_decode calls this.
    """
    num_spans, num_heads, head_dim = out.shape
    num_kv_heads = kv.k.shape[1]
    angles, q_norm, k_norm, eps = q, None, None, 0.0
    if rotary is not None:
        angles, q_norm, k_norm, eps = rotary.cos_sin, rotary.q_norm, rotary.k_norm, rotary.eps
    gains = (q_norm if q_norm is not None else q, k_norm if k_norm is not None else q)
    strides = (q.stride(0), q.stride(1), page_table.stride(0), angles.stride(0))
    is_dependent = dependent_launch(q.device)["PDL"]
    start_kernel(
        cluster_kernel,
        (num_spans * num_kv_heads,),
        (q, kv.k, kv.v, out, page_table, spans, angles, *gains, eps, scale * log2(e), *strides),
        (
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            launch.programs,
            launch.warps,
            rotary is not None,
            q_norm is not None,
            is_dependent,
        ),
        num_warps=launch.warps,
        num_ctas=launch.programs,
        is_dependent=is_dependent,
    )


@gluon.jit
def _places():
    """Number of the cluster, and of this program in it."""
    cluster = gl.inline_asm_elementwise(
        "mov.u32 $0, %clusterid.x;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    rank = gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    return cluster, rank


@gluon.jit
def _asked():
    """Compilers do not put loads that are before this behind it."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _turned_over(weights):
    """Each 8 by 8 of a product [warps, 16, 8], rows for columns, between the threads of a warp."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r", [weights], dtype=gl.bfloat16, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _slots(table, begin, most, WARPS: gl.constexpr, layout: gl.constexpr):
    """Of a turn's tokens [WARPS, 16]; past the end it is the last one's, so what is read there is no NaN."""
    tokens: gl.constexpr = gl.SliceLayout(2, layout)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, tokens))[:, None]
    position = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, tokens))[None, :]
    return gl.load(table + gl.minimum(position, most), cache_modifier=".cg")


@gluon.jit
def _rows(pool, slot, STRIDE: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """Of one head, or half of it, in the slots [WARPS, 16]: [WARPS, 16, DIM]; not out of the multiprocessor's
    own cache.
    """
    dims = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    # Slots fit int32, offsets into a big pool do not.
    at = slot.to(gl.int64)[:, :, None] * STRIDE + dims[None, None, :]
    return gl.load(pool + at, cache_modifier=".cg")


@gluon.jit
def _ask(
    k_head, v_head, k_slot, v_slot,
    STRIDE: gl.constexpr, DIM: gl.constexpr, of_keys: gl.constexpr, of_values: gl.constexpr,
):  # fmt: skip
    """K, in two halves, and V."""
    low = _rows(k_head, k_slot, STRIDE, DIM // 2, of_keys)
    high = _rows(k_head + DIM // 2, k_slot, STRIDE, DIM // 2, of_keys)
    return low, high, _rows(v_head, v_slot, STRIDE, DIM, of_values)


@gluon.jit
def _turn(
    low, high, values, low_query, high_query, at, stop, scale, acc, top, weight,
    WARPS: gl.constexpr, DIM: gl.constexpr, multiplied: gl.constexpr,
):  # fmt: skip
    """16 tokens a warp from position `at` on into its sum of V [WARPS, DIM, 8], whose dimensions are in the
    order of the threads of `values_layout`, its top score [WARPS, 8] and its weights [WARPS, 16, 8], which
    are summed at the end.
    """
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, multiplied)))[:, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, multiplied)))[None, :]
    inside = at + warp * 16 + token < stop
    # Two chains of products, not one twice as long.
    none = gl.zeros([WARPS, 16, 8], gl.float32, multiplied)
    scores = (mma_v2(low, low_query, none) + mma_v2(high, high_query, none)) * scale
    scores = gl.where(inside[:, :, None], scores, LOWEST)
    new_top = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores - new_top[:, None, :])
    shrink = gl.exp2(top - new_top)
    # Of these changes of shape and layout none moves anything but between registers of a thread.
    right = _turned_over(weights.to(gl.bfloat16)).reshape([WARPS, 2, 8, 8]).permute((0, 1, 3, 2))
    right = gl.convert_layout(right.reshape([WARPS, 16, 8]), gl.DotOperandLayout(1, multiplied, 2))
    left = values.reshape([WARPS, 16, DIM // 64, 8, 8]).permute((0, 2, 4, 3, 1))
    left = gl.convert_layout(left.reshape([WARPS, DIM, 16]), gl.DotOperandLayout(0, multiplied, 2))
    acc = mma_v2(left, right, acc * shrink[:, None, :])
    return acc, new_top, weight * shrink[:, None, :] + weights


@gluon.jit
def _norm_rotated(low, high, low_gain, high_gain, cos, sin, eps, DIM: gl.constexpr, HAS_NORM: gl.constexpr):
    """Both halves of heads [WARPS, DIM / 2, ..], in bf16."""
    low, high = low.to(gl.float32), high.to(gl.float32)
    if HAS_NORM:
        square = gl.expand_dims(gl.sum(low * low + high * high, 1), 1)
        factor = 1.0 / gl.sqrt(square / DIM + eps)
        low, high = low * factor * low_gain.to(gl.float32), high * factor * high_gain.to(gl.float32)
    return (low * cos - high * sin).to(gl.bfloat16), (high * cos + low * sin).to(gl.bfloat16)


@gluon.jit
def _store_new(
    k_head, v_head, new_at, low, high, value,
    WARPS: gl.constexpr, DIM: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """K of the new token, in two halves [WARPS, DIM / 2], and V [WARPS, DIM], which all warps have."""
    halves: gl.constexpr = gl.SliceLayout(2, halves_layout(WARPS, DIM, PROGRAMS))
    half = gl.arange(0, DIM // 2, gl.SliceLayout(0, halves))[None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, halves))[:, None]
    gl.store(k_head + new_at + (half + 0 * warp), low, mask=warp + 0 * half == 0)
    gl.store(k_head + new_at + DIM // 2 + (half + 0 * warp), high, mask=warp + 0 * half == 0)
    whole: gl.constexpr = new_value_layout(WARPS, DIM, PROGRAMS)
    dims = gl.arange(0, DIM, gl.SliceLayout(0, whole))[None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, whole))[:, None]
    gl.store(v_head + new_at + (dims + 0 * warp), value, mask=warp + 0 * dims == 0)


@gluon.jit
def _begin_with_new(
    low, high, value, low_query, high_query, scale, acc,
    WARPS: gl.constexpr, DIM: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The first warp's sums begin with the new token; K and V as `_store_new` takes them."""
    multiplied: gl.constexpr = multiplied_layout(WARPS, PROGRAMS)
    keys: gl.constexpr = gl.DotOperandLayout(0, multiplied, 8)
    # The same token sixteen times: so it is with the tensor cores, and their layout.
    token = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, keys)))[None, :, None]
    low, _ = gl.broadcast(gl.convert_layout(low, gl.SliceLayout(1, keys))[:, None, :], token)
    high, _ = gl.broadcast(gl.convert_layout(high, gl.SliceLayout(1, keys))[:, None, :], token)
    scores = mma_v2(low, low_query, gl.zeros([WARPS, 16, 8], gl.float32, multiplied))
    scores = mma_v2(high, high_query, scores) * scale
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, multiplied)))[:, None, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, multiplied)))[None, :, None]
    weight = gl.where((warp == 0) & (token == 0), 1.0, gl.zeros_like(scores))
    value = value.reshape([WARPS, DIM // 64, 8, 8]).permute((0, 1, 3, 2)).reshape([WARPS, DIM])
    value = gl.convert_layout(value, gl.SliceLayout(2, multiplied)).to(gl.float32)
    acc = gl.where(warp == 0, value[:, :, None], acc)
    return acc, gl.max(gl.where(warp == 0, scores, LOWEST), 1), weight


@gluon.jit(do_not_specialize=["eps", "scale"])
def cluster_kernel(
    q, k_pool, v_pool, out, page_table, spans, cos_sin, q_norm, k_norm,
    eps, scale, q_stride, q_head_stride, row_width, cos_sin_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PROGRAMS: gl.constexpr,
    WARPS: gl.constexpr, OF_PRODUCT: gl.constexpr, HAS_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """spans int32 [num_spans, 2]: row and length; OF_PRODUCT: q is the qkv product, waited for late."""
    HEADS: gl.constexpr = KV_HEADS * GROUP
    HALF: gl.constexpr = DIM // 2
    TOKENS: gl.constexpr = KV_HEADS * DIM  # elements from a token of the pool to the next
    TURN: gl.constexpr = PROGRAMS * WARPS * 16
    # Shared memory: the sums of each warp; those of each program, from GIVEN on; what keeps it there, and at
    # the end the barrier. Four floats more between parts: lanes then meet no bank of others.
    THREADS: gl.constexpr = WARPS * 32
    GIVEN: gl.constexpr = WARPS * GROUP * (DIM + 2) * 4
    USED: gl.constexpr = GIVEN // 4 + PROGRAMS * (GROUP * (DIM // PROGRAMS + 2) + 4)
    LINES: gl.constexpr = power_of_two(USED + 2 * THREADS) // THREADS
    BARRIER: gl.constexpr = LINES * THREADS * 4 - 8
    multiplied: gl.constexpr = multiplied_layout(WARPS, PROGRAMS)
    of_keys: gl.constexpr = gl.DotOperandLayout(0, multiplied, 8)
    of_query: gl.constexpr = gl.DotOperandLayout(1, multiplied, 8)
    of_values: gl.constexpr = values_layout(WARPS, DIM, PROGRAMS)
    added: gl.constexpr = added_layout(WARPS, PROGRAMS)
    if PDL:
        gdc_launch_dependents()
        if not OF_PRODUCT:
            gdc_wait()
    tile, rank = _places()
    span, head = tile // KV_HEADS, tile % KV_HEADS
    row = gl.load(spans + span * 2, cache_modifier=".cg")
    length = gl.load(spans + span * 2 + 1, cache_modifier=".cg")
    memory = gl.allocate_shared_memory(gl.float32, [LINES, THREADS], shared_layout(PROGRAMS))
    memory.index(LINES - 2).store(gl.zeros([THREADS], gl.float32, line_layout(WARPS, PROGRAMS)))
    expect(BARRIER, PROGRAMS * GROUP * (DIM // PROGRAMS + 2) * 4)
    of_span = q + span.to(gl.int64) * q_stride
    stop = length
    if OF_PRODUCT:
        stop = length - 1  # the new token is not read from the pool
    else:
        dims = gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(2, of_query)))[None, :, None]
        dims += 0 * gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_query)))[:, None, None]
        member = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, of_query)))[None, None, :]
        q_at = of_span + ((head * GROUP + member % GROUP) * q_head_stride + dims)
        low_query, high_query = gl.load(q_at), gl.load(q_at + HALF)
        _asked()
    table = page_table + row.to(gl.int64) * row_width
    k_head, v_head = k_pool + head * DIM, v_pool + head * DIM
    # The first program has the last tokens, and the new one: what is stored, the compiler has it store.
    begin, most = (PROGRAMS - 1 - rank) * (WARPS * 16), gl.maximum(stop - 1, 0)
    k_slot = _slots(table, begin, most, WARPS, of_keys)
    v_slot = _slots(table, begin, most, WARPS, of_values)
    low, high, values = _ask(k_head, v_head, k_slot, v_slot, TOKENS, DIM, of_keys, of_values)
    _asked()
    k_slot = _slots(table, begin + TURN, most, WARPS, of_keys)
    v_slot = _slots(table, begin + TURN, most, WARPS, of_values)
    k_after = _slots(table, begin + 2 * TURN, most, WARPS, of_keys)
    v_after = _slots(table, begin + 2 * TURN, most, WARPS, of_values)
    top = gl.full([WARPS, 8], LOWEST, gl.float32, gl.SliceLayout(1, multiplied))
    weight = gl.zeros([WARPS, 16, 8], gl.float32, multiplied)
    acc = gl.zeros([WARPS, DIM, 8], gl.float32, multiplied)
    if OF_PRODUCT:
        of_halves: gl.constexpr = halves_layout(WARPS, DIM, PROGRAMS)
        half = gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(2, of_halves)))[None, :]
        half += 0 * gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_halves)))[:, None]
        angles = cos_sin + (length - 1).to(gl.int64) * cos_sin_stride + half
        cos, sin = gl.load(angles), gl.load(angles + HALF)
        low_gain, high_gain, low_k_gain, high_k_gain = cos, sin, cos, sin
        if HAS_NORM:
            low_gain, high_gain = gl.load(q_norm + half), gl.load(q_norm + HALF + half)
            low_k_gain, high_k_gain = gl.load(k_norm + half), gl.load(k_norm + HALF + half)
        new_at = gl.load(table + length - 1, cache_modifier=".cg").to(gl.int64) * TOKENS
        member = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, of_halves)))[None, None, :]
        q_at = of_span + ((head * GROUP + member % GROUP) * q_head_stride + half[:, :, None])
        k_at = of_span + (HEADS + head) * q_head_stride + half
        of_new: gl.constexpr = new_value_layout(WARPS, DIM, PROGRAMS)
        dims = gl.arange(0, DIM, gl.SliceLayout(0, of_new))[None, :]
        dims += 0 * gl.arange(0, WARPS, gl.SliceLayout(1, of_new))[:, None]
        v_at = of_span + (HEADS + KV_HEADS + head) * q_head_stride + dims
        _asked()
        if PDL:
            gdc_wait()
        # All at once, and by programs, too, that do not have the new token.
        low_query, high_query = gl.load(q_at, volatile=True), gl.load(q_at + HALF, volatile=True)
        low_key, high_key = gl.load(k_at, volatile=True), gl.load(k_at + HALF, volatile=True)
        value = gl.load(v_at, volatile=True)
        _asked()
        low_query, high_query = _norm_rotated(
            low_query, high_query, low_gain[:, :, None], high_gain[:, :, None], cos[:, :, None],
            sin[:, :, None], eps, DIM, HAS_NORM,
        )  # fmt: skip
        low_query = gl.convert_layout(low_query, of_query)
        high_query = gl.convert_layout(high_query, of_query)
        if rank == 0:
            low_key, high_key = _norm_rotated(
                low_key, high_key, low_k_gain, high_k_gain, cos, sin, eps, DIM, HAS_NORM
            )
            _store_new(k_head, v_head, new_at, low_key, high_key, value, WARPS, DIM, PROGRAMS)
            acc, top, weight = _begin_with_new(
                low_key, high_key, value, low_query, high_query, scale, acc, WARPS, DIM, PROGRAMS
            )
    if begin < stop:
        acc, top, weight = _turn(
            low, high, values, low_query, high_query, begin, stop, scale, acc, top, weight,
            WARPS, DIM, multiplied,
        )  # fmt: skip
        # Two turns are asked for at once. The second may be of no token: it is the last one's again.
        for at in range(begin + TURN, stop, 2 * TURN):
            low, high, values = _ask(k_head, v_head, k_slot, v_slot, TOKENS, DIM, of_keys, of_values)
            low_after, high_after, values_after = _ask(
                k_head, v_head, k_after, v_after, TOKENS, DIM, of_keys, of_values
            )
            _asked()
            k_slot = _slots(table, at + 2 * TURN, most, WARPS, of_keys)
            v_slot = _slots(table, at + 2 * TURN, most, WARPS, of_values)
            k_after = _slots(table, at + 3 * TURN, most, WARPS, of_keys)
            v_after = _slots(table, at + 3 * TURN, most, WARPS, of_values)
            acc, top, weight = _turn(
                low, high, values, low_query, high_query, at, stop, scale, acc, top, weight,
                WARPS, DIM, multiplied,
            )  # fmt: skip
            acc, top, weight = _turn(
                low_after, high_after, values_after, low_query, high_query, at + TURN, stop, scale,
                acc, top, weight, WARPS, DIM, multiplied,
            )  # fmt: skip
    acc, top, weight = add_up(acc, top, weight, GROUP, DIM, PROGRAMS, WARPS, added)
    all_expect()
    give(acc, top, weight, rank, GIVEN, BARRIER, GROUP, DIM, PROGRAMS, WARPS, added)
    wait_for_all(BARRIER)
    to = out + (span.to(gl.int64) * HEADS + head * GROUP) * DIM
    merge(to, GIVEN, GROUP, DIM, PROGRAMS, WARPS)
