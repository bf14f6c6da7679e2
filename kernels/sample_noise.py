"""The noise of kernels/noise.py inside Triton kernels: the same words and the same fractions, bit for bit.

Owns no launch. Logarithms are the device's own, so a token's noise may differ in its last bits from what
torch computes elsewhere; the integers, and the fractions made of them, cannot.
"""

import triton
import triton.language as tl


@triton.jit
def philox_words(counter, key):
    """The four words of `counter`, scalar or tensor.

    `key` is position, choice, low and high half of the seed; all are uint32.
    """
    c0, c1, c2 = counter, key[0], key[1]
    c3 = tl.full([], 0, tl.uint32)
    k0, k1 = key[2], key[3]
    for _ in tl.static_range(10):
        # Both factors are below 2^32: one instruction gives all 64 bits.
        product0 = c0.to(tl.uint64) * tl.full([], 0xD2511F53, tl.uint64)
        product1 = c2.to(tl.uint64) * tl.full([], 0xCD9E8D57, tl.uint64)
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def fraction(word):
    """What the noise is the exponential quantile of, float32: above 0 and at most 1 - 2^-24."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def log_noise(word):
    """Logarithm of a token's noise, log(-log1p(-fraction)), float32."""
    v = fraction(word)
    # 1 - v rounds to u. What that took off is exactly (1 - u) - v and comes back in first order.
    u = 1.0 - v
    lost = (1.0 - u) - v
    return tl.log(-(tl.log(u) + tl.div_rn(lost, u)))
