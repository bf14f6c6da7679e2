"""Constraints in steps: every output satisfies its own, alone or in company, however it is interrupted."""

import json
import math
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvatlas.constraints.compiler import Compiled, Compiler, TokenTable
from kvatlas.constraints.text import ConstraintText
from kvatlas.models.text_vocabulary import toy_vocabulary
from tests import needs
from worker.config import WorkerConfig
from worker.devices import choose_device
from worker.execution.constraint_masks import ConstraintMasks
from worker.execution.fake_runner import FakeModel, answer_alone
from worker.execution.logprobs import token_logprobs
from worker.execution.runner import Runner
from worker.execution.sampler import Sampler, unpacked
from worker.execution.sampling_state import SamplingState
from worker.execution.testing import Harness, small_config
from worker.execution.torch_runner import NO_TOKEN_ID
from worker.ids import Row, SequenceId
from worker.isolation import run_span_by_span
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import FailureReason, FinishCode
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import RowStart, Step

SIZE, EOS = 512, 257
TABLE = TokenTable.of(toy_vocabulary(SIZE), {EOS})
COMPILER = Compiler(lambda: TABLE, SIZE)
MODEL = FakeModel(SIZE, (EOS,))
CPU = torch.device("cpu")


def compiled(pattern: str) -> Compiled:
    return COMPILER.compile(ConstraintText("regex", pattern))


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TABLE.tokens[token] for token in tokens if token != EOS).decode()


class Ids:
    """Ids of a step that come when they are let go."""

    def __init__(self, *ids: int) -> None:
        self._ids = np.array(ids)
        self.gate = threading.Event()

    def arrived(self) -> NDArray[np.int64]:
        assert self.gate.wait(60)
        return self._ids


def here(*ids: int) -> Ids:
    arrived = Ids(*ids)
    arrived.gate.set()
    return arrived


def row_start(
    row: int, constraint: Compiled | None, tokens: Sequence[int] = (1, 2), prompt: int = 2
) -> RowStart:
    params = SamplingParams(constraint=constraint)
    return RowStart(Row(row), SequenceId(row), 0, tokens, prompt, params, frozenset({EOS}))


def allowed(masks: ConstraintMasks, rows: list[int], ends: list[int]) -> dict[int, str]:
    """First byte of what each constrained row may put out, by index."""
    pending = masks.begin(rows, ends)
    assert pending is not None
    found = pending.result()
    bits = unpacked(torch.from_numpy(found.words), SIZE)
    return {
        index: "".join(
            sorted({chr(t) if t < 256 else "$" for t in line.nonzero()[:, 0].tolist() if t <= EOS})
        )
        for index, line in zip(found.indexes, bits, strict=True)
    }


@pytest.fixture
def masks() -> Iterator[ConstraintMasks]:
    made = ConstraintMasks(SIZE)
    yield made
    made.close()


def test_only_rows_with_a_constraint_are_masked(masks: ConstraintMasks) -> None:
    masks.start_rows([row_start(0, None), row_start(1, compiled("ab"))])
    assert allowed(masks, [0, 1], [2, 2]) == {1: "a"}
    assert masks.begin([0], [2]) is None


def test_the_mask_waits_for_the_token_of_the_step_before_and_the_caller_does_not(
    masks: ConstraintMasks,
) -> None:
    masks.start_rows([row_start(0, compiled("ab"))])
    assert allowed(masks, [0], [2]) == {0: "a"}
    newest = Ids(ord("a"))
    masks.sampled([0], [2], newest)
    pending = masks.begin([0], [3])
    assert pending is not None
    assert not pending.parts[0].is_set()
    newest.gate.set()
    line = pending.result().words
    assert unpacked(torch.from_numpy(line), SIZE)[0].nonzero()[0, 0] == ord("b")


def test_a_row_goes_on_behind_the_output_it_entered_with(masks: ConstraintMasks) -> None:
    tokens = [1, 2, ord("a"), ord("b")]
    masks.start_rows([row_start(0, compiled("ab[cd]"), tokens)])
    assert allowed(masks, [0], [4]) == {0: "cd"}


