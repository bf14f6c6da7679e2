"""The runner for GPUs on CPU tensors: Triton's interpreter, no graphs, the real scheduler before it."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import re
from array import array
from collections import deque
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.reference import ReferenceBackend
from kernels.triton_backend import TritonBackend
from tests.letters import constraint
from tests.toy_runners import sizes_for
from worker.execution.cuda_runner import CudaRunner
from worker.execution.torch_runner import RunnerConfig, TorchRunner
from worker.ids import SequenceId
from worker.model.toy import toy_config, toy_model
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import NO_TOKEN
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE, MAX_RUNNING, CONTEXT = 24, 4, 5, 64
CONFIG = toy_config(has_qk_norm=True)
MODEL = toy_model(CONFIG)
REQUESTS = [
    SamplingParams(max_tokens=4, stop_at_eos=False),
    SamplingParams(max_tokens=3, stop_at_eos=False, temperature=0.9, seed=3),
    SamplingParams(max_tokens=4, stop_at_eos=False, temperature=1.3, top_k=7, top_p=0.9, seed=4),
    SamplingParams(max_tokens=2, stop_at_eos=False, frequency_penalty=1.5, logprobs=2),
]


CONSTRAINED = [
    SamplingParams(max_tokens=6, constraint=constraint("[a-c]{5}d[x-z]+")),
    SamplingParams(max_tokens=5, temperature=1.2, seed=8, constraint=constraint("(ab|cd|ef){3,9}")),
    SamplingParams(max_tokens=4, stop_at_eos=False, temperature=0.9, seed=3),
    SamplingParams(
        max_tokens=6, temperature=1.0, top_k=4, seed=9, constraint=constraint("q[r-t]{9}"), logprobs=1
    ),
]


def config() -> RunnerConfig:
    return sizes_for(
        CONFIG,
        max_running=MAX_RUNNING,
        max_context=CONTEXT,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        poison=True,
    )


def answers(
    runner: TorchRunner, *, overlap: bool, requests: list[SamplingParams] = REQUESTS
) -> dict[int, list[int]]:
    scheduler = Scheduler(
        SchedulerConfig(
            cache=CacheConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE),
            max_running=MAX_RUNNING,
            max_step_tokens=16,
            max_context_tokens=CONTEXT,
        )
    )
    for number, params in enumerate(requests):
        prompt = array("I", [(7 * number + 3 * i) % 50 + 1 for i in range(5 + 6 * number)])
        scheduler.add(RequestSpec(SequenceId(number + 1), prompt, params), 0.0)
    tokens: dict[int, list[int]] = {number + 1: [] for number in range(len(requests))}
    in_flight: deque = deque()
    for turn in range(60):
        step = scheduler.schedule(float(turn))
        if step is not None:
            in_flight.append((step, runner.launch(step)))
        while len(in_flight) > (1 if overlap and step is not None else 0):
            oldest, handle = in_flight.popleft()
            scheduler.commit(oldest, handle.result(), float(turn))
        for columns in scheduler.take_outputs().values():
            for sequence, token in zip(columns.sequence_ids, columns.token_ids, strict=True):
                if token != NO_TOKEN:
                    tokens[sequence].append(token)
        if not scheduler.has_work(float(turn)) and not in_flight:
            break
    assert [len(tokens[n + 1]) for n in range(len(requests))] == [p.max_tokens for p in requests]
    return tokens


def test_the_gpu_path_gives_the_plain_runners_tokens(monkeypatch):
    """M-24, M-25, B052: padded steps, plain rows beside special ones.

    Prompts run whole, alone and beside decodes.
    """
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    expected = answers(TorchRunner(MODEL, ReferenceBackend(), config(), CPU), overlap=False)
    runner = CudaRunner(MODEL, backend, replace(config(), max_step_tokens=16), CPU)
    ways = []
    for way in ("_run_whole", "_run_pieces"):
        run = getattr(runner.prompt_graphs, way)

        def noted(*step, way=way, run=run, **how):
            ways.append((way, bool(step[0].room) if way == "_run_whole" else None))
            return run(*step, **how)

        monkeypatch.setattr(runner.prompt_graphs, way, noted)
    assert answers(runner, overlap=True) == expected
    assert set(ways) == {("_run_whole", False), ("_run_whole", True)}


def test_constraints_hold_on_the_gpu_path_a_step_ahead():
    """With overlap a row's newest token is still on the device when its next step is launched."""
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    expected = answers(
        TorchRunner(MODEL, ReferenceBackend(), config(), CPU), overlap=False, requests=CONSTRAINED
    )
    runner = CudaRunner(MODEL, backend, config(), CPU)
    assert answers(runner, overlap=True, requests=CONSTRAINED) == expected
    runner.close()
    texts = ["".join(chr(87 + token) for token in expected[number]) for number in (1, 2, 4)]
    for text, pattern in zip(texts, ("[a-c]{5}d", "(ab|cd|ef){2}[ace]", "q[r-t]{5}"), strict=True):
        assert re.fullmatch(pattern, text), text


