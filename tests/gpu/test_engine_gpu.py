"""Whole answers on the GPU: the fp32 CPU network's tokens, and the same ones whatever runs beside them."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import reference
from kvatlas.models.resolve import resolve_model
from worker.model.llama import Model
from worker.model.source import load_model
from worker.scheduling.sampling import SamplingParams

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "right.json"
BF16, FP32 = torch.bfloat16, torch.float32
MIN_GAP = {FP32: 2e-3, BF16: 0.5}
"""Best less second logit, in fp32, from which a token must be the CPU's. bf16 logits lie 0.125 apart."""

Engine = Any  # tests/gpu/conftest.py
MakeEngine = Callable[..., Engine]
LoadModel = Callable[[str | Path, torch.dtype], Model]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_at_eos=False)


def drawn(number: int, max_tokens: int) -> SamplingParams:
    """Parameters as different as rows of one batch can be; every one has its own seed."""
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.95),
        SamplingParams(temperature=1.2, min_p=0.05),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.2),
    ]
    return replace(kinds[number % 4], max_tokens=max_tokens, stop_at_eos=False, seed=1000 + number)


def words(number: int, length: int) -> list[int]:
    """Ids of a prompt."""
    draw = random.Random(number)
    return [draw.randrange(100, 40_000) for _ in range(length)]


# --- the CPU's answers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gaps(model_path: Path) -> dict[str, list[float]]:
    """Of each recorded answer: best less second logit at every token, by the plain network in fp32."""
    model = load_model(resolve_model(str(model_path)), device="cpu", dtype=FP32, max_context=2048)
    found = {}
    with torch.inference_mode():
        for entry in json.loads(GOLDEN.read_text())["prompts"]:
            found[entry["name"]] = gaps_of(model, entry["prompt_ids"], entry["tokens"])
    return found


def gaps_of(model: Model, prompt: list[int], tokens: list[int]) -> list[float]:
    ids = torch.tensor(prompt + tokens[:-1])
    positions = torch.arange(len(ids))
    attend = partial(reference.attention, positions=positions, scale=model.config.attention_scale)
    hidden = model.forward(ids, positions, lambda layer, q, k, v: attend(q, k, v))
    best = model.logits(hidden[len(prompt) - 1 :]).topk(2)
    assert best.indices[:, 0].tolist() == tokens, "the recorded answers are not this network's"
    values: list[float] = (best.values[:, 0] - best.values[:, 1]).tolist()
    return values


def segments(gaps: list[float], min_gap: float) -> Iterator[tuple[int, int]]:
    """Runs [first, end) of tokens that must be right, each given what was before it."""
    first = 0
    for at, gap in enumerate([*gaps, 0.0]):
        if gap < min_gap:
            if at > first:
                yield first, at
            first = at + 1


@pytest.mark.model
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_greedy_answers_equal_those_of_the_cpu(
    model_path: Path, gaps: dict[str, list[float]], gpu_engine: MakeEngine, gpu_model: LoadModel, dtype
) -> None:
    """The embedded model's real weights, 20 prompts; all at once, and one by one.

    Where the CPU's best two logits are closer than the dtype can tell apart, a run starts anew from the
    CPU's own token: so every other token is compared, and none depends on a tie.
    """
    asked, expected = [], []
    entries = json.loads(GOLDEN.read_text())["prompts"]
    for entry in entries:
        for first, end in segments(gaps[entry["name"]], MIN_GAP[dtype]):
            asked.append((entry["prompt_ids"] + entry["tokens"][:first], greedy(end - first)))
            expected.append(entry["tokens"][first:end])
    num_tokens = sum(len(entry["tokens"]) for entry in entries)
    compared = sum(map(len, expected))
    assert compared >= (num_tokens if dtype == FP32 else 0.6 * num_tokens), f"only {compared} are compared"
    engine = gpu_engine(gpu_model(model_path, dtype), num_pages=4096, max_step_tokens=4096)
    assert engine.answer(asked).tokens == expected
    alone = [engine.answer([request]).tokens[0] for request in asked[:24]]
    assert alone == expected[:24]


# --- the same tokens, whatever runs beside, before or instead --------------------------------------


@pytest.mark.model
def test_a_seed_draws_the_same_tokens_alone_and_among_63_others(
    model_path: Path, gpu_engine: MakeEngine, gpu_model: LoadModel
) -> None:
    """In fp32, since products of other batch sizes round otherwise, and bf16 shows that."""
    requests = [(words(number, 5 + 7 * number), drawn(number, 32)) for number in range(64)]
    engine = gpu_engine(gpu_model(model_path, FP32), num_pages=2048)
    together = engine.answer(requests).tokens
    assert len({tuple(tokens) for tokens in together}) == 64
    for number in range(0, 64, 3):
        assert engine.answer([requests[number]]).tokens == [together[number]], number


@pytest.mark.model
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_graphs_on_and_off_give_the_same_tokens(
    model_path: Path, gpu_engine: MakeEngine, gpu_model: LoadModel, dtype
) -> None:
    """A replay is the very launches that were recorded: equal bits, for greedy and for drawn tokens."""
    requests = [
        (words(number, 3 + 31 * number), drawn(number, 24) if number % 2 else greedy(24 + number))
        for number in range(21)
    ]
    model = gpu_model(model_path, dtype)
    on = gpu_engine(model, num_pages=2048, max_running=32)
    off = gpu_engine(model, num_pages=2048, max_running=32, capture=False)
    expected = off.answer(requests).tokens
    assert on.answer(requests).tokens == expected
    assert on.answer(requests, overlap=False).tokens == expected
    assert on.runner.graphs.replays > 20
    assert off.runner.graphs.replays == 0