def test_a_row_that_gets_another_sequence_forgets_the_first(masks: ConstraintMasks) -> None:
    masks.start_rows([row_start(0, compiled("ab"))])
    masks.sampled([0], [2], here(ord("a")))
    masks.start_rows([row_start(0, compiled("xy"))])
    assert allowed(masks, [0], [2]) == {0: "x"}
    masks.start_rows([row_start(0, None)])
    assert masks.begin([0], [2]) is None


def test_a_step_that_is_run_once_more_gives_the_same_mask(masks: ConstraintMasks) -> None:
    masks.start_rows([row_start(0, compiled("a[bc]d"))])
    masks.begin([0], [2]).result()  # type: ignore[union-attr]
    masks.sampled([0], [2], here(ord("a")))
    first = allowed(masks, [0], [3])
    masks.sampled([0], [3], here(ord("b")))
    assert allowed(masks, [0], [4]) == {0: "d"}
    assert allowed(masks, [0], [3]) == first == {0: "bc"}


def test_many_rows_are_split_over_threads_and_come_back_in_order(masks: ConstraintMasks) -> None:
    letters = [chr(ord("a") + number) for number in range(20)]
    masks.start_rows([row_start(number, compiled(letter)) for number, letter in enumerate(letters)])
    rows = list(reversed(range(20)))
    assert allowed(masks, rows, [2] * 20) == {at: letters[row] for at, row in enumerate(rows)}
    masks.close()
    masks.close()


def test_a_dead_end_is_one_rows_and_its_mask_is_empty(masks: ConstraintMasks) -> None:
    masks.start_rows([row_start(0, compiled("ab"), [1, 2, ord("x")]), row_start(1, compiled("ab"))])
    found = masks.begin([0, 1], [3, 2]).result()  # type: ignore[union-attr]
    assert set(found.dead_ends) == {0}
    assert not found.words[0].any()
    assert found.words[1].any()


# The sampler.


def state_of(*params: SamplingParams) -> SamplingState:
    state = SamplingState(max_running=len(params), vocab_size=SIZE, device=CPU)
    state.start_rows(
        [
            RowStart(Row(row), SequenceId(row), 0, (1, 2), 2, each, frozenset({EOS}))
            for row, each in enumerate(params)
        ]
    )
    return state


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02, seed=4),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, seed=5),
    ],
    ids=["greedy", "sampled", "filtered", "penalised"],
)
def test_a_masked_draw_is_the_draw_from_the_allowed_tokens_alone(params: SamplingParams) -> None:
    """The noise of a token depends on its id and place: taking others away changes no draw but theirs."""
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(7))
    rows, ends = np.array([0, 1], np.int32), np.array([2, 2], np.int32)
    mask = ConstraintMasks(SIZE)
    mask.start_rows([row_start(1, compiled("[a-f]"))])
    pending = mask.begin(rows, ends)
    assert pending is not None
    masks = pending.result()
    keeps = unpacked(torch.from_numpy(masks.words), SIZE)[0]
    plain = Sampler(state_of(params, params)).sample(logits.clone(), rows, ends)
    masked = Sampler(state_of(params, params)).sample(logits.clone(), rows, ends, masks)
    by_hand = logits.clone()
    by_hand[1] = by_hand[1].masked_fill(~keeps, -math.inf)
    expected = Sampler(state_of(params, params)).sample(by_hand, rows, ends)
    assert masked.ids.tolist() == expected.ids.tolist()
    assert masked.ids[0] == plain.ids[0], "a neighbour is not touched"
    assert keeps[masked.ids[1]]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, SIZE])
def test_the_compiled_mask_equals_the_plain_one(vocab_size: int) -> None:
    library = needs.compiled()
    chance = np.random.default_rng(vocab_size)
    rows = torch.tensor([3, 0, 2])
    words = torch.from_numpy(chance.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=np.int32))
    words[1] = -1
    wide = torch.randn(4, vocab_size + 5)
    plain, ours = wide.clone(), wide.clone()
    for line, row in enumerate(rows.tolist()):
        plain[row, :vocab_size].masked_fill_(~unpacked(words, vocab_size)[line], -math.inf)
    library.mask(ours[:, :vocab_size], rows, words)
    assert torch.equal(ours, plain)