def test_steps_with_special_rows_still_replay_a_graph(monkeypatch):
    """One graph a size, up to the logits, captured with the first such step."""
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    graphs = CudaRunner(MODEL, backend, config(), CPU).graphs
    captured = []

    def capture(size, body, warm_ups):
        captured.append(size)
        graphs.prepare([], [], size)
        body()
        return RecordedGraph()

    monkeypatch.setattr(graphs, "_captures", True)
    monkeypatch.setattr(graphs, "_captured", capture)
    for rows in ([0, 1, 2], [0, 1, 2, 3], [2]):
        logits, (on_device, lens) = graphs.run_forward(rows, [3] * len(rows))
        assert (len(logits), on_device.tolist(), lens.tolist()) == (len(rows), rows, [3] * len(rows))
        assert logits.shape[1] >= CONFIG.vocab_size
    assert captured == [4, 1]
    assert [graphs._forward_graphs[size].replays for size in (4, 1)] == [2, 1]


@pytest.mark.parametrize("num_pages", [0, 1, 32, 33, 40])
def test_new_pages_of_a_decode_step_are_in_the_table_before_it(num_pages, monkeypatch):
    """S1-22: with the batch where they fit, by a scatter of their own where they do not."""
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    runner = CudaRunner(MODEL, backend, config(), CPU)
    assert runner.graphs.page_room == 32
    seen = []
    monkeypatch.setattr(
        runner.graphs, "body", lambda size, with_filters: seen.append(runner.page_table.slots.clone())
    )
    rows, indexes = [n % 5 for n in range(num_pages)], [n // 5 for n in range(num_pages)]
    pages = [(7 * n) % NUM_PAGES for n in range(num_pages)]
    expected = runner.page_table.slots.clone()
    for row, index, page in zip(rows, indexes, pages, strict=True):
        slots = torch.arange(PAGE_SIZE * page, PAGE_SIZE * (page + 1))
        expected[row, PAGE_SIZE * index : PAGE_SIZE * (index + 1)] = slots
    step = Step(
        number=1,
        sequence_ids=[SequenceId(1), SequenceId(2)],
        rows=array("i", [3, 1]),
        starts=array("i", [8, 2]),
        ends=array("i", [9, 3]),
        sampled=(0, 1),
        num_decode=2,
        new_page_rows=array("i", rows),
        new_page_indexes=array("i", indexes),
        new_page_ids=array("i", pages),
    )
    runner.launch(step).result()
    assert torch.equal(seen[0], expected)
    assert [column.tolist() for column in runner.graphs.columns(2)] == [[3, 1], [9, 3]]


def test_warm_steps_touch_the_dummy_row_and_the_dummy_page_alone():
    """S1-31: what runs before the first request leaves every page and every other row as it was."""
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    runner = CudaRunner(MODEL, backend, replace(config(), max_step_tokens=16), CPU)
    pages = runner.kv_pool.buffer[:, :, :NUM_PAGES].clone()
    steps = runner.warm_steps()
    assert {step.num_decode > 0 for step in steps} == {False, True}
    with torch.inference_mode():
        for step in steps[-1:]:
            runner._run_dummies(step)
        runner._draw_dummies()
    assert torch.equal(runner.kv_pool.buffer[:, :, :NUM_PAGES].isnan(), pages.isnan())
    assert runner.token_pool.ids[:MAX_RUNNING].count_nonzero() == 0
    assert runner.kv_pool.damaged_dummy_slots() == [0]


@pytest.mark.parametrize(("max_context", "longest"), [(50, 50), (64, 64), (200, 96)])
def test_warm_steps_stay_within_the_positions_of_the_model(max_context: int, longest: int) -> None:
    """Rows are of 64 or 96 entries: past the longest context the model's table of angles was read."""
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    sizes = replace(config(), max_context=max_context, max_step_tokens=128)
    runner = CudaRunner(MODEL, backend, sizes, CPU)
    assert runner.page_table.slots.shape[1] >= longest
    assert max(max(step.ends) for step in runner.warm_steps()) == longest


class RecordedGraph:
    """A graph that counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_batch_runs_in_the_graph_of_its_own_size(monkeypatch):
    """M-23, M-24: whatever was captured before, the same batch runs through the same graph."""
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    graphs = CudaRunner(MODEL, backend, config(), CPU).graphs
    assert graphs.sizes == [5, 4, 2, 1]
    captured = {}

    def capture(size, with_filters):
        assert (size, with_filters) not in captured, "captured twice"
        captured[size, with_filters] = graphs._graphs[size, with_filters] = RecordedGraph()

    monkeypatch.setattr(graphs, "_captures", True)
    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.capture_all()
    assert list(captured) == [(5, False), (4, False), (2, False), (1, False)]
    graphs.run([0, 1, 2, 3, 4], [3] * 5, with_filters=False)
    graphs.run([0, 1, 2], [4] * 3, with_filters=True)
    graphs.run([0, 1, 2], [4] * 3, with_filters=False)
    assert {key: graph.replays for key, graph in captured.items()} == {
        (5, False): 1,
        (4, False): 1,
        (2, False): 0,
        (1, False): 0,
        (4, True): 1,
    }
