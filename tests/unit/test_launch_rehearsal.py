"""Launches that are rehearsed, through Triton's interpreter: only the dummy row knows of them."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

from array import array
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.triton_backend import TritonBackend
from worker.execution.cuda_runner import CudaRunner
from worker.execution.torch_runner import RunnerConfig
from worker.execution.warm_steps import lone_prompt
from worker.ids import Row, SequenceId
from worker.model.toy import toy_config, toy_model
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart, Step

CONFIG = toy_config(has_qk_norm=True)
MODEL = toy_model(CONFIG)
PAGES, PAGE_SIZE, RUNNING, CONTEXT = 40, 4, 10, 64


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CudaRunner:
    return runner_of(monkeypatch)


def runner_of(monkeypatch: pytest.MonkeyPatch, *, num_pages: int = PAGES, largest: int = 16) -> CudaRunner:
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    monkeypatch.setattr("worker.execution.prompt_graphs.WHOLE_TOKENS", largest)
    config = RunnerConfig(
        max_running=RUNNING,
        max_context=CONTEXT,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_layers=CONFIG.num_layers,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        vocab_size=CONFIG.vocab_size,
        attention_scale=CONFIG.attention_scale,
        max_step_tokens=largest + 4,
    )
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    return CudaRunner(MODEL, backend, config, torch.device("cpu"))


def prompt(row: int, pages: list[int], length: int = 7) -> Step:
    ids = array("I", [(7 * row + 3 * at) % CONFIG.vocab_size for at in range(length)])
    params = SamplingParams(temperature=0.8, seed=5)
    start = RowStart(Row(row), SequenceId(row), 0, ids, length, params, frozenset())
    return lone_prompt(length, dummy_row=row, dummy_page=0, page_size=PAGE_SIZE)._replace(
        row_starts=(start,), new_page_ids=array("i", pages)
    )


def test_rows_tables_and_pages_of_others_are_as_before_and_the_next_answers_as_ever(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [list(runner.launch(prompt(*at)).result().token_ids) for at in ((2, [7, 3]), (5, [1, 9]))]
    outcomes = []
    run = runner.prompt_steps.run
    monkeypatch.setattr(
        runner.prompt_steps, "run", lambda *of, **how: outcomes.append(run(*of, **how)) or outcomes[-1]
    )
    slots, ids = runner.page_table.slots.clone(), runner.token_pool.ids.clone()
    columns = runner._columns.matrix.clone()
    layers = [(kv.k.clone(), kv.v.clone()) for kv in runner.kv_pool.layers]
    for length in (1, 9, 16):
        runner.rehearse(length)
        assert torch.equal(runner.page_table.slots[:RUNNING], slots[:RUNNING])
        assert torch.equal(runner.token_pool.ids[:RUNNING], ids[:RUNNING])
        assert torch.equal(runner._columns.matrix[:, :RUNNING], columns[:, :RUNNING])
        dummy = PAGES * PAGE_SIZE
        assert (runner.page_table.slots[RUNNING] >= dummy).all(), "its row has no page of anybody"
        for (k, v), kv in zip(layers, runner.kv_pool.layers, strict=True):
            assert torch.equal(kv.k, k)
            assert torch.equal(kv.v, v)
    again = [list(runner.launch(prompt(*at)).result().token_ids) for at in ((2, [7, 3]), (5, [1, 9]))]
    assert again == expected
    assert len(outcomes) == 2
    assert None not in outcomes, "the steps went another way than the one that was rehearsed"


def test_a_prompt_that_is_too_long_for_that_way_is_not_rehearsed(runner: CudaRunner) -> None:
    before = runner.page_table.slots.clone()
    runner.rehearse(17)
    assert torch.equal(runner.page_table.slots, before)


def test_where_the_tables_are_narrower_so_is_what_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is as wide as the pool has tokens: behind the dummy row's nothing is written."""
    runner = runner_of(monkeypatch, num_pages=3, largest=64)
    width = runner.page_table.slots.shape[1]
    assert width < 64 <= CONTEXT
    lengths = []
    rehearse = runner.prompt_steps.rehearse

    def note(step: Step, starts: Any) -> None:
        lengths.append((step.num_tokens, max(step.new_page_indexes) * PAGE_SIZE + PAGE_SIZE))
        rehearse(step, starts)

    monkeypatch.setattr(runner.prompt_steps, "rehearse", note)
    runner.rehearse(64)
    assert lengths == [(width, width)]
