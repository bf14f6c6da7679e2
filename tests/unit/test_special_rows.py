"""Rows that want more than a draw, by the GPU's kernels in Triton's interpreter: the plain sampler's answers.

Plain, penalised, biased, held, constrained and asking rows side by side, a step ahead, in rows used before,
after preemptions.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import math
from array import array
from collections import deque
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.reference import ReferenceBackend
from kernels.sample import make_scratch, sample
from kernels.sample_columns import SampleRow, make_columns, write_rows
from kernels.triton_backend import TritonBackend
from tests.letters import EOS, constraint
from tests.toy_runners import sizes_for
from worker.execution import special_rows
from worker.execution.constraint_masks import StepMasks
from worker.execution.cuda_runner import CudaRunner
from worker.execution.sampler import HostRows, Sampled, Sampler
from worker.execution.sampling_state import SamplingState
from worker.execution.special_rows import SpecialRows
from worker.execution.torch_runner import RunnerConfig, TorchRunner
from worker.ids import Row, SequenceId
from worker.model.toy import toy_config, toy_model
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import NO_TOKEN, OutputColumns
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import RowStart, TokenLogprob

CPU = torch.device("cpu")
PAGE_SIZE, MAX_RUNNING, CONTEXT = 4, 5, 64
CONFIG = toy_config(has_qk_norm=True)
MODEL = toy_model(CONFIG)


REQUESTS = [
    SamplingParams(max_tokens=5, stop_at_eos=False, temperature=0.9, seed=3),
    SamplingParams(
        max_tokens=5, stop_at_eos=False, temperature=1.1, top_k=9, top_p=0.9, seed=4, repetition_penalty=1.4
    ),
    SamplingParams(max_tokens=5, temperature=1.2, seed=8, constraint=constraint("(ab|cd|ef){3,9}")),
    SamplingParams(max_tokens=5, stop_at_eos=False, logprobs=3),
    SamplingParams(max_tokens=5, stop_at_eos=False, logit_bias=((5, 4.0), (17, 3.9), (6, -9.0)), seed=7),
    SamplingParams(max_tokens=5, min_tokens=3, logit_bias=((EOS, 50.0),), stop_token_ids=frozenset({20})),
    SamplingParams(max_tokens=5, stop_at_eos=False, presence_penalty=0.7, frequency_penalty=0.4, logprobs=0),
    SamplingParams(  # everything at once
        max_tokens=5,
        temperature=1.4,
        min_p=0.01,
        seed=11,
        frequency_penalty=0.9,
        logit_bias=((12, 2.0),),
        logprobs=2,
        constraint=constraint("q[a-z]{9}"),
    ),
    SamplingParams(max_tokens=5, stop_at_eos=False, temperature=1.0, min_p=0.02, seed=12),
    # Behind "ab" there is the end alone, and that is held back.
    SamplingParams(max_tokens=5, min_tokens=3, constraint=constraint("ab"), presence_penalty=0.2),
    SamplingParams(max_tokens=5, stop_at_eos=False, temperature=0.8, repetition_penalty=1.3, seed=14),
]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: str = ""


def config(num_pages: int) -> RunnerConfig:
    return sizes_for(
        CONFIG,
        max_running=MAX_RUNNING,
        max_context=CONTEXT,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
    )


def collect(answers: dict[int, Answer], columns: OutputColumns) -> None:
    for at, (sequence, token) in enumerate(zip(columns.sequence_ids, columns.token_ids, strict=True)):
        if token != NO_TOKEN:
            answers[sequence].tokens.append(token)
        if at in columns.logprobs:
            answers[sequence].logprobs.append(columns.logprobs[at])
    for end in columns.ends:
        answers[end.sequence_id].end = f"{end.code!r} {end.failure!r}"


def answers_of(runner: TorchRunner, num_pages: int, *, overlap: bool) -> tuple[dict[int, Answer], int]:
    """What each request got, and how often one was preempted."""
    scheduler = Scheduler(
        SchedulerConfig(
            cache=CacheConfig(num_pages=num_pages, page_size=PAGE_SIZE),
            max_running=MAX_RUNNING,
            max_step_tokens=16,
            max_context_tokens=CONTEXT,
            eos_token_ids=frozenset({EOS}),
            watermark_pages=0,
        )
    )
    for number, params in enumerate(REQUESTS):
        prompt = array("I", [(7 * number + 3 * i) % 50 + 1 for i in range(3 + 2 * (number % 5))])
        scheduler.add(RequestSpec(SequenceId(number + 1), prompt, params), 0.0)
    answers = {number + 1: Answer() for number in range(len(REQUESTS))}
    in_flight: deque = deque()
    for turn in range(120):
        step = scheduler.schedule(float(turn))
        if step is not None:
            in_flight.append((step, runner.launch(step)))
        while len(in_flight) > (1 if overlap and step is not None else 0):
            oldest, handle = in_flight.popleft()
            scheduler.commit(oldest, handle.result(), float(turn))
        for columns in scheduler.take_outputs().values():
            collect(answers, columns)
        if not scheduler.has_work(float(turn)) and not in_flight:
            break
    assert all(answer.end for answer in answers.values()), "some answer has no end"
    return answers, scheduler.counts().preemptions_total


def test_all_kinds_of_rows_side_by_side_get_the_plain_samplers_answers() -> None:
    """Eleven requests in five rows, so rows are used again by others; few pages, so some are preempted."""
    plain = TorchRunner(MODEL, ReferenceBackend(), config(40), CPU)
    expected, _ = answers_of(plain, 40, overlap=False)
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    runner = CudaRunner(MODEL, backend, config(13), CPU)
    found, preemptions = answers_of(runner, 13, overlap=True)
    runner.close()
    assert preemptions > 0
    for number, answer in expected.items():
        assert found[number].tokens == answer.tokens, REQUESTS[number - 1]
        assert found[number].end == answer.end
        assert_alike(found[number].logprobs, answer.logprobs)
    assert "CONSTRAINT_DEAD_END" in expected[10].end
    assert "_sampler" not in runner.__dict__, "the plain sampler drew some"


def assert_alike(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [each.rank for each in found] == [each.rank for each in expected]
    assert [each.logprob for each in found] == pytest.approx([e.logprob for e in expected], abs=1e-4)
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one.alternatives] == [token for token, _ in other.alternatives]
        assert [v for _, v in one.alternatives] == pytest.approx([v for _, v in other.alternatives], abs=1e-4)


# --- rows without a network ------------------------------------------------------------------------

VOCAB = 300


class Rows:
    """Rows of both samplers, all with choice 0 and the same history."""

    def __init__(self, max_running: int, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.columns = make_columns(max_running + 1, CPU)
        self.scratch = make_scratch(max_running, vocab_size, CPU)
        self.special = SpecialRows(max_running, vocab_size, CPU)
        self.state = SamplingState(max_running=max_running, vocab_size=vocab_size, device=CPU)
        self.plain = Sampler(self.state)

    def start(self, row: int, params: SamplingParams) -> None:
        starts = [RowStart(Row(row), SequenceId(row), 0, (1, 2, 2, 5, 6, 5), 3, params, frozenset({EOS}))]
        values = SampleRow(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
        write_rows(self.columns, [row], [values])
        self.special.start_rows(starts)
        self.plain.start_rows(starts)

    def check(
        self, logits: torch.Tensor, rows: list[int], end: int, masks: StepMasks | None = None
    ) -> Sampled:
        """Draws with both; the kernels' outcome, which is the plain sampler's."""
        on_host: HostRows = np.array(rows, np.int32)
        ends = np.full(len(rows), end, np.int32)
        expected = self.plain.sample(logits.clone(), on_host, ends, masks)
        if masks is not None:
            self.special.allow(on_host, masks)
        there = (torch.from_numpy(on_host), torch.from_numpy(ends))
        where = (*there, self.columns, self.scratch, self.vocab_size)
        drawn = sample(logits, *where, edits=self.special.edits)
        found = self.special.sampled(logits, on_host, there[0], *drawn)
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.is_finite.tolist() == expected.is_finite.tolist()
        assert found.logprob_indexes == expected.logprob_indexes
        assert found.logprob_counts == expected.logprob_counts
        if found.logprobs is not None and expected.logprobs is not None:
            counts = found.logprob_counts
            assert_alike(found.logprobs.on_the_way(counts)(), expected.logprobs.on_the_way(counts)())
        return found


def draw_logits(num_rows: int, seed: int, vocab_size: int = VOCAB) -> torch.Tensor:
    return 2.0 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def test_lines_are_made_when_asked_for_and_a_history_outlives_that_others_come() -> None:
    """Six of seven rows come one by one while those before them go on; one leaves its line to another."""
    rows, penalised = Rows(7), SamplingParams(temperature=1.0, presence_penalty=2.0, repetition_penalty=1.5)
    assert len(rows.special.edits.edited) == 0
    for count in range(1, 7):
        rows.start(count, penalised)
        rows.check(draw_logits(count, count), list(range(1, count + 1)), 6 + count)
    assert len(rows.special.edits.edited) == 7
    rows.start(3, SamplingParams(temperature=0.7))
    line = int(rows.special.edits.line[1])
    rows.start(1, penalised)  # another sequence of the same row
    assert rows.special.edits.line[[1, 3]].tolist() == [line, -1]
    rows.start(0, penalised)
    rows.check(draw_logits(7, 99), list(range(7)), 30)
    penalised_rows = [0, 1, 2, 4, 5, 6]
    counts = rows.special.edits.output_counts[rows.special.edits.line[penalised_rows]]
    assert torch.equal(counts, rows.state.history.output_counts(penalised_rows))
    assert sorted(rows.special.edits.line[:7].tolist()) == [-1, 0, 1, 2, 3, 4, 5]
    assert len(rows.special.edits.edited) == 7


def test_where_the_device_is_full_tables_stay_as_they_were_and_lines_are_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables of different sizes would be read past their ends."""
    rows, penalised = Rows(9), SamplingParams(temperature=1.0, presence_penalty=2.0, repetition_penalty=1.5)
    for row in range(4):
        rows.start(row, penalised)
    before = replace(rows.special.edits)
    new_full = torch.Tensor.new_full

    def full(table: torch.Tensor, shape: tuple[int, ...], fill: float) -> torch.Tensor:
        if table is rows.special.edits.in_prompt:
            raise torch.OutOfMemoryError("no more")
        return new_full(table, shape, fill)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_full", full)
        with pytest.raises(torch.OutOfMemoryError):
            rows.start(4, penalised)
    for each in fields(before):
        assert getattr(rows.special.edits, each.name) is getattr(before, each.name)
    assert not rows.special.has_any(np.array([4], np.int32))
    rows.start(4, penalised)
    rows.check(draw_logits(5, 1), list(range(5)), 7)


