"""The best score of a part of a row, its token, and whether it is finite: what a program of the draw does.

A part is a run of the noise generator's counters, four tokens each. Lane i of a program looks at every
COUNTERS-th counter from the i-th on and keeps one bound: no token of its counters scores higher. Noise is at
least its fraction v, so -log(v) bounds what it adds, and the least v of four beside their highest logit
bounds four. Then the lane with the highest bound is scored, exactly; then the next, until no bound is above
the best score, of this part or of any other of the row. Owns no launch.
"""

import triton
import triton.language as tl

from kernels.sample_noise import log_noise, philox_words

NOTHING = tl.constexpr(-2139095041)
"""No score yet: minus infinity, in order (_in_order)."""


@triton.jit
def _four_logits(row, counter, end, vocab_size, IS_PACKED: tl.constexpr):
    """fp32 logits of tokens 4 * counter .. + 3; -inf for counters from `end` on and past the vocabulary."""
    inside = counter < end
    if IS_PACKED:
        words = row.to(tl.pointer_type(tl.int64))
        if row.dtype.element_ty == tl.bfloat16:
            word = tl.load(words + counter, mask=inside, other=-0x7F007F007F0080)
            low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
            a, b, c, d = low << 16, low & -65536, high << 16, high & -65536
        else:
            first = tl.load(words + 2 * counter, mask=inside, other=-0x7FFFFF00800000)
            second = tl.load(words + 2 * counter + 1, mask=inside, other=-0x7FFFFF00800000)
            a, b = first.to(tl.int32), (first >> 32).to(tl.int32)
            c, d = second.to(tl.int32), (second >> 32).to(tl.int32)
        a, b = a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)
        c, d = c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True)
    else:
        at = row + 4 * counter
        left = tl.where(inside, vocab_size - 4 * counter, 0)
        a = tl.load(at, mask=left > 0, other=float("-inf")).to(tl.float32)
        b = tl.load(at + 1, mask=left > 1, other=float("-inf")).to(tl.float32)
        c = tl.load(at + 2, mask=left > 2, other=float("-inf")).to(tl.float32)
        d = tl.load(at + 3, mask=left > 3, other=float("-inf")).to(tl.float32)
    return a, b, c, d


@triton.jit
def _highest(a, b, c, d):
    """Of four logits; NaN if one is."""
    ab = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    cd = tl.maximum(c, d, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(ab, cd, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def best_of_part(
    row,
    begin,
    end,
    vocab_size,
    temperature,
    lowest,
    key,
    row_best,
    COUNTERS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """Best score of counters begin .. end - 1, its token (-1: none), and whether there is a NaN or +inf."""
    is_random = temperature > 0.0
    scale = 1.4426950408889634 / tl.where(is_random, temperature, 1.0)
    lane = tl.arange(0, COUNTERS)
    # Of each lane, over all its counters:
    bounds = tl.full([COUNTERS], float("-inf"), tl.float32)  # of scores
    highest = tl.full([COUNTERS], float("-inf"), tl.float32)  # logits
    for first in range(begin, end, COUNTERS):
        a, b, c, d = _four_logits(row, first + lane, end, vocab_size, IS_PACKED)
        high = _highest(a, b, c, d)
        highest = tl.maximum(highest, high, propagate_nan=tl.PropagateNan.ALL)
        # What a score of the four can come to, as a power of two; with noise 32 and 127 less.
        bound = high * scale
        if is_random:
            w0, w1, w2, w3 = philox_words((first + lane).to(tl.uint32), key)
            word = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
            # A float's bits are 127 more than its logarithm, or up to 0.09 less than that: no log2 is needed.
            bits = word.to(tl.float32).to(tl.int32, bitcast=True)
            bound -= bits.to(tl.float32) * 1.1920928955078125e-07
        if HAS_FILTERS:
            bound = tl.where(high >= lowest, bound, float("-inf"))
        bounds = tl.maximum(bounds, bound)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], -1, tl.int32)
    # By an atomic, too: all threads must see one value, for they go round the loop together.
    rival = _in_order(tl.atomic_max(row_best, NOTHING, sem="relaxed")).to(tl.float32, bitcast=True)
    top = tl.max(bounds, 0)
    while (top >= _reach(tl.maximum(best, rival), is_random)) & (top > float("-inf")):
        place = tl.max(tl.where(bounds == top, lane, -1), 0)
        best, best_id = _best_of_lane(
            row, begin + place, end, vocab_size, temperature, lowest, key, best, best_id, COUNTERS
        )
        # Other parts need not look below it: else the unluckiest of thousands would look at dozens of lanes.
        before = tl.atomic_max(row_best, _in_order(best.to(tl.int32, bitcast=True)), sem="relaxed")
        rival = _in_order(before).to(tl.float32, bitcast=True)
        bounds = tl.where(lane == place, float("-inf"), bounds)
        top = tl.max(bounds, 0)
    is_bad = tl.max(tl.where(highest < float("inf"), 0, 1), 0)
    return best, best_id, is_bad


@triton.jit
def _in_order(bits):
    """A float's bits as an integer that is the greater the float is, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best_of_lane(
    row, begin, end, vocab_size, temperature, lowest, key, best, best_id, COUNTERS: tl.constexpr
):
    """Best score so far and its token, with those of every COUNTERS-th counter, exactly; the lowest id of
    equals, whichever came first: lanes are not in the order of tokens.
    """
    at = tl.arange(0, 32)
    which = at % 4
    for first in range(begin, end, 8 * COUNTERS):
        counter = first + at // 4 * COUNTERS
        w0, w1, w2, w3 = philox_words(counter.to(tl.uint32), key)
        word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
        token = 4 * counter + which
        inside = (counter < end) & (token < vocab_size)
        logit = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
        score = logit
        if temperature > 0.0:
            score = tl.div_rn(logit, temperature) - log_noise(word)
        score = tl.where(logit >= lowest, score, float("-inf"))
        top = tl.max(score, 0)
        top_id = tl.min(tl.where(score == top, token, 0x7FFFFFFF), 0)
        is_better = (top > best) | ((top == best) & (top_id < best_id))
        best_id = tl.where(is_better, top_id, best_id)
        best = tl.maximum(top, best)
    return best, best_id


@triton.jit
def _reach(best, is_random):
    """What a lane's bound must come to, if one of its tokens is to score as high as `best`."""
    power = best * 1.4426950408889634
    # More than all rounding errors of bounds and scores.
    slack = 2e-3 + tl.minimum(tl.abs(power) * 1e-5, 1e30)
    return power - tl.where(is_random, 159.0, 0.0) - slack
