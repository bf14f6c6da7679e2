"""The torch runner on a tiny network: paged steps against the dense network, whole and in any company."""

import math
from array import array
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.backend import AttentionBackend
from kernels.cpu_backend import CpuBackend
from kernels.reference import ReferenceBackend, attention
from tests.toy_runners import sizes_for
from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.engine import EXIT_OK, Engine, EngineSettings
from worker.execution.runner import BrokenHandle, StepHandle
from worker.execution.torch_runner import NO_TOKEN_ID, TorchRunner
from worker.ids import PageId, Row, SequenceId
from worker.model.config import ModelConfig
from worker.model.layers import Operations, RotaryTable, TorchEmbedding, TorchLinear
from worker.model.llama import DecoderLayer, Model
from worker.model.rope import RopeConfig
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import NO_TOKEN
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import PageCopy, RowStart, Step, StepResult
from worker.status import first_board

CPU = torch.device("cpu")
VOCAB, CONTEXT, HEAD_DIM, HEADS, KV_HEADS, LAYERS = 96, 64, 16, 6, 2, 2
GREEDY = SamplingParams()


def tiny_model(embedding_rows: int = VOCAB) -> Model:
    draw = torch.Generator().manual_seed(0)
    hidden, inner = 64, 96

    def linear(outputs: int, inputs: int) -> TorchLinear:
        return TorchLinear(torch.randn(outputs, inputs, generator=draw) * 1.5 * inputs**-0.5, None)

    embedding = torch.randn(embedding_rows, hidden, generator=draw)
    config = ModelConfig(
        "LlamaForCausalLM",
        hidden,
        LAYERS,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        inner,
        VOCAB,
        embedding_rows,
        CONTEXT,
        1e-5,
        RopeConfig(),
        True,
    )
    layers = [
        DecoderLayer(
            attention_norm=torch.ones(hidden),
            qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, hidden),
            q_norm=None,
            k_norm=None,
            output=linear(hidden, HEADS * HEAD_DIM),
            mlp_norm=torch.ones(hidden),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
        )
        for _ in range(LAYERS)
    ]
    return Model(
        config,
        embedding=TorchEmbedding(embedding),
        layers=layers,
        norm=torch.ones(hidden),
        head=TorchLinear(embedding, None),
        rotary=RotaryTable(config.rope, HEAD_DIM, CONTEXT, CPU),
        operations=Operations(),
        num_parameters=0,
    )


MODEL = tiny_model()