def test_who_is_special_is_known_while_they_are() -> None:
    rows, plain = Rows(4), SamplingParams()
    some, others = np.array([1, 2], np.int32), np.array([1, 3], np.int32)
    wishes = [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(logit_bias=((3, 1.0),)),
        SamplingParams(min_tokens=2),
        SamplingParams(logprobs=0),
        SamplingParams(constraint=constraint("a")),
    ]
    for params in wishes:
        rows.start(2, params)
        assert (rows.special.has_any(some), rows.special.has_any(others)) == (True, False)
        rows.start(2, plain)
        assert not rows.special.has_any(some)
        assert rows.special.edits.line.tolist() == [-1] * 5
    rows.start(2, SamplingParams(stop_token_ids=frozenset({4})))
    assert not rows.special.has_any(some), "stop tokens that may be drawn are no edit"


def test_lists_that_are_longer_than_the_tables_make_these_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other rows have in them stays; nobody needs another way for it."""
    monkeypatch.setattr(special_rows, "MAX_BIAS", 4)
    monkeypatch.setattr(special_rows, "MAX_STOPS", 2)
    monkeypatch.setattr(special_rows, "MAX_BEST", 2)
    rows = Rows(3)
    rows.start(0, SamplingParams(logit_bias=((7, 9.0),), min_tokens=9, stop_token_ids=frozenset({8})))
    many = tuple((token, 0.1 * token % 3.0) for token in range(9, 250))
    stops = frozenset(range(100, 140))
    rows.start(1, SamplingParams(logit_bias=many, min_tokens=9, stop_token_ids=stops, temperature=2.0))
    rows.start(2, SamplingParams(logprobs=20))
    for turn in range(3):
        ids = rows.check(draw_logits(3, turn), [0, 1, 2], 7 + turn).ids
        assert not stops & {int(ids[1])}
    edits = rows.special.edits
    assert (edits.bias_ids.shape[1], edits.bias_values.shape[1], edits.stop_ids.shape[1]) == (256, 256, 64)
    assert edits.bias_ids[edits.line[0], :2].tolist() == [7, -1]


def test_a_mask_is_of_one_step_and_one_row_and_takes_numbers_away_that_are_none() -> None:
    """B057: NaN and +inf at tokens that a constraint forbids do no harm; where they are allowed, or nothing
    is, the row is reported, its neighbours are not, and their histories go on.
    """
    rows, free = Rows(4), SamplingParams(temperature=1.0, frequency_penalty=1.0, logprobs=2)
    for row in range(4):
        rows.start(row, free if row == 3 else SamplingParams(seed=row, constraint=constraint("a")))
    words = np.zeros((3, 10), np.int32)
    words[0, 2], words[1, 3], words[2, 1] = 0b1010, -1, -(1 << 31)
    for turn in range(3):
        logits = draw_logits(4, turn)
        logits[0, [5, 299]] = torch.tensor([math.nan, math.inf])
        logits[1, 100] = math.nan
        mine = words.copy()
        mine[2] *= turn != 1
        found = rows.check(logits, [0, 1, 2, 3], 7 + turn, StepMasks([0, 1, 2], mine, {}))
        assert found.is_finite.tolist() == [True, False, turn != 1, True]
        assert int(found.ids[0]) in (65, 67)
        assert int(found.ids[2]) == (63 if turn != 1 else 0)
    rows.start(0, SamplingParams(logit_bias=((5, 99.0),)))  # with the line that had a mask
    assert rows.check(draw_logits(2, 9), [0, 3], 11).ids[0] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alternatives_are_the_best_and_of_equals_the_lowest_ids(dtype: torch.dtype) -> None:
    """Across the parts of a row, at their edges, with both zeros, and where fewer tokens are possible."""
    vocab = 9000
    rows = Rows(3, vocab)
    rows.start(0, SamplingParams(logprobs=2))  # of who had the row before
    for row, count in enumerate((5, 0, 32)):
        rows.start(row, SamplingParams(logprobs=count))
    logits = (draw_logits(3, 1, vocab) - 20.0).to(dtype)
    logits[0, [4095, 4096, 8999, 17, 8192, 300]] = 3.0
    logits[2] = -math.inf
    logits[2, [8000, 50, 4100, 60]] = torch.tensor([0.0, -0.0, 1.0, -2.0]).to(dtype)
    on_host, there = np.arange(3, dtype=np.int32), torch.arange(3, dtype=torch.int32)
    where = (there, torch.full_like(there, 7), rows.columns, rows.scratch, vocab)
    drawn = sample(logits, *where, edits=rows.special.edits)
    found = rows.special.sampled(logits, on_host, there, *drawn)
    assert found.logprobs is not None
    first, second, third = found.logprobs.on_the_way(found.logprob_counts)()
    assert [token for token, _ in first.alternatives] == [17, 300, 4095, 4096, 8192]
    assert (first.rank, second.alternatives) == (1, ())
    assert [token for token, _ in third.alternatives] == [4100, 50, 8000, 60]
    exact = logits.double().log_softmax(dim=-1)
    assert [value for _, value in third.alternatives] == pytest.approx(
        exact[2, [4100, 50, 8000, 60]].tolist()
    )
    assert third.alternatives[0][1] == third.logprob, "one number by two ways"