@pytest.mark.model
def test_preempted_sequences_give_the_tokens_of_undisturbed_ones(
    model_path: Path, gpu_engine: MakeEngine, gpu_model: LoadModel
) -> None:
    """B009: a pool that holds less than half of what runs; recomputed K and V, the same noise."""
    requests = [
        (words(number, 20 + 5 * number), drawn(number, 60) if number % 2 else greedy(60))
        for number in range(16)
    ]
    model = gpu_model(model_path, FP32)
    large = gpu_engine(model, num_pages=1024).answer(requests)
    small = gpu_engine(model, num_pages=50).answer(requests)
    assert large.preemptions == 0
    assert small.preemptions >= 5
    assert small.tokens == large.tokens


# --- padding ---------------------------------------------------------------------------------------


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Lengths that are no multiples of a page; answers of other lengths, so the batch shrinks to one."""
    return [(words(n, 1 + 13 * n), drawn(n, 8 + 9 * n) if n % 2 else greedy(8 + 9 * n)) for n in range(9)]


@pytest.mark.parametrize("capture", [True, False], ids=["graphs", "eager"])
def test_nan_in_the_dummy_page_and_in_unused_slots_changes_nothing(
    gpu_engine: MakeEngine, gpu_model: LoadModel, capture: bool
) -> None:
    """B080, H12: padding reads the dummy page, masked lanes read past a sequence's end."""
    model = gpu_model("random:smollm2-135m", BF16)
    engine = gpu_engine(model, num_pages=256, max_running=16, capture=capture)
    pool = engine.runner.kv_pool.buffer
    pool.zero_()
    expected = engine.answer(mixed_requests()).tokens
    pool.fill_(float("nan"))
    assert engine.answer(mixed_requests()).tokens == expected
    assert pool[:, :, :256].isfinite().any()
    assert pool[:, :, 200:256].isnan().all()


def test_a_padded_replay_writes_its_own_slots_and_the_dummy_page_alone(
    gpu_engine: MakeEngine, gpu_model: LoadModel
) -> None:
    """B079: five rows in a graph of eight; every other slot of the pool keeps its bits."""
    engine = gpu_engine(gpu_model("random:smollm2-135m", BF16), num_pages=32, max_running=8)
    runner = engine.runner
    runner.kv_pool.buffer.normal_()
    before = runner.kv_pool.buffer.clone()
    rows, lens = [0, 2, 3, 5, 7], [1, 16, 17, 32, 40]
    slots = torch.arange(5 * 48, dtype=torch.int32, device="cuda").view(5, 48)
    runner.page_table.slots[rows, :48] = slots
    with torch.inference_mode():
        runner.graphs.run(rows, lens, with_filters=False)
    torch.cuda.synchronize()
    changed = (runner.kv_pool.buffer != before).any(dim=(0, 1)).flatten(0, 1).any(dim=(1, 2)).nonzero()
    expected = {48 * i + length - 1 for i, length in enumerate(lens)}
    dummy = set(range(32 * 16, 33 * 16))
    assert runner.graphs.replays == 1
    assert set(changed.flatten().tolist()) - dummy == expected


def test_a_small_batch_after_a_full_one_reads_nothing_of_it(
    gpu_engine: MakeEngine, gpu_model: LoadModel
) -> None:
    """B081: rows, lengths, chunk lists and merge counters of the larger replay are gone."""
    model = gpu_model("random:smollm2-135m", BF16)
    alone = [(words(99, 700), greedy(40))]
    engine = gpu_engine(model, num_pages=2048, max_running=64)
    expected = engine.answer(alone).tokens
    engine.answer([(words(n, 600 + n), drawn(n, 20)) for n in range(64)])
    assert engine.answer(alone).tokens == expected


def test_a_full_pool_still_decodes_through_graphs(gpu_engine: MakeEngine, gpu_model: LoadModel) -> None:
    """B082: the dummy page is there from the start, so padding needs no free page."""
    model = gpu_model("random:smollm2-135m", BF16)
    engine = gpu_engine(model, num_pages=30, max_running=16, max_context=160)
    outcome = engine.answer([(words(n, 60), greedy(90)) for n in range(3)])
    assert outcome.pages == set(range(30))
    assert engine.runner.graphs.replays >= 80


# --- a large pool ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pool_of_100_gb_is_right_at_its_last_page(gpu_engine: MakeEngine, gpu_model: LoadModel) -> None:
    """B084: 4.3 million slots of the embedded model's shape; all but the last pages are held."""
    free, _ = torch.cuda.mem_get_info()
    model = gpu_model("random:smollm2-135m", BF16)
    num_pages, page_bytes = 271_300, 16 * 23_040
    if free < num_pages * page_bytes + 8e9:
        pytest.skip(f"needs 108 GB of free memory, there are {free / 1e9:.0f}")
    requests = [(words(n, 30 + 40 * n), drawn(n, 40) if n % 2 else greedy(40)) for n in range(8)]
    expected = gpu_engine(model, num_pages=256).answer(requests)
    engine = gpu_engine(model, num_pages=num_pages)
    assert engine.runner.kv_pool.num_bytes > 100e9
    assert engine.runner.kv_pool.num_slots > 4_000_000
    left = len(expected.pages)  # as many as these requests touch, so the last one is among them
    outcome = engine.answer(requests, held_pages=num_pages - left)
    assert outcome.tokens == expected.tokens
    assert outcome.pages == set(range(num_pages - left, num_pages))
