"""`--deterministic` on a GPU: whole outputs, log-probabilities included, bit for bit whatever else runs."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.invariant_matmul import invariant_matmul
from kvatlas.models.resolve import resolve_model
from worker.model.invariant import invariant_linear
from worker.model.source import load_model
from worker.scheduling.sampling import SamplingParams

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SHAPES = [(4096, 1024), (1024, 3072), (151936, 1024), (28672, 4096), (4096, 14336), (960, 576)]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=BF16) * inputs**-0.5
    x = torch.randn(300, inputs, device="cuda", dtype=BF16)
    whole = invariant_matmul(x, weight)
    exact = x[:16].float() @ weight.float().T
    torch.testing.assert_close(whole[:16].float(), exact, rtol=2e-2, atol=2e-2)
    for rows in (1, 2, 7, 16, 63, 64, 65, 128, 299):
        first = 300 - rows
        assert torch.equal(invariant_matmul(x[first:], weight), whole[first:]), rows


@pytest.fixture(scope="module")
def model() -> Any:
    files = resolve_model("random:qwen3-0.6b")
    return load_model(files, device="cuda", dtype=BF16, max_context=2048, linear_factory=invariant_linear)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, drawn, filtered, penalised; all with log-probabilities of the drawn tokens but a few."""
    kinds = [
        SamplingParams(logprobs=2),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.95, logprobs=0),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.2, logprobs=5),
    ]
    draw = random.Random(2)
    return [
        (
            [draw.randrange(100_000) for _ in range(3 + 23 * i)],
            replace(kinds[i % 4], max_tokens=20, stop_at_eos=False, seed=50 + i),
        )
        for i in range(24)
    ]


def test_answers_do_not_depend_on_company_chunks_graphs_or_preemption(gpu_engine, model) -> None:
    """Tokens and log-probabilities of each request alone equal those among 23 others, bit for bit."""
    asked = requests()
    settings: dict[str, Any] = {"backend": "invariant", "num_pages": 1024, "max_running": 32}
    together = gpu_engine(model, max_step_tokens=2048, **settings).answer(asked)
    small = gpu_engine(model, max_step_tokens=96, **settings)
    for number in range(0, 24, 5):
        alone = small.answer([asked[number]])
        assert alone.tokens == [together.tokens[number]], number
        assert alone.logprobs == [together.logprobs[number]], number
    in_chunks = small.answer(asked)
    assert (in_chunks.tokens, in_chunks.logprobs) == (together.tokens, together.logprobs)
    few_pages = settings | {"num_pages": 60}
    crowded = gpu_engine(model, max_step_tokens=96, **few_pages).answer(asked)
    assert crowded.preemptions > 0
    assert (crowded.tokens, crowded.logprobs) == (together.tokens, together.logprobs)
    eager = gpu_engine(model, capture=False, max_step_tokens=512, **settings).answer(asked)
    assert (eager.tokens, eager.logprobs) == (together.tokens, together.logprobs)