def dense(token_ids: Sequence[int], model: Model = MODEL) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits of every position, and K and V of every layer: the network without pages."""
    positions, stored = torch.arange(len(token_ids)), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stored.append((k, v))
        return attention(q, k, v, positions, scale=HEAD_DIM**-0.5)

    return model.logits(model.forward(torch.tensor(token_ids), positions, attend)), stored


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(int(dense(token_ids)[0][-1].argmax()))
    return token_ids[len(prompt) :]


class Harness:
    """A runner, and the least bookkeeping that makes steps: pages are handed out upwards, never back."""

    def __init__(
        self,
        *,
        backend: AttentionBackend | None = None,
        page_size: int = 4,
        num_pages: int = 60,
        model: Model = MODEL,
        poison: bool = True,
    ) -> None:
        self.page_size = page_size
        config = sizes_for(
            MODEL.config,
            max_running=6,
            max_context=CONTEXT,
            num_pages=num_pages,
            page_size=page_size,
            poison=poison,
        )
        self.runner = TorchRunner(model, backend or ReferenceBackend(), config, CPU)
        self.pages: dict[int, list[int]] = {}
        self.next_page = 0
        self.number = 0

    def start(
        self,
        row: int,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt: int | None = None,
    ) -> RowStart:
        self.pages[row] = []
        count = len(token_ids) if num_prompt is None else num_prompt
        return RowStart(Row(row), SequenceId(row), 0, token_ids, count, params, frozenset())

    def step(
        self,
        spans: Sequence[tuple[int, int, int]],
        *,
        sampled: Sequence[int] | None = None,
        starts: Sequence[RowStart] = (),
        copies: Sequence[PageCopy] = (),
    ) -> Step:
        """spans: (row, first position, one past the last)."""
        new = [(row, index) for row, _, end in spans for index in self._missing(row, end)]
        for row, _ in new:
            self.pages[row].append(self.next_page)
            self.next_page += 1
        self.number += 1
        return Step(
            number=self.number,
            sequence_ids=[SequenceId(row) for row, _, _ in spans],
            rows=array("i", [row for row, _, _ in spans]),
            starts=array("i", [start for _, start, _ in spans]),
            ends=array("i", [end for _, _, end in spans]),
            sampled=list(range(len(spans))) if sampled is None else sampled,
            num_decode=sum(end - start == 1 for _, start, end in spans),
            row_starts=starts,
            page_copies=copies,
            new_page_rows=array("i", [row for row, _ in new]),
            new_page_indexes=array("i", [index for _, index in new]),
            new_page_ids=array("i", [self.pages[row][index] for row, index in new]),
        )

    def run(self, *args: Sequence[tuple[int, int, int]], **kwargs: object) -> StepResult:
        return self.runner.launch(self.step(*args, **kwargs)).result()  # type: ignore[arg-type]

    def decode(self, rows_and_lengths: dict[int, int], count: int) -> dict[int, list[int]]:
        """Tokens after those at rows_and_lengths[row] positions, whose last id is not computed yet."""
        out: dict[int, list[int]] = {row: [] for row in rows_and_lengths}
        for step in range(count):
            spans = [(row, n + step, n + step + 1) for row, n in rows_and_lengths.items()]
            for row, token in zip(out, self.run(spans).token_ids, strict=True):
                out[row].append(token)
        return out

    def _missing(self, row: int, end: int) -> range:
        return range(len(self.pages[row]), -(-end // self.page_size))


PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("backend", [ReferenceBackend, CpuBackend])
def test_paged_steps_give_the_dense_networks_tokens(
    page_size: int, backend: Callable[[], AttentionBackend]
) -> None:
    harness = Harness(backend=backend(), page_size=page_size)
    first = harness.run([(2, 0, 11)], starts=[harness.start(2, PROMPT)])
    rest = harness.decode({2: 11}, 8)[2]
    assert [*first.token_ids, *rest] == greedy(PROMPT, 9)


@pytest.mark.parametrize("chunk", [1, 2, 7, 11])
def test_only_the_last_chunk_samples(chunk: int) -> None:
    """B064: inner chunks give no token and no log-probability; every chunk size gives the same answer."""
    harness = Harness()
    params = SamplingParams(logprobs=2)
    starts = [harness.start(0, PROMPT, params)]
    for begin in range(0, 11, chunk):
        end = min(11, begin + chunk)
        result = harness.run([(0, begin, end)], sampled=[0] if end == 11 else [], starts=starts)
        starts = []
        assert len(result.token_ids) == len(result.logprobs) == (1 if end == 11 else 0)
    assert list(result.token_ids) == greedy(PROMPT, 1)
    expected = dense(PROMPT)[0][-1].log_softmax(0)
    assert result.logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)
    assert result.logprobs[0].rank == 1


@pytest.mark.parametrize("backend", [ReferenceBackend, CpuBackend])
def test_decode_and_prefill_share_a_step_without_showing(backend: Callable[[], AttentionBackend]) -> None:
    """B088: mixed rows, each as if alone, poison in every slot that nobody wrote."""
    harness = Harness(backend=backend())
    harness.run([(1, 0, 5)], starts=[harness.start(1, PROMPT[:5])])
    mixed = harness.run(
        [(1, 5, 6), (4, 0, 1), (0, 0, 11)], starts=[harness.start(0, PROMPT), harness.start(4, [7])]
    )
    assert mixed.token_ids[0] == greedy(PROMPT[:5], 2)[1]
    assert mixed.token_ids[1] == greedy([7], 1)[0]
    assert mixed.token_ids[2] == greedy(PROMPT, 1)[0]


def test_the_next_step_is_launched_before_this_ones_result_is_read() -> None:
    """M-04: the sampled id feeds the next step on the device; overlap changes nothing."""
    harness = Harness()
    handles = [harness.runner.launch(harness.step([(2, 0, 11)], starts=[harness.start(2, PROMPT)]))]
    for position in range(11, 16):
        handles.append(harness.runner.launch(harness.step([(2, position, position + 1)])))
    assert [handle.result().token_ids[0] for handle in handles] == greedy(PROMPT, 6)


def test_stored_k_and_v_are_those_of_a_fresh_forward() -> None:
    """B023: every slot whose token was computed, and no slot beyond: the last sampled token has none."""
    harness = Harness(page_size=1)
    first = harness.run([(0, 0, 4)], starts=[harness.start(0, PROMPT[:4])])
    second = harness.run([(0, 4, 5)])
    token_ids = [*PROMPT[:4], *first.token_ids, *second.token_ids]
    stored = dense(token_ids[:5])[1]
    slots = torch.tensor(harness.runner.read_rows([0], [5])[0])
    for kv, (k, v) in zip(harness.runner.kv_pool.layers, stored, strict=True):
        torch.testing.assert_close(kv.k[slots], k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kv.v[slots], v, atol=1e-5, rtol=1e-5)
    never_written = torch.ones(60, dtype=torch.bool).index_fill(0, slots, False)
    assert harness.runner.kv_pool.layers[0].k[:60][never_written].isnan().all()


def test_a_shared_page_serves_another_sequence() -> None:
    """A prefix hit: the second sequence's first page is the first one's, and only the rest is computed."""
    harness = Harness()
    harness.run([(0, 0, 11)], starts=[harness.start(0, PROMPT)])
    other = [*PROMPT[:8], 50, 51]
    start = harness.start(3, other)
    step = harness.step([(3, 8, 10)], starts=[start])
    shared = harness.pages[0][:2]
    fresh = step.new_page_ids[-1]
    step = Step(
        number=step.number,
        sequence_ids=step.sequence_ids,
        rows=step.rows,
        starts=step.starts,
        ends=step.ends,
        sampled=step.sampled,
        num_decode=0,
        row_starts=[start],
        new_page_rows=array("i", [3, 3, 3]),
        new_page_indexes=array("i", [0, 1, 2]),
        new_page_ids=array("i", [*shared, fresh]),
    )
    assert list(harness.runner.launch(step).result().token_ids) == greedy(other, 1)


def test_a_copied_page_is_read_and_its_source_kept() -> None:
    """H14: copy on divergence, before anything of the step is written."""
    harness = Harness()
    harness.run([(0, 0, 6)], starts=[harness.start(0, PROMPT[:6])])
    start = harness.start(1, [*PROMPT[:5], 77])
    harness.pages[1] = [harness.pages[0][0], 40]  # the second page diverges at position 5
    copy = PageCopy(PageId(harness.pages[0][1]), PageId(40))
    harness.number += 1
    step = Step(
        number=harness.number,
        sequence_ids=[SequenceId(1)],
        rows=array("i", [1]),
        starts=array("i", [5]),
        ends=array("i", [6]),
        sampled=[0],
        num_decode=1,
        row_starts=[start],
        page_copies=[copy],
        new_page_rows=array("i", [1, 1]),
        new_page_indexes=array("i", [0, 1]),
        new_page_ids=array("i", harness.pages[1]),
    )
    assert list(harness.runner.launch(step).result().token_ids) == greedy([*PROMPT[:5], 77], 1)
    assert harness.decode({0: 6}, 1)[0] == greedy(PROMPT[:6], 2)[1:]


def test_a_resumed_row_continues_as_if_never_stopped() -> None:
    """After a preemption: prompt and output come again, are recomputed, and the noise is the same."""
    params = SamplingParams(temperature=0.9, seed=11, presence_penalty=0.5, top_p=0.9)
    harness = Harness()
    first = harness.run([(0, 0, 11)], starts=[harness.start(0, PROMPT, params)])
    whole = [*first.token_ids, *harness.decode({0: 11}, 6)[0]]
    so_far = [*PROMPT, *whole[:3]]
    again = harness.run([(5, 0, 14)], starts=[harness.start(5, so_far, params, num_prompt=11)])
    assert [*again.token_ids, *harness.decode({5: 14}, 3)[5]] == whole[3:]


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("chunk", [2, 5, 11])
def test_prompt_logprobs_cover_the_prompt_once_whatever_the_chunks(chunk: int, count: int) -> None:
    harness = Harness()
    starts = [harness.start(0, PROMPT, SamplingParams(prompt_logprobs=count))]
    records = []
    for begin in range(0, 11, chunk):
        end = min(11, begin + chunk)
        result = harness.run([(0, begin, end)], sampled=[0] if end == 11 else [], starts=starts)
        starts = []
        assert len(result.prompt_logprobs.get(0, [])) == min(end, 10) - begin
        records += result.prompt_logprobs.get(0, [])
    expected = dense(PROMPT)[0].log_softmax(-1)
    assert len(records) == 10
    for position, record in enumerate(records):
        token = PROMPT[position + 1]
        assert record.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
        assert record.rank == 1 + int((expected[position] > expected[position, token]).sum())
        assert len(record.alternatives) == count
    assert not harness.run([(0, 11, 12)]).prompt_logprobs


class Hooked:
    """The tiny network, except that one token's hidden state is replaced at will."""

    def __init__(self) -> None:
        self.poison: tuple[int, float] | None = None  # index of the token in the step, value

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        hidden = MODEL.forward(input_ids, positions, attend)
        if self.poison is not None:
            hidden[self.poison[0], 5] = self.poison[1]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return MODEL.logits(hidden)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_of_nan_fails_alone(value: float) -> None:
    """B057: one request of four at step 3; the others go on as if nothing had been."""
    model = Hooked()
    harness = Harness(model=model)  # type: ignore[arg-type]
    prompts = {row: PROMPT[row : row + 5] for row in range(4)}
    first = harness.run(
        [(row, 0, 5) for row in range(4)], starts=[harness.start(row, ids) for row, ids in prompts.items()]
    )
    model.poison = (2, value)
    second = harness.run([(row, 5, 6) for row in range(4)])
    model.poison = None
    assert list(second.failed) == [2]
    assert "non-finite" in second.failed[2]
    assert second.token_ids[2] == NO_TOKEN_ID
    third = harness.run([(row, 6, 7) for row in (0, 1, 3)])
    for row, index in ((0, 0), (1, 1), (3, 2)):
        tokens = [first.token_ids[row], second.token_ids[row], third.token_ids[index]]
        assert tokens == greedy(prompts[row], 3)


