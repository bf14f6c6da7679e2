"""The last program of a sequence to finish merges all its chunks (see paged_decode.py)."""

import triton
import triton.language as tl


@triton.jit
def merge_parts(
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
    WARPS: tl.constexpr,
):
    """The sum of `count` parts of one sequence, from `first` on, for the heads of one group, to `out_at`.

    partial fp32 [parts, HEADS, DIM], partial_lse fp32 [parts, HEADS] to the base of 2. A turn takes 64
    numbers a thread: all their loads are under way before the first is used, and no thread needs those of
    another. At most 16 parts: compilers take long for more.
    """
    AT_ONCE: tl.constexpr = max(1, min(16, 64 * 32 * WARPS // (MEMBERS * DIM_PADDED)))
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
