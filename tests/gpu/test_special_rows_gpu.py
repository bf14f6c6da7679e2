"""Rows that want more than a draw, through the engine on a GPU: the tokens that the plain sampler draws."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from benchmarks.special_rows import EvenTokens
from worker.execution.constraint_masks import StepMasks
from worker.execution.sampler import HostRows, Sampled, Sampler
from worker.execution.sampling_state import SamplingState
from worker.model.llama import Model
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart

pytestmark = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32

MakeEngine = Callable[..., Any]  # tests/gpu/conftest.py
LoadModel = Callable[[str | Path, torch.dtype], Model]
Request = tuple[list[int], SamplingParams]

KINDS = [
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.95, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, logprobs=5),
    SamplingParams(temperature=1.2, constraint=EvenTokens()),
    SamplingParams(logit_bias=tuple((token, 0.01 * token) for token in range(1000, 2000))),
    SamplingParams(temperature=0.8, min_p=0.02, presence_penalty=0.8, frequency_penalty=0.3, logprobs=0),
    SamplingParams(min_tokens=8, stop_token_ids=frozenset(range(200, 264)), logit_bias=((210, 50.0),)),
    SamplingParams(temperature=1.3, frequency_penalty=0.9, constraint=EvenTokens(), logprobs=20),
    SamplingParams(),
]


def request(number: int) -> Request:
    draw = random.Random(number)
    prompt = [draw.randrange(100, 40_000) for _ in range(5 + 11 * (number % 7))]
    params = KINDS[number % len(KINDS)]
    length = 8 if params.stop_token_ids else 12 + number % 5
    return prompt, replace(params, max_tokens=length, stop_at_eos=False, seed=500 + number)


class BothSamplers:
    """Beside each draw of a runner that has special rows, the plain sampler's of the same logits."""

    def __init__(self, runner: Any, max_running: int, vocab_size: int) -> None:
        device = torch.device("cuda", 0)
        state = SamplingState(max_running=max_running, vocab_size=vocab_size, device=device)
        self._plain = Sampler(state)
        self._start_rows, self._draw = runner._start_rows, runner._draw
        runner._start_rows, runner._draw = self.start_rows, self.draw
        self.pairs: list[tuple[Sampled, Sampled]] = []

    def start_rows(self, starts: list[RowStart]) -> None:
        self._plain.start_rows(starts)
        self._start_rows(starts)

    def draw(
        self,
        logits: Tensor,
        rows: HostRows,
        ends: HostRows,
        there: tuple[Tensor, Tensor],
        masks: StepMasks | None,
    ) -> Sampled:
        expected = self._plain.sample(logits.clone(), rows, ends, masks)
        found = self._draw(logits, rows, ends, there, masks)
        self.pairs.append((found, expected))
        return found


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_all_kinds_of_rows_get_the_plain_samplers_tokens(
    gpu_engine: MakeEngine, gpu_model: LoadModel, dtype: torch.dtype
) -> None:
    """More requests than rows, so rows are used again by others; a step ahead; prompts beside decodes."""
    engine = gpu_engine(gpu_model("random:smollm2-135m", dtype), num_pages=512, max_running=24)
    both = BothSamplers(engine.runner, 24, engine.runner._config.vocab_size)
    engine.answer([request(number) for number in range(60)])
    assert len(both.pairs) > 30
    num_drawn, num_asked = 0, 0
    for found, expected in both.pairs:
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.is_finite.all()
        num_drawn += len(found.ids)
        assert found.logprob_indexes == expected.logprob_indexes
        if found.logprobs is None or expected.logprobs is None:
            assert found.logprobs is expected.logprobs
            continue
        num_asked += len(found.logprob_indexes)
        torch.testing.assert_close(found.logprobs.chosen, expected.logprobs.chosen, rtol=0, atol=1e-4)
        assert found.logprobs.ranks.tolist() == expected.logprobs.ranks.tolist()
        for i, count in enumerate(found.logprob_counts):  # of equals at the end torch leaves any
            ours, torchs = found.logprobs.top_values[i, :count], expected.logprobs.top_values[i, :count]
            torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-4)
    assert num_drawn > 500
    assert num_asked > 100
    assert "_sampler" not in engine.runner.__dict__, "the plain sampler drew some"


def test_special_rows_draw_the_same_alone_preempted_and_without_graphs(
    gpu_engine: MakeEngine, gpu_model: LoadModel
) -> None:
    """In fp32, since products of other batch sizes round otherwise, and bf16 shows that."""
    model = gpu_model("random:smollm2-135m", FP32)
    requests = [request(number) for number in range(18)]
    large = gpu_engine(model, num_pages=512).answer(requests)
    small = gpu_engine(model, num_pages=30).answer(requests)
    assert (large.preemptions, small.preemptions > 0) == (0, True)
    assert small.tokens == large.tokens
    assert gpu_engine(model, num_pages=512, capture=False).answer(requests).tokens == large.tokens
    engine = gpu_engine(model, num_pages=512)
    for number in range(9):
        assert engine.answer([requests[number]]).tokens == [large.tokens[number]], number


def test_neighbours_of_a_special_row_are_drawn_as_without_one(
    gpu_engine: MakeEngine, gpu_model: LoadModel
) -> None:
    """One special row of each kind beside six plain ones, whose draw then is no part of a graph."""
    engine = gpu_engine(gpu_model("random:smollm2-135m", FP32), num_pages=512)
    neighbours = [request(9 * number) for number in range(6)]
    expected = engine.answer(neighbours).tokens
    for number in range(1, 8):
        assert engine.answer([*neighbours, request(number)]).tokens[:6] == expected, KINDS[number]


def test_a_penalised_row_waits_for_no_compiler(
    gpu_engine: MakeEngine, gpu_model: LoadModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it needs was there at the start: the first such request is not slower than the second."""
    engine = gpu_engine(gpu_model("random:smollm2-135m", BF16), num_pages=512, max_running=16)
    engine.answer([request(0), request(9)])
    engine.runner.watch_compilers()
    engine.answer([request(number) for number in range(18)])
    late = [record.getMessage() for record in caplog.records if "compiled_late" in record.getMessage()]
    assert not late, late
