"""Sampling noise that depends on (seed, choice, position, token id) and nothing else.

The definition, for every implementation (this one, C++, Triton), all integers unsigned 32 bits:

    key      = (seed mod 2**32, seed div 2**32)
    counter  = (token_id div 4, position, choice, 0)
    word     = philox4x32_10(counter, key)[token_id mod 4]
    v        = min((float32(word) + 0.5) * 2**-32, 1 - 2**-24)      in float32
    noise    = -log1p(-v)                                           exponential with mean 1

The token drawn is argmax over the kept tokens of `logit / temperature - log(noise)` (Gumbel's trick), so a
token's noise is the same alone or in company, after a preemption or a resume, and whatever is filtered out.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
WORDS_PER_COUNTER = 4

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """What the noise of each row depends on besides the token id: int64 [num_rows], values below 2**32."""

    seed_low: Tensor
    seed_high: Tensor
    choice: Tensor
    position: Tensor  # absolute position of the token to be drawn


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox-4x32. int64 tensors of values below 2**32, broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_number in range(_ROUNDS):
        if round_number > 0:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def noise_of_tokens(keys: NoiseKeys, token_ids: Tensor) -> Tensor:
    """Noise of the named tokens. token_ids int64 [num_rows, n]; result float32 [num_rows, n]."""
    words = torch.stack(_words(keys, token_ids // WORDS_PER_COUNTER), dim=-1)
    return _exponential(words.gather(-1, (token_ids % WORDS_PER_COUNTER)[..., None])[..., 0])


def noise_of_vocabulary(keys: NoiseKeys, vocab_size: int) -> Tensor:
    """Noise of tokens 0 .. vocab_size - 1; result float32 [num_rows, vocab_size]."""
    num_counters = -(-vocab_size // WORDS_PER_COUNTER)
    counters = torch.arange(num_counters, device=keys.position.device)[None, :]
    words = torch.stack(_words(keys, counters), dim=-1).flatten(1)
    return _exponential(words[:, :vocab_size])


def _words(keys: NoiseKeys, counters: Tensor) -> Words:
    column = (slice(None), None)
    zero = torch.zeros_like(keys.choice[column])
    return philox4x32(
        (counters, keys.position[column], keys.choice[column], zero),
        (keys.seed_low[column], keys.seed_high[column]),
    )


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    # The product of two 32-bit values wraps in int64, but all its 64 bits are there: the shift smears the
    # sign over the upper half, and the mask takes it off again.
    product = value * factor
    return (product >> 32) & _MASK, product & _MASK


def _exponential(words: Tensor) -> Tensor:
    v = (words.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-v.clamp(max=1.0 - 2.0**-24))
