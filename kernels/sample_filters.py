"""The lowest logit of each row that top-k, top-p and min-p keep; rows without filters get -inf.

Kept are the tokens whose logit / temperature is
- at least the top_k-th highest, equals of it included;
- among the most likely whose mass, of what top-k kept, reaches top_p, equals of the last one included;
- at least the highest plus log(min_p);
and always the most likely.

Both searches ask for the lowest logit above which less than a target lies, counted in tokens for top-k and
in mass for top-p. A pass over the row weighs what lies above four values of the bracket that holds the
answer; once the bracket holds few tokens they are put aside and the passes go over them alone. Bytes: the
row about three times for a narrow kept set and once more for each quartering of a wide one, all but the first
from the second-level cache. One program a row: the result depends on nothing but the row.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.sample_edits import SampleEdits

CANDIDATES = 8192  # tokens that can be put aside: one loop turn
_LANES = 2048  # tokens of one read
_STRIPES = 4  # independent reads of a loop turn
_WARPS = 16


def lowest_kept(
    logits: Tensor,
    edits: SampleEdits | None,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    vocab_size: int,
    candidates: Tensor,
    *,
    out: Tensor,
) -> None:
    """Writes `out` fp32 [num_sampled].

    logits [num_sampled, >= vocab_size], fp32 or bf16; rows with edits use their edited logits instead;
    rows int32 [num_sampled]; temperature, top_k, top_p, log_min_p [num_rows]; candidates fp32
    [>= num_sampled, room] is scratch for tokens put aside. Rows whose logits hold NaN or +inf get -inf.
    """
    assert logits.stride(1) == 1, "logits of one row must be contiguous"
    _filter_kernel[(rows.shape[0],)](
        logits,
        edits.edited if edits is not None else logits,
        edits.line if edits is not None else rows,
        rows,
        temperature,
        top_k,
        top_p,
        log_min_p,
        candidates,
        out,
        logits.stride(0),
        edits.edited.stride(0) if edits is not None else 0,
        vocab_size,
        HAS_EDITS=edits is not None,
        ROOM=candidates.shape[1],
        LANES=_LANES,
        STRIPES=_STRIPES,
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )


@triton.jit
def _step(x, by):
    # The float `by` floats above x.
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + by
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _least_logit(near, temperature, score):
    """The smallest logit whose quotient with the temperature is at least `score`; near it by a few floats."""
    x = near
    for _ in tl.static_range(4):
        x = tl.where(tl.div_rn(x, temperature) < score, _step(x, 1), x)
    for _ in tl.static_range(6):
        below = _step(x, -1)
        x = tl.where(tl.div_rn(below, temperature) >= score, below, x)
    return x


@triton.jit
def _extremes(row, size, LANES: tl.constexpr, STRIPES: tl.constexpr):
    """Highest logit, lowest finite one, and whether there is a NaN or +inf."""
    high = tl.full([LANES], float("-inf"), tl.float32)
    low = tl.full([LANES], float("inf"), tl.float32)
    is_bad = tl.zeros([LANES], tl.int32)
    for begin in range(0, size, LANES * STRIPES):
        for stripe in tl.static_range(STRIPES):
            at = begin + stripe * LANES + tl.arange(0, LANES)
            x = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
            high = tl.maximum(high, x)
            low = tl.minimum(low, tl.where(x > float("-inf"), x, float("inf")))
            is_bad = tl.where(x < float("inf"), is_bad, 1)
    return tl.max(high, 0), tl.min(low, 0), tl.max(is_bad, 0)


@triton.jit
def _three_between(low, high):
    step = high * 0.25 - low * 0.25
    return low + step, low + 2 * step, high - step


@triton.jit
def _weigh(
    source, size, low, high, peak, scale, BY_MASS: tl.constexpr, LANES: tl.constexpr, STRIPES: tl.constexpr
):
    """What lies above low and above three values between low and high: tokens, and their weight.

    Also the smallest and the largest token of (low, high].
    """
    value1, value2, value3 = _three_between(low, high)
    count0 = tl.zeros([LANES], tl.int32)
    count1, count2, count3 = count0, count0, count0
    mass0 = tl.zeros([LANES], tl.float32)
    mass1, mass2, mass3 = mass0, mass0, mass0
    smallest = tl.full([LANES], float("inf"), tl.float32)
    largest = tl.full([LANES], float("-inf"), tl.float32)
    for begin in range(0, size, LANES * STRIPES):
        for stripe in tl.static_range(STRIPES):
            at = begin + stripe * LANES + tl.arange(0, LANES)
            x = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
            above0, above1, above2, above3 = x > low, x > value1, x > value2, x > value3
            count0 += above0.to(tl.int32)
            count1 += above1.to(tl.int32)
            count2 += above2.to(tl.int32)
            count3 += above3.to(tl.int32)
            if BY_MASS:
                mass = tl.exp2((x - peak) * scale)
                mass0 += tl.where(above0, mass, 0.0)
                mass1 += tl.where(above1, mass, 0.0)
                mass2 += tl.where(above2, mass, 0.0)
                mass3 += tl.where(above3, mass, 0.0)
            inside = above0 & (x <= high)
            smallest = tl.minimum(smallest, tl.where(inside, x, float("inf")))
            largest = tl.maximum(largest, tl.where(inside, x, float("-inf")))
    n0, n1, n2, n3 = tl.sum(count0, 0), tl.sum(count1, 0), tl.sum(count2, 0), tl.sum(count3, 0)
    if BY_MASS:
        # A lane adds up few terms. The lanes are added in fp64: top_p may be 1 - 2^-24.
        w0 = tl.sum(mass0.to(tl.float64), 0)
        w1 = tl.sum(mass1.to(tl.float64), 0)
        w2 = tl.sum(mass2.to(tl.float64), 0)
        w3 = tl.sum(mass3.to(tl.float64), 0)
    else:
        w0, w1, w2, w3 = n0.to(tl.float64), n1.to(tl.float64), n2.to(tl.float64), n3.to(tl.float64)
    return n0, n1, n2, n3, w0, w1, w2, w3, tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def _put_aside(source, size, low, high, to, LANES: tl.constexpr):
    """Copies the tokens of (low, high] to `to`."""
    filled = tl.full([], 0, tl.int32)
    for begin in range(0, size, LANES):
        at = begin + tl.arange(0, LANES)
        x = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
        inside = ((x > low) & (x <= high)).to(tl.int32)
        count = tl.sum(inside, 0)
        if count > 0:
            tl.store(to + filled + tl.cumsum(inside, 0) - 1, x, mask=inside != 0)
            filled += count


@triton.jit
def _search(
    plain,
    edited,
    is_edited,
    aside,
    num_aside,
    size,
    low,
    peak,
    scale,
    limit,
    BY_MASS: tl.constexpr,
    ROOM: tl.constexpr,
    LANES: tl.constexpr,
    STRIPES: tl.constexpr,
):
    """The lowest logit above which lies less than `limit` tokens, or than that share of the mass above `low`.

    -inf where even all above `low` is less. Also how many tokens are aside at the end, if these are all that
    lie above some logit, and that logit; `num_aside` says so of the beginning, 0 for none.
    """
    # Above low lies at least the target and above high less, so the bracket (low, high] is never empty.
    high = peak
    target = limit.to(tl.float64)
    count_above = tl.full([], 0, tl.int32)  # tokens of the source above high
    weight_above = tl.full([], 0.0, tl.float64)
    is_whole = tl.full([], 1, tl.int32)  # nothing lies above what is aside
    is_new = tl.full([], 1, tl.int32)  # the source was not weighed yet
    bottom = low  # of what is aside
    answer = peak
    turn = tl.full([], 0, tl.int32)
    while turn >= 0:
        if num_aside > 0:
            n0, n1, n2, n3, w0, w1, w2, w3, smallest, largest = _weigh(
                aside, num_aside, low, high, peak, scale, BY_MASS, LANES, STRIPES
            )
        elif is_edited:
            n0, n1, n2, n3, w0, w1, w2, w3, smallest, largest = _weigh(
                edited, size, low, high, peak, scale, BY_MASS, LANES, STRIPES
            )
        else:
            n0, n1, n2, n3, w0, w1, w2, w3, smallest, largest = _weigh(
                plain, size, low, high, peak, scale, BY_MASS, LANES, STRIPES
            )
        if BY_MASS:
            target = tl.where(turn == 0, target * w0, target)
        is_short = (turn == 0) & (w0 < target)
        if is_new != 0:
            # The same tokens in another order add up to something else in the last bits.
            target = tl.minimum(tl.maximum(target, 1e-300), w0)
            is_new = tl.full([], 0, tl.int32)
        turn += 1
        if is_short | (smallest == largest) | (turn > 200):
            answer = tl.where(is_short, float("-inf"), largest)
            turn = tl.full([], -1, tl.int32)
        else:
            value1, value2, value3 = _three_between(low, high)
            in1, in2, in3 = w1 < target, w2 < target, w3 < target  # the answer is at most that value
            low = tl.where(in1, low, tl.where(in2, value1, tl.where(in3, value2, value3)))
            high = tl.where(in1, value1, tl.where(in2, value2, tl.where(in3, value3, high)))
            count = tl.where(in1, n0, tl.where(in2, n1, tl.where(in3, n2, n3)))
            count_above = tl.where(in1, n1, tl.where(in2, n2, tl.where(in3, n3, count_above)))
            weight_above = tl.where(in1, w1, tl.where(in2, w2, tl.where(in3, w3, weight_above)))
            if (num_aside == 0) & (count - count_above <= ROOM):
                if is_edited:
                    _put_aside(edited, size, low, high, aside, LANES)
                else:
                    _put_aside(plain, size, low, high, aside, LANES)
                tl.debug_barrier()
                num_aside = count - count_above
                bottom = low
                target -= weight_above
                is_whole = (count_above == 0).to(tl.int32)
                is_new = tl.full([], 1, tl.int32)
                count_above = tl.full([], 0, tl.int32)
                weight_above = tl.full([], 0.0, tl.float64)
    return answer, num_aside * is_whole, bottom


@triton.jit
def _filter_kernel(
    logits,
    edited,
    line_of_row,
    rows,
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    candidates,
    out,
    logits_stride,
    edited_stride,
    vocab_size,
    HAS_EDITS: tl.constexpr,
    ROOM: tl.constexpr,
    LANES: tl.constexpr,
    STRIPES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    log_min_p = tl.load(log_min_ps + row)
    lowest = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))):
        plain = logits + i * logits_stride
        changed = edited
        is_edited = tl.full([], 0, tl.int1)
        if HAS_EDITS:
            line = tl.load(line_of_row + row).to(tl.int64)
            is_edited = line >= 0
            changed = edited + tl.maximum(line, 0) * edited_stride
        if is_edited:
            peak, least, is_bad = _extremes(changed, vocab_size, LANES, STRIPES)
        else:
            peak, least, is_bad = _extremes(plain, vocab_size, LANES, STRIPES)
        if (is_bad == 0) & (peak > float("-inf")):
            aside = candidates + i * ROOM
            scale = 1.4426950408889634 / temperature
            num_aside = tl.full([], 0, tl.int32)
            if top_k > 0:
                low = _step(least, -1)
                found, num_aside, bottom = _search(
                    plain, changed, is_edited, aside, num_aside, vocab_size, low, peak, scale, top_k,
                    False, ROOM, LANES, STRIPES,
                )  # fmt: skip
                if found > float("-inf"):
                    lowest = _least_logit(found, temperature, tl.div_rn(found, temperature))
                # Unequal logits may give equal scores: all of them are needed.
                num_aside = tl.where(lowest > bottom, num_aside, 0)
            if top_p < 1.0:
                # What lies further down is e^-60 of the highest and never reaches a sum.
                low = peak - 60.0 * temperature
                low = tl.where(lowest > low, _step(lowest, -1), low)
                found, _, _ = _search(
                    plain, changed, is_edited, aside, num_aside, vocab_size, low, peak, scale, top_p,
                    True, ROOM, LANES, STRIPES,
                )  # fmt: skip
                lowest = tl.maximum(lowest, _least_logit(found, temperature, tl.div_rn(found, temperature)))
            if log_min_p > float("-inf"):
                score = tl.div_rn(peak, temperature) + log_min_p
                found = _least_logit(score * temperature, temperature, score)
                lowest = tl.maximum(lowest, found)
            lowest = tl.minimum(lowest, peak)
    tl.store(out + i, lowest)