def test_nan_in_an_inner_chunk_fails_before_its_pages_are_kept() -> None:
    """B057: a chunk samples nothing, and is reported all the same."""
    model = Hooked()
    harness = Harness(model=model)  # type: ignore[arg-type]
    model.poison = (1, math.nan)
    result = harness.run(
        [(0, 0, 4), (1, 0, 3)], sampled=[], starts=[harness.start(0, PROMPT), harness.start(1, PROMPT)]
    )
    assert list(result.failed) == [0]
    model.poison = (5, math.nan)
    result = harness.run([(0, 4, 8), (1, 3, 6)], sampled=[])
    assert list(result.failed) == [1]


class Breaking(Hooked):
    """Raises when told to."""

    breaks = False

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        if self.breaks:
            raise RuntimeError("out of memory")
        return super().forward(input_ids, positions, attend)


def test_what_the_device_raises_comes_from_the_handle_and_the_next_step_runs() -> None:
    """B102: launch itself never raises, and the runner is whole afterwards."""
    model = Breaking()
    harness = Harness(model=model)  # type: ignore[arg-type]
    harness.run([(0, 0, 5)], starts=[harness.start(0, PROMPT[:5])])
    model.breaks = True
    handle = harness.runner.launch(harness.step([(0, 5, 6)]))
    with pytest.raises(RuntimeError, match="out of memory"):
        handle.result()
    model.breaks = False
    assert harness.decode({0: 5}, 2)[0] == greedy(PROMPT[:5], 3)[1:]