def test_log_probabilities_are_of_what_may_be_drawn() -> None:
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(8))
    keeps = torch.zeros(SIZE, dtype=torch.bool)
    keeps[[97, 98, 99]] = True
    masked = logits.masked_fill(~keeps, -math.inf)
    (record,) = token_logprobs(masked, torch.tensor([98]), 5).on_the_way([5])()
    exact = logits.double()[0, keeps].log_softmax(-1)
    assert record.logprob == pytest.approx(float(exact[1]), abs=1e-5)
    assert sorted(token for token, _ in record.alternatives) == [97, 98, 99]
    assert [value for _, value in record.alternatives] == pytest.approx(
        sorted(exact.tolist(), reverse=True), abs=1e-5
    )


# Whole outputs, on a device of lists: preemption, samples, company, overlap.

PATTERNS = ("[a-c]{3,9}(xy|z)", r"\d+(,\d+){0,4}", "(yes|no|maybe so)", '"[a-z ]{0,12}"')


def spec(number: int, params: SamplingParams, samples: int = 1, prompt: int = 9) -> RequestSpec:
    return RequestSpec(
        SequenceId(number * 10), array("I", [number + 1] * prompt), params, sample_count=samples, source="s"
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_satisfy_their_constraints_and_equal_those_alone(overlap: bool) -> None:
    """Pages for a third of what runs: everybody is preempted, and goes on where he was."""
    config = small_config(num_pages=12, max_running=6, max_context_tokens=48, eos_token_ids=frozenset({EOS}))
    harness = Harness(config, MODEL, overlap=overlap)
    specs = []
    for number, pattern in enumerate(PATTERNS * 2):
        params = SamplingParams(
            temperature=float(number % 2), seed=number, max_tokens=30, constraint=compiled(pattern)
        )
        specs.append(spec(number, params, samples=2 if number == 3 else 1))
    specs.append(spec(9, SamplingParams(temperature=1.0, seed=1, max_tokens=20)))
    for each in specs:
        harness.add(each)
    harness.run()
    assert sum(answer.num_starts for answer in harness.answers.values()) > len(harness.answers), (
        "nobody was preempted"
    )
    for each in specs:
        for sample in range(each.sample_count):
            answer = harness.answers[each.sequence_id + sample]
            alone = answer_alone(
                MODEL, each.prompt_token_ids, each.params, sample, frozenset({EOS}), config.max_context_tokens
            )
            assert answer.tokens == alone
            if each.params.constraint is not None and answer.code == FinishCode.EOS:
                assert isinstance(each.params.constraint, Compiled)
                assert each.params.constraint.begin(answer.tokens[:-1]).is_complete, text_of(answer.tokens)
    codes = [answer.code for answer in harness.answers.values()]
    assert codes.count(FinishCode.EOS) >= 6, codes


def test_min_tokens_beyond_what_the_constraint_can_give_ends_one_request() -> None:
    harness = Harness(small_config(eos_token_ids=frozenset({EOS})), MODEL)
    short = SamplingParams(max_tokens=20, min_tokens=8, constraint=compiled("abc"))
    harness.add(spec(0, short))
    harness.add(spec(1, replace(short, min_tokens=0)))
    harness.run()
    dead, fine = harness.answers[0], harness.answers[10]
    assert (dead.code, text_of(dead.tokens)) == (FinishCode.FAILED, "abc")
    assert dead.end is not None
    assert dead.end.failure is FailureReason.CONSTRAINT_DEAD_END
    assert (fine.code, text_of(fine.tokens)) == (FinishCode.EOS, "abc")


def test_min_tokens_keeps_an_output_going_where_it_could_end() -> None:
    harness = Harness(small_config(eos_token_ids=frozenset({EOS})), MODEL)
    harness.add(spec(0, SamplingParams(max_tokens=20, min_tokens=8, constraint=compiled("a+"))))
    harness.run()
    assert len(harness.answers[0].tokens) > 8


# The real runner.


def torch_runner(overlap: bool = False) -> tuple[Runner, WorkerConfig, int]:
    config = WorkerConfig(model="random:tiny", page_size=4, num_pages=64, max_running=4, threads=1)
    device = choose_device(config)
    facts = device.facts(config)
    resolved = replace(config, overlap=overlap).resolved(model_context=256, automatic_pages=64)
    return device.build(resolved), resolved, facts.model.vocab_size


def scheduler_for(config: WorkerConfig) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            cache=CacheConfig(config.num_pages, config.page_size),
            max_running=config.max_running,
            max_step_tokens=64,
            max_context_tokens=config.max_context,
            eos_token_ids=frozenset({EOS}),
        )
    )


