"""Steps of a few short prompts by one message: the tokens, tables and pages that the other way leaves."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.static_prefill import MAX_SPANS
from worker.execution.step_buffers import DEPTH
from worker.model.llama import Model
from worker.scheduling.sampling import SamplingParams

pytestmark = pytest.mark.gpu
PAGES = 256
LoadModel = Callable[[str | Path, torch.dtype], Model]
Prompts = list[tuple[list[int], SamplingParams]]


def prompts(draw: random.Random, lengths: list[int], *, with_filters: bool = False) -> Prompts:
    how: dict[str, Any] = {"top_k": 40, "top_p": 0.95} if with_filters else {}
    return [
        (
            [draw.randrange(4, 250) for _ in range(length)],
            SamplingParams(
                temperature=0.8, seed=draw.randrange(1 << 40), max_tokens=5, stop_at_eos=False, **how
            ),
        )
        for length in lengths
    ]


def batches(seed: int) -> list[Prompts]:
    """One prompt of many lengths, and several at once, up to more than one message holds."""
    draw = random.Random(seed)
    alone = [
        prompts(draw, [length]) for length in (1, 2, 16, 63, 64, 65, 100, 511, 512, 513, 1000, 1024, 1025)
    ]
    some = [prompts(draw, [draw.randrange(1, 120) for _ in range(count)]) for count in (2, 3, 5, MAX_SPANS)]
    more = [prompts(draw, [20] * (MAX_SPANS + 3)), prompts(draw, [9, 300], with_filters=True)]
    return [*alone, *some, *more]


def test_a_message_leaves_the_bits_of_the_other_way(
    gpu_engine: Callable[..., Any], gpu_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H9: also where messages are written while the device is behind. One test: engines take long to make."""
    monkeypatch.setattr("worker.execution.prompt_graphs.token_sizes", lambda most: [64, 128, 512, 1024, most])
    model = gpu_model("random:tiny", torch.bfloat16)
    size = {"num_pages": PAGES, "max_running": 16, "max_context": 1200, "max_step_tokens": 1100}
    found, other = gpu_engine(model, **size), gpu_engine(model, **size)
    for layer in (*found.runner.kv_pool.layers, *other.runner.kv_pool.layers):
        layer.k.zero_()  # slots that nobody writes hold anything
        layer.v.zero_()
    ways = [0, 0]
    run = found.runner.prompt_steps.run

    def counted(*step: Any, **how: Any) -> Any:
        outcome = run(*step, **how)
        ways[outcome is not None] += 1
        return outcome

    found.runner.prompt_steps.run = counted
    other.runner.prompt_steps.run = lambda *step, **how: None
    for batch in batches(3):
        assert found.answer(batch).tokens == other.answer(batch).tokens
        for left, right in zip(state_of(found), state_of(other), strict=True):
            assert torch.equal(left, right)
    assert ways[True] >= 15, "prompts of up to 1,024 tokens and up to eight at once"
    assert ways[False] >= 2, "more tokens or spans than a message holds"
    draw = random.Random(8)
    requests = prompts(draw, [draw.randrange(1, 60) for _ in range(6 * DEPTH)])
    expected = found.answer(requests).tokens
    launch = found.runner.launch

    def behind(step: Any) -> Any:
        torch.cuda._sleep(draw.choice([0, 200_000]))  # type: ignore[no-untyped-call]
        return launch(step)

    found.runner.launch = behind
    for _ in range(3):
        assert found.answer(requests).tokens == expected


def state_of(engine: Any) -> list[torch.Tensor]:
    """Tables, columns, and K and V of all pages but the dummy one."""
    runner, slots = engine.runner, PAGES * 16
    layers = [part[:slots] for layer in runner.kv_pool.layers for part in (layer.k, layer.v)]
    return [runner.page_table.slots, runner.token_pool.ids, runner._columns.matrix, *layers]