def test_no_live_row_reaches_the_dummy_page_and_its_canary_stays() -> None:
    """S1-29: over a whole workload."""
    harness = Harness(page_size=4, num_pages=20)
    harness.run([(0, 0, 11), (1, 0, 3)], starts=[harness.start(0, PROMPT), harness.start(1, PROMPT[:3])])
    harness.decode({0: 11, 1: 3}, 20)
    assert max(max(row) for row in harness.runner.read_rows([0, 1], [31, 23])) < 80
    assert harness.runner.kv_pool.damaged_dummy_slots() == []


def test_embedding_rows_past_the_vocabulary_are_never_sampled() -> None:
    """B054: through the runner, for greedy and random rows."""
    model = tiny_model(embedding_rows=VOCAB + 32)
    model.embedding.weight[VOCAB:] *= 50  # type: ignore[attr-defined]
    harness = Harness(model=model)
    params = SamplingParams(temperature=5.0, seed=3)
    harness.run(
        [(0, 0, 5), (1, 0, 5)], starts=[harness.start(0, PROMPT[:5], params), harness.start(1, PROMPT[:5])]
    )
    tokens = harness.decode({0: 5, 1: 5}, 30)
    assert all(0 <= token < VOCAB for ids in tokens.values() for token in ids)


def test_a_closed_runner_lets_go_of_its_memory_and_closes_twice() -> None:
    harness = Harness()
    harness.runner.close()
    harness.runner.close()
    assert not hasattr(harness.runner, "kv_pool")


