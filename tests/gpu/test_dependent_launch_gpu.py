"""Dependent launches change when kernels begin, and not one bit of what they leave."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.model.llama import Model
from worker.scheduling.sampling import SamplingParams

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.dependent_launch import allow_dependent_launches, dependent_launch, dependent_launches
from kernels.few_rows import add_product, product
from kernels.matvec import matvec
from kernels.rms_norm import rms_norm

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def dependent() -> Iterator[None]:
    """Whatever a test switches, the next one finds dependent launches."""
    with dependent_launches():
        if not dependent_launch(DEVICE)["PDL"]:
            pytest.skip("this device has no programmatic dependent launch (compute capability 9.0 on)")
        yield
    allow_dependent_launches(True)


@pytest.mark.parametrize("num_requests", [1, 5, 40])
def test_answers_and_the_pool_are_the_same_bit_for_bit(
    gpu_engine: Callable[..., Any], gpu_model: Callable[[str | Path, torch.dtype], Model], num_requests: int
) -> None:
    """M-24: prompts, mixed steps and replayed decode steps, greedy and drawn."""
    model = gpu_model("random:tiny", torch.bfloat16)
    draw = random.Random(num_requests)
    vocab = model.config.vocab_size
    requests = [
        (
            [draw.randrange(vocab) for _ in range(draw.randrange(5, 90))],
            SamplingParams(max_tokens=24, stop_at_eos=False, temperature=0.8 * (n % 2), seed=n),
        )
        for n in range(num_requests)
    ]
    left = []
    for is_on in (True, False):
        allow_dependent_launches(is_on)
        engine = gpu_engine(model, num_pages=400, max_context=512)
        engine.runner.kv_pool.buffer.zero_()
        outcome = engine.answer(requests)
        pages = engine.runner.kv_pool.buffer[:, :, :-1].clone()  # in the dummy page the last to write wins
        left.append((outcome.tokens, pages, engine.runner.graphs.replays))
    (tokens, pool, replays), (tokens_without, pool_without, _) = left
    assert replays > 0
    assert tokens == tokens_without
    assert torch.equal(pool, pool_without)


@pytest.mark.parametrize(("hidden", "inner"), [(512, 768), (4096, 14_336)])
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_chain_of_kernels_sees_what_the_one_before_it_wrote(num_rows: int, hidden: int, inner: int) -> None:
    """Each kernel needs the last one's result and may begin before that is there: 40 layers, 20 times."""
    generator = torch.Generator(DEVICE).manual_seed(num_rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)

    weights = [
        (normal(2 * inner, hidden) / hidden**0.5, normal(hidden, inner) / inner**0.5) for _ in range(40)
    ]
    gain, start = normal(hidden), normal(num_rows, hidden)

    def chain() -> torch.Tensor:
        residual = start.clone()
        normed: Any = rms_norm(residual, gain, 1e-6)
        for gate_up, down in weights:
            if num_rows == 1:
                matvec(
                    matvec(residual, gate_up, norm=gain, gated=True),
                    down,
                    residual=residual,
                )
            else:
                normed = add_product(product(normed, gate_up, gated=True), down, residual, gain)
        return residual

    allow_dependent_launches(False)
    expected = chain()
    allow_dependent_launches(True)
    assert expected.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(), expected)
