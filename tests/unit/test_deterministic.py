"""`--deterministic`: a request's bits, log-probabilities included, do not depend on who else is served."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.invariant_backend import InvariantBackend
from kernels.invariant_matmul import invariant_matmul
from kernels.testing import PagedProblem, random_paged_problem
from tests import needs
from tests.toy_runners import sizes_for
from worker.config import ConfigError, WorkerConfig
from worker.execution.cuda_runner import CudaRunner
from worker.execution.logprobs import token_logprobs
from worker.execution.prompt_graphs import PromptGraphs
from worker.execution.sampler import Sampled, merged
from worker.ids import SequenceId
from worker.model.fused import FusedModel
from worker.model.invariant import invariant_linear
from worker.model.layers import Placement
from worker.model.parameters import parameter_shapes
from worker.model.random_weights import random_checkpoint
from worker.model.source import build_model
from worker.model.toy import toy_config
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import NO_TOKEN
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.torch_device import TorchDevice

CPU = torch.device("cpu")
Request = tuple[list[int], SamplingParams]
Answer = tuple[list[int], list[float]]  # tokens and their log-probabilities


@pytest.fixture(autouse=True)
def products_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are numpy's library's, where a row's bits depend on its place in the tile on
    processors without AVX-512. Sums in fp64, rounded once, do not; those of several turns are fp32's as ever.
    """

    def create_dot(self: Any, a: Any, b: Any, to: Any, *how: Any) -> Any:
        exact = np.matmul(a.data, b.data, dtype=np.float64)
        return TensorHandle(exact.astype(to.data.dtype) + to.data, to.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def test_a_row_of_a_product_has_the_same_bits_in_any_batch() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 100, generator=draw), torch.randn(130, 100, generator=draw)
    bias = torch.randn(130, generator=draw)
    whole = invariant_matmul(x, weight, bias)
    torch.testing.assert_close(whole, x @ weight.T + bias)
    for rows in (1, 33, 64):
        assert torch.equal(invariant_matmul(x[70 - rows :], weight, bias), whole[70 - rows :]), rows
    assert invariant_matmul(x[:0], weight).shape == (0, 130)


def attended(problem: PagedProblem, backend: InvariantBackend) -> torch.Tensor:
    backend.plan(problem.batch)
    return backend.run(problem.copy_of_kv(), problem.q, problem.k, problem.v, scale=problem.scale)


def test_a_token_has_the_same_bits_in_prefill_decode_and_a_graphs_decode() -> None:
    """The last token of each span, whether the span comes whole, or token by token among others."""
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    backend = InvariantBackend(4, 2)
    problem = random_paged_problem(q_lens=[70, 9], kv_lens=[100, 9], **shape)
    whole = attended(problem, backend)
    kv = problem.copy_of_kv()
    backend.plan(problem.batch)
    backend.run(kv, problem.q, problem.k, problem.v, scale=problem.scale)
    lasts = [69, 78]
    decode = backend.static_decode(problem.batch.page_table, 4)
    dummy = problem.batch.page_table.shape[0] - 1
    kv.k[-4:], kv.v[-4:] = 0.0, 0.0  # the dummy page, that padding reads
    decode.prepare(4, [9, 100])
    rows = torch.tensor([problem.batch.rows_host[1], problem.batch.rows_host[0], dummy, dummy]).int()
    decode.begin(rows, torch.tensor([9, 100, 1, 1], dtype=torch.int32))
    q = problem.q[[lasts[1], lasts[0], 0, 0]]
    ours = decode.attend(kv, q, scale=problem.scale)
    assert torch.equal(ours[:2], whole[[lasts[1], lasts[0]]])


def test_a_last_layer_for_some_tokens_leaves_them_the_bits_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone and beside another's: no other token of the step is seen in them."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    config = toy_config(has_qk_norm=True)
    model = build_model(
        config,
        random_checkpoint(parameter_shapes(config), 0),
        placement=Placement(CPU, torch.float32),
        linear_factory=invariant_linear,
    )
    shape = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    problem = random_paged_problem(q_lens=[1, 3, 2], kv_lens=[5, 3, 7], page_size=4, **shape)
    batch, inputs = (
        problem.batch,
        torch.randn(6, config.hidden_size, generator=torch.Generator().manual_seed(1)),
    )
    found = []
    for spans in (None, [0, 2], [1]):
        layers = [problem.copy_of_kv() for _ in model.layers]
        graphs = PromptGraphs(
            FusedModel(model),
            InvariantBackend(config.num_heads, config.num_kv_heads),
            layers,
            batch.page_table,
            max_tokens=8,
            dummy_slot=layers[0].k.shape[0] - 1,
            scale=problem.scale,
            capture=False,
        )
        last = problem.last_queries(spans) if spans is not None else None
        found.append(graphs.run(inputs.clone(), batch, last).clone())
    whole, two, one = found
    assert torch.equal(two[[0, 5]], whole[[0, 5]])
    assert torch.equal(one[3], whole[3])
    assert not torch.equal(one[5], whole[5]), "it is not read, so it is not computed"


