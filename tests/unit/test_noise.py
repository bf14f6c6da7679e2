"""Sampling noise: the published generator, and dependence on its key alone."""

import pytest
import torch

from kernels.noise import NoiseKeys, noise_of_tokens, noise_of_vocabulary, philox4x32

# Known answers of the authors' own test vectors (Random123, kat_vectors, philox4x32 10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def keys(*, seed: int = 7, choice: int = 0, position: int = 3, num_rows: int = 1) -> NoiseKeys:
    columns = (seed & 0xFFFFFFFF, seed >> 32, choice, position)
    return NoiseKeys(*(torch.full((num_rows,), value) for value in columns))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_generator_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(
        tuple(torch.tensor(word) for word in counter),  # type: ignore[arg-type]
        tuple(torch.tensor(word) for word in key),  # type: ignore[arg-type]
    )
    assert tuple(int(word) for word in words) == expected


def test_a_tokens_noise_is_the_same_among_any_others() -> None:
    """B052: whatever candidates are left, a token keeps its noise."""
    vocabulary = noise_of_vocabulary(keys(), 1003)
    token_ids = torch.tensor([[1002, 0, 5, 6, 7, 8, 500]])
    assert torch.equal(noise_of_tokens(keys(), token_ids), vocabulary.gather(1, token_ids))
    assert torch.equal(noise_of_vocabulary(keys(), 17), vocabulary[:, :17])


def test_every_part_of_the_key_matters() -> None:
    base = noise_of_vocabulary(keys(), 64)
    for other in (keys(seed=8), keys(seed=7 + (1 << 32)), keys(choice=1), keys(position=4)):
        assert (noise_of_vocabulary(other, 64) != base).float().mean() > 0.95


def test_rows_do_not_see_one_another() -> None:
    together = noise_of_vocabulary(keys(num_rows=5), 33)
    assert torch.equal(together, noise_of_vocabulary(keys(), 33).expand(5, 33))


def test_noise_is_exponential_with_mean_one() -> None:
    noise = noise_of_vocabulary(keys(), 400_000)[0]
    assert noise.isfinite().all()
    assert (noise > 0).all()
    assert abs(noise.mean() - 1.0) < 0.01
    assert abs(noise.var() - 1.0) < 0.03
    for level in (0.1, 0.5, 1.0, 3.0):
        share = (noise < level).double().mean()
        assert abs(share - (1 - torch.tensor(-level).exp())) < 0.003