def test_a_runner_closes_on_a_device_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = Harness().runner
    monkeypatch.setattr(runner, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", failed)
    runner.close()
    assert not hasattr(runner, "kv_pool")


class HiccupRunner(TorchRunner):
    """One step raises once: before anything of it runs, or when all of it has run."""

    def break_step(self, number: int, *, behind: bool) -> None:
        self._broken, self._behind = number, behind

    def launch(self, step: Step) -> StepHandle:
        if step.number != self._broken:
            return super().launch(step)
        self._broken = -1
        if self._behind:
            super().launch(step).result()
        return BrokenHandle(RuntimeError("hiccup"))


def served(
    params: SamplingParams, *, overlap: bool, broken: int = -1, behind: bool = False
) -> list[list[int]]:
    """What an engine answers to three requests; step `broken` raises once."""
    config = Harness(page_size=4).runner._config
    runner = HiccupRunner(MODEL, ReferenceBackend(), config, CPU)
    runner.break_step(broken, behind=behind)
    scheduler = Scheduler(
        SchedulerConfig(
            CacheConfig(config.num_pages, 4), max_running=6, max_step_tokens=16, max_context_tokens=CONTEXT
        )
    )
    for number in (1, 2, 3):
        prompt = array("I", [*PROMPT, number])
        assert not scheduler.add(RequestSpec(SequenceId(number), prompt, params, source="s"), 0.0).message
    outputs: OutputQueue = OutputQueue(1000)
    pool = PoolDescription(config.num_pages, 4, 6, CONTEXT, "lru")
    model = ModelDescription("m", VOCAB, CONTEXT)
    board = first_board(WorkerDescription("w", 1, model, pool, 6, CONTEXT, 1, (), "", b""), 0.0)
    engine = Engine(
        scheduler,
        runner,
        EngineSettings(overlap=overlap),
        commands=CommandQueue(8),
        outputs=outputs,
        observations=Handover(1000),
        board=board,
        on_state=lambda: None,
    )
    engine.stop()  # what was accepted is finished
    assert engine.run() == EXIT_OK
    found: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for message in outputs.take(1000):
        columns = message.by_source["s"]
        for sequence_id, token in zip(columns.sequence_ids, columns.token_ids, strict=True):
            assert token != NO_TOKEN, "nobody ends but by its last token"
            found[sequence_id].append(token)
    outputs.close()
    return list(found.values())


@pytest.mark.parametrize("broken", range(2, 10))
def test_no_step_runs_behind_one_that_did_not(broken: int) -> None:
    """Its rows would lack the pages of that step: it would write K and V where others have theirs."""
    params = SamplingParams(max_tokens=14, stop_at_eos=False)
    assert served(params, overlap=True, broken=broken) == served(params, overlap=True)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_count_no_token_of_a_step_that_is_void(overlap: bool, behind: bool) -> None:
    """A step that raised runs again, and so does the one behind it, which had drawn already."""
    params = SamplingParams(
        max_tokens=14, frequency_penalty=0.7, presence_penalty=0.9, repetition_penalty=1.4, stop_at_eos=False
    )
    expected = served(params, overlap=overlap)
    assert [len(tokens) for tokens in expected] == [14, 14, 14]
    assert served(params, overlap=overlap, broken=7, behind=behind) == expected