def answers(runner: Any, page_size: int, requests: Sequence[Request], max_step_tokens: int) -> list[Answer]:
    """Through the scheduler, step by step."""
    scheduler = Scheduler(
        SchedulerConfig(
            cache=CacheConfig(num_pages=48, page_size=page_size),
            max_running=6,
            max_step_tokens=max_step_tokens,
            max_context_tokens=64,
        )
    )
    for number, (prompt, params) in enumerate(requests):
        scheduler.add(RequestSpec(SequenceId(number + 1), array("I", prompt), params), 0.0)
    found: list[Answer] = [([], []) for _ in requests]
    for turn in range(200):
        step = scheduler.schedule(float(turn))
        if step is not None:
            scheduler.commit(step, runner.launch(step).result(), float(turn))
        for columns in scheduler.take_outputs().values():
            for at, (number, token) in enumerate(zip(columns.sequence_ids, columns.token_ids, strict=True)):
                if token != NO_TOKEN:
                    found[number - 1][0].append(token)
                    found[number - 1][1].append(columns.logprobs[at].logprob if at in columns.logprobs else 0)
        if not scheduler.has_work(float(turn)):
            break
    assert [len(tokens) for tokens, _ in found] == [params.max_tokens for _, params in requests]
    return found


def requests_of(count: int, max_tokens: int) -> list[Request]:
    kinds = [
        {"logprobs": 1},
        {"temperature": 0.9},
        {"temperature": 0.8, "frequency_penalty": 0.7, "logprobs": 0},
        {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "logprobs": 3},
    ]
    return [
        (
            [(7 * n + 3 * i) % 250 + 1 for i in range(4 + 5 * n)],
            SamplingParams(max_tokens=max_tokens, stop_at_eos=False, seed=n, **kinds[n % 4]),  # type: ignore[arg-type]
        )
        for n in range(count)
    ]


def test_the_gpu_path_answers_alike_alone_and_in_company() -> None:
    """M-24: through the interpreter: products, attention, and rows of both samplers in one step."""
    config = toy_config()
    model = build_model(
        config,
        random_checkpoint(parameter_shapes(config), 0),
        placement=Placement(CPU, torch.float32),
        linear_factory=invariant_linear,
    )
    sizes = sizes_for(
        config,
        max_running=6,
        max_context=64,
        num_pages=48,
        page_size=4,
    )
    runner = CudaRunner(model, InvariantBackend(config.num_heads, config.num_kv_heads), sizes, CPU)
    asked = requests_of(3, 2)[1:]
    together = answers(runner, 4, asked, 64)
    assert answers(runner, 4, asked[1:], 64) == together[1:]


@needs.COMPILER
def test_the_cpu_path_answers_alike_alone_in_company_and_in_other_chunks() -> None:
    """The default of a processor keeps the promise as it is: it costs nothing there."""
    config = WorkerConfig(
        model="random:tiny", page_size=4, num_pages=48, max_running=6, threads=1, deterministic=True
    )
    runner: Any = TorchDevice().build(config.resolved(model_context=64, automatic_pages=48))
    asked = requests_of(6, 8)
    together = answers(runner, 4, asked, 128)
    assert answers(runner, 4, asked, 9) == together
    for number in range(6):
        assert answers(runner, 4, asked[number : number + 1], 128) == together[number : number + 1]
    runner.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"dtype": "bf16"}, "fp32"), ({"attention_backend": "reference"}, "reference")],
)
def test_what_does_not_keep_the_promise_is_refused(changes: dict[str, str], named: str) -> None:
    config = WorkerConfig(model="random:tiny", page_size=4, num_pages=48, deterministic=True, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"deterministic.*{named}"):
        TorchDevice().build(config.resolved(model_context=64, automatic_pages=48))


def test_outcomes_of_single_rows_are_joined_in_order() -> None:
    """Rows with other numbers of alternatives, and rows that asked for none."""
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    ids = logits.argmax(dim=1)
    parts = [
        Sampled(ids[:1], torch.tensor([True]), [], [], None),
        Sampled(ids[1:2], torch.tensor([False]), [0], [2], token_logprobs(logits[1:2], ids[1:2], 2)),
        Sampled(ids[2:], torch.tensor([True]), [0], [0], token_logprobs(logits[2:], ids[2:], 0)),
    ]
    whole = merged(parts)
    assert whole.ids.tolist() == ids.tolist()
    assert whole.is_finite.tolist() == [True, False, True]
    assert (whole.logprob_indexes, whole.logprob_counts) == ([1, 2], [2, 0])
    assert whole.logprobs is not None
    records = whole.logprobs.on_the_way(whole.logprob_counts)()
    assert [len(record.alternatives) for record in records] == [2, 0]
    assert records[0].alternatives[0][0] == int(ids[1])