def drive(scheduler: Scheduler, runner: Runner) -> dict[int, tuple[list[int], FinishCode]]:
    answers: dict[int, tuple[list[int], FinishCode]] = {}
    now = 1.0
    while scheduler.has_work(now):
        now += 0.01
        step = scheduler.schedule(now)
        assert step is not None
        scheduler.commit(step, runner.launch(step).result(), now)
        for columns in scheduler.take_outputs().values():
            for sequence_id, token, code in zip(
                columns.sequence_ids, columns.token_ids, columns.finish_codes, strict=True
            ):
                tokens, _ = answers.get(sequence_id, ([], FinishCode.NONE))
                if token < SIZE:
                    tokens.append(token)
                answers[sequence_id] = (tokens, FinishCode(code))
    return answers


def test_the_torch_runner_keeps_constraints_and_leaves_neighbours_alone() -> None:
    runner, config, vocab_size = torch_runner()
    assert vocab_size == SIZE
    plain = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
    scheduler = scheduler_for(config)
    scheduler.add(spec(5, plain), 0.0)
    alone = drive(scheduler, runner)[50][0]
    scheduler = scheduler_for(config)
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", None]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    )
    constraint = COMPILER.compile(ConstraintText("json_schema", schema))
    scheduler.add(spec(5, plain), 0.0)
    scheduler.add(spec(1, SamplingParams(max_tokens=60, constraint=constraint)), 0.0)
    scheduler.add(
        spec(2, SamplingParams(temperature=1.5, seed=9, max_tokens=60, constraint=constraint), 2), 0.0
    )
    answers = drive(scheduler, runner)
    runner.close()
    assert answers[50][0] == alone
    for sequence_id in (10, 20, 21):
        tokens, code = answers[sequence_id]
        assert code is FinishCode.EOS
        found = json.loads(text_of(tokens))
        assert 0 <= found["a"] <= 99
        assert found["b"] in ("x", None)


def test_a_dead_end_on_the_torch_runner_has_its_own_reason() -> None:
    runner, _, _ = torch_runner()
    forbids_all_but = tuple((token, -math.inf) for token in range(SIZE) if token != ord("A"))
    params = SamplingParams(constraint=compiled("[b-d]"), logit_bias=forbids_all_but)
    step = Step(
        number=1,
        sequence_ids=(SequenceId(0),),
        rows=array("i", (0,)),
        starts=array("i", (0,)),
        ends=array("i", (2,)),
        sampled=(0,),
        num_decode=0,
        row_starts=(replace(row_start(0, None), params=params),),
        new_page_rows=array("i", (0,)),
        new_page_indexes=array("i", (0,)),
        new_page_ids=array("i", (0,)),
    )
    result = runner.launch(step).result()
    assert (list(result.dead_ends), list(result.token_ids)) == ([0], [NO_TOKEN_ID])
    assert "logit_bias" in result.failed[0]
    again = run_span_by_span(runner, step, lambda _: None, lambda *_: None)
    assert list(again.dead_ends) == [0]
    runner.close()
