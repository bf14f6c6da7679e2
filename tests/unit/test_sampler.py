"""The sampler: each row as if alone, filters at their edges, penalties, masks, rows without numbers."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import needs
from worker.execution.constraint_masks import StepMasks
from worker.execution.cpu_sampler import CpuSampler
from worker.execution.sampler import ROWS_AT_ONCE, Filters, Sampled, Sampler, kept_candidates
from worker.execution.sampling_state import SamplingState
from worker.ids import Row, SequenceId
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart

CPU = torch.device("cpu")
VOCAB = 101
NAN, INF = math.nan, math.inf


@pytest.fixture(params=["torch", "cpu"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every promise holds for both samplers."""
    monkeypatch.setattr(Rows, "kind", request.param)
    return str(request.param)


class Rows:
    """A sampler with rows set up one by one; row i has parameters params[i]."""

    kind = "torch"

    def __init__(self, *params: SamplingParams, vocab_size: int = VOCAB) -> None:
        self.state = SamplingState(max_running=80, vocab_size=vocab_size, device=CPU)
        self.sampler = self._sampler()
        for row, one in enumerate(params):
            self.start(row, one)

    def _sampler(self) -> Sampler:
        if self.kind == "torch":
            return Sampler(self.state)
        return CpuSampler(self.state, needs.compiled())

    def start(
        self,
        row: int,
        params: SamplingParams,
        *,
        token_ids: Sequence[int] = (1, 2, 3),
        num_prompt: int | None = None,
        choice: int = 0,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        num_prompt_tokens = len(token_ids) if num_prompt is None else num_prompt
        start = RowStart(Row(row), SequenceId(row), choice, token_ids, num_prompt_tokens, params, eos)
        self.state.start_rows([start])

    def sample(self, logits: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Sampled:
        columns = (np.array(rows, dtype=np.int32), np.array(ends, dtype=np.int32))
        return self.sampler.sample(logits.clone(), *columns)

    def ids(self, logits: Tensor, rows: Sequence[int], ends: Sequence[int]) -> list[int]:
        sampled = self.sample(logits, rows, ends)
        assert sampled.is_finite.all()
        return [int(token) for token in sampled.ids]


def draw_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0, seed=5)


# -- in company ------------------------------------------------------------------------------------


def test_every_pair_of_settings_shares_a_batch_without_showing() -> None:
    """B052, B056: greedy, top-k, top-p, min-p and the whole vocabulary, each as if alone."""
    settings = [
        GREEDY,
        replace(WARM, top_k=64),
        replace(WARM, top_p=0.7),
        replace(WARM, top_k=VOCAB),
        replace(WARM, top_k=10 * VOCAB),
        replace(WARM, min_p=0.2),
        replace(WARM, temperature=0.3, top_k=3, top_p=0.5, min_p=0.1),
        WARM,
        replace(GREEDY, repetition_penalty=1.3),
        replace(WARM, logit_bias=((7, -INF), (3, 2.0))),
    ]
    logits = draw_logits(2)
    for first, second in itertools.product(settings, repeat=2):
        alone = [Rows(one).ids(logits[i : i + 1], [0], [9])[0] for i, one in enumerate((first, second))]
        assert Rows(first, second).ids(logits, [0, 1], [9, 9]) == alone


def test_a_seeded_token_is_the_same_alone_and_among_63_others() -> None:
    """B052: noise depends on seed, choice and position."""
    ours = replace(WARM, temperature=1.4, seed=12345)
    others = [replace(WARM, seed=i, top_k=i % 5, temperature=0.1 + i / 20) for i in range(63)]
    logits = draw_logits(64, seed=3)
    for position in (4, 5, 900):
        alone = Rows(ours).ids(logits[:1], [0], [position])
        together = Rows(ours, *others).ids(logits, list(range(64)), [position, *range(5, 68)])
        assert together[0] == alone[0]


def test_a_resumed_sequence_draws_the_same_tokens() -> None:
    """The row, and how the tokens before came to be, do not matter: only seed, choice and position."""
    logits = draw_logits(1)
    rows = Rows(WARM)
    rows.start(17, WARM, token_ids=[1, 2, 3, 50, 51], num_prompt=3)
    assert rows.ids(logits, [17], [5]) == rows.ids(logits, [0], [5])


def test_choices_of_one_request_differ() -> None:
    rows = Rows(vocab_size=5000)
    for choice in range(8):
        rows.start(choice, WARM, choice=choice)
    logits = torch.zeros(8, 5000)
    assert len(set(rows.ids(logits, list(range(8)), [3] * 8))) == 8


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """Two thousand draws of four tokens at temperature 2, by position."""
    rows = Rows(*[replace(WARM, temperature=2.0)] * 80, vocab_size=4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    drawn: list[int] = []
    for first in range(0, 2000, 80):
        drawn += rows.ids(logits.expand(80, 4), range(80), range(first, first + 80))
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 2000
    torch.testing.assert_close(shares, (logits[0] / 2).softmax(0), atol=0.035, rtol=0)


# -- greedy ----------------------------------------------------------------------------------------


def test_greedy_is_the_lowest_id_of_the_highest_logit() -> None:
    """B060: ties are broken by id."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [90, 20, 40]] = 5.0
    assert Rows(GREEDY).ids(logits, [0], [3]) == [20]


@pytest.mark.parametrize("ties", [False, True])
def test_temperature_zero_equals_top_k_one(ties: bool) -> None:
    """B060: over 100 tokens, with and without exact ties; so does a temperature too small to divide by."""
    settings = [
        GREEDY,
        replace(WARM, top_k=1),
        replace(WARM, top_k=1, top_p=0.3),
        replace(WARM, temperature=1e-7),
    ]
    rows = Rows(*settings)
    for step in range(100):
        logits = draw_logits(1, seed=step)
        if ties:
            logits = logits.round()
        ids = rows.ids(logits.expand(4, VOCAB), [0, 1, 2, 3], [step] * 4)
        assert len(set(ids)) == 1


def test_greedy_with_banned_tokens_next_to_a_random_row() -> None:
    """B056: no NaN, and the best of what is allowed."""
    banned = replace(GREEDY, logit_bias=tuple((token, -INF) for token in range(50)))
    logits = draw_logits(2)
    ids = Rows(banned, WARM).ids(logits, [0, 1], [3, 3])
    assert ids[0] == 50 + int(logits[0, 50:].argmax())


# -- filters ---------------------------------------------------------------------------------------


def kept(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    vocab_size = logits.shape[-1]
    filters = Filters(
        top_k=torch.tensor([top_k or vocab_size]),
        top_p=torch.tensor([top_p], dtype=torch.float64),
        log_min_p=torch.tensor([math.log(min_p) if min_p else -INF]),
    )
    _, token_ids, is_kept = kept_candidates(logits, filters)
    return set(token_ids[is_kept].tolist())


@pytest.mark.parametrize("vocab_size", [5, 300, 5000])
@pytest.mark.parametrize("top_k", [1, 2, 5, 255, 256, 257, 4000])
def test_top_k_keeps_the_k_best(vocab_size: int, top_k: int) -> None:
    logits = draw_logits(1, vocab_size)
    best = logits[0].sort(descending=True, stable=True).indices[:top_k].tolist()
    assert kept(logits, top_k=top_k) == set(best)


def test_top_k_keeps_all_equals_of_the_kth() -> None:
    """Which of the equals a library happens to return must not matter."""
    logits = torch.zeros(1, 1000)
    logits[0, 7] = 1.0
    assert kept(logits, top_k=3) == set(range(1000))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("top_k", [0, 20])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, top_k: int) -> None:
    """Of what top-k kept, renormalised; against a loop over sorted tokens."""
    logits = draw_logits(1, 700, seed=2)
    order = logits[0].sort(descending=True).indices[: top_k or 700].tolist()
    probs = logits[0, order].double().softmax(0).tolist()
    expected, mass = set(), 0.0
    for token, prob in zip(order, probs, strict=True):
        if mass >= top_p:
            break
        expected.add(token)
        mass += prob
    assert kept(logits, top_k=top_k, top_p=top_p) == expected


def test_top_p_near_one_keeps_everything_reachable() -> None:
    """B053: 150 thousand flat probabilities whose fp32 sum ends below top_p."""
    logits = torch.zeros(1, 150_000) + torch.linspace(0, 1e-3, 150_000)
    assert len(kept(logits, top_p=0.9999999)) >= 149_900
    rows = Rows(replace(WARM, top_p=0.9999999), vocab_size=150_000)
    assert 0 <= rows.ids(logits, [0], [3])[0] < 150_000


def test_top_p_below_the_first_probability_keeps_exactly_one() -> None:
    """B053."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    first = float(logits.softmax(-1)[0, 0])
    assert kept(logits, top_p=first - 1e-4) == {0}
    assert kept(logits, top_p=first + 1e-4) == {0, 1}
    assert kept(logits, top_p=1e-9) == {0}


@pytest.mark.parametrize("min_p", [0.01, 0.3, 0.999])
def test_min_p_is_relative_to_the_best(min_p: float) -> None:
    logits = draw_logits(1, 600)
    probs = logits[0].softmax(0)
    expected = set((probs >= min_p * probs.max()).nonzero().flatten().tolist())
    assert kept(logits, min_p=min_p) == expected


def test_a_filtered_draw_picks_the_unfiltered_token_when_it_is_kept() -> None:
    """One noise per token: filters only take candidates away."""
    agreed = 0
    for position in range(200):
        logits = draw_logits(1, 3000, seed=position)
        rows = Rows(WARM, replace(WARM, top_k=400), vocab_size=3000)
        whole, filtered = rows.ids(logits.expand(2, 3000), [0, 1], [position] * 2)
        if whole in kept(logits, top_k=400):
            assert filtered == whole
            agreed += 1
    assert agreed > 100


def test_of_equal_scores_a_filtered_draw_picks_the_lowest_id_as_an_unfiltered_one_does() -> None:
    """At a low temperature equal logits have equal scores: most of their noise is rounded off."""
    logits = draw_logits(1)
    logits[0, [90, 3, 40, 77]] = 25.0
    for seed in range(100):
        plain = replace(WARM, temperature=1e-5, seed=seed)
        free, kept = (Rows(one).ids(logits, [0], [9]) for one in (plain, replace(plain, top_k=4)))
        assert kept == free


def test_both_samplers_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mix of settings and shapes of logits: peaked, flat, tied, with banned tokens."""
    chance = random.Random(1)
    for round_number in range(40):
        vocab_size = chance.choice([3, 17, 64, 1000, 3001])
        settings = [
            SamplingParams(
                temperature=chance.choice([0.1, 0.8, 1.0, 3.0]),
                top_k=chance.choice([0, 0, 1, 2, 40, 5000]),
                top_p=chance.choice([1.0, 1.0, 0.99, 0.6, 0.01]),
                min_p=chance.choice([0.0, 0.0, 0.05, 0.9]),
                repetition_penalty=chance.choice([1.0, 1.2]),
                presence_penalty=chance.choice([0.0, 0.5]),
                seed=chance.getrandbits(64),
            )
            for _ in range(12)
        ]
        logits = draw_logits(12, vocab_size, round_number) * chance.choice([0.0, 0.1, 1.0, 5.0])
        if round_number % 3 == 0:
            logits = logits.round()
        logits[:, vocab_size // 2 :: 7] = -INF
        drawn = []
        for kind in ("torch", "cpu"):
            monkeypatch.setattr(Rows, "kind", kind)
            drawn.append(Rows(*settings, vocab_size=vocab_size).ids(logits, range(12), [round_number] * 12))
        assert drawn[0] == drawn[1], round_number


# -- the vocabulary --------------------------------------------------------------------------------


def test_padded_ids_are_never_sampled() -> None:
    """B054: large weights in rows past the tokenizer's, 10,000 samples at temperature 5."""
    params = [replace(WARM, temperature=5.0, seed=seed) for seed in range(79)] + [GREEDY]
    rows = Rows(*params)
    logits = torch.cat([draw_logits(80), torch.full((80, 27), 1e4)], dim=1)
    for position in range(127):
        assert max(rows.ids(logits, list(range(80)), [position] * 80)) < VOCAB


def test_nan_in_padded_ids_is_no_failure() -> None:
    logits = torch.cat([draw_logits(2), torch.full((2, 3), NAN)], dim=1)
    assert Rows(GREEDY, WARM).sample(logits, [0, 1], [3, 3]).is_finite.all()


# -- rows that hold no numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, WARM, replace(WARM, top_k=5), replace(WARM, top_p=0.5)])
@pytest.mark.parametrize("poison", ["one nan", "all nan", "+inf", "all -inf"])
def test_a_row_that_is_not_finite_is_reported_and_gets_no_token(params: SamplingParams, poison: str) -> None:
    """B057: never a uniform draw, never id 0 as text; the others are as if alone."""
    logits = draw_logits(4)
    clean = Rows(GREEDY, params, WARM, GREEDY).ids(logits, [0, 1, 2, 3], [3] * 4)
    value = {"one nan": NAN, "all nan": NAN, "+inf": INF, "all -inf": -INF}[poison]
    logits[1, slice(40, 41) if poison in ("one nan", "+inf") else slice(None)] = value
    sampled = Rows(GREEDY, params, WARM, GREEDY).sample(logits, [0, 1, 2, 3], [3] * 4)
    assert sampled.is_finite.tolist() == [True, False, True, True]
    assert [int(sampled.ids[i]) for i in (0, 2, 3)] == [clean[i] for i in (0, 2, 3)]


def test_some_tokens_at_minus_infinity_are_no_failure() -> None:
    logits = draw_logits(2)
    logits[:, ::2] = -INF
    for _ in range(20):
        sampled = Rows(GREEDY, WARM).sample(logits, [0, 1], [3, 3])
        assert sampled.is_finite.all()
        assert (sampled.ids % 2 == 1).all()


# -- penalties -------------------------------------------------------------------------------------


def penalised(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Token by token, as the formulas read."""
    logits = logits.clone()
    for token in set(prompt) | set(output):
        value = logits[token]
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, repetition_penalty=1.4),
        replace(GREEDY, frequency_penalty=0.8),
        replace(GREEDY, presence_penalty=1.5),
        replace(GREEDY, repetition_penalty=0.7, frequency_penalty=-0.5, presence_penalty=-0.3),
    ],
)
def test_penalties_are_the_formulas(params: SamplingParams) -> None:
    params = replace(params, logprobs=VOCAB)
    prompt, output = [1, 2, 3, 3, 60], [3, 7, 7, 7, 99]
    rows = Rows()
    rows.start(0, params, token_ids=prompt + output, num_prompt=len(prompt))
    logits = draw_logits(1)
    sampled = rows.sample(logits, [0], [10])
    assert sampled.logprobs is not None
    record = sampled.logprobs.on_the_way([VOCAB])()[0]
    expected = penalised(logits[0], params, prompt, output).log_softmax(0)
    ours = torch.empty(VOCAB)
    for token, logprob in record.alternatives:
        ours[token] = logprob
    torch.testing.assert_close(ours, expected)


def test_history_fed_token_by_token_equals_history_given_at_once() -> None:
    """B062: after step t the counts hold the prompt and exactly t tokens, counted on the device."""
    params = replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.2)
    rows, output = Rows(), []
    rows.start(3, params, token_ids=[5, 6, 7])
    for step in range(30):
        logits = draw_logits(1, seed=step % 4)  # the same few, so that repeats are tempting
        token = rows.ids(logits, [3], [3 + step])[0]
        at_once = Rows()
        at_once.start(0, params, token_ids=[5, 6, 7, *output], num_prompt=3)
        assert at_once.ids(logits, [0], [3 + step]) == [token]
        assert token == int(penalised(logits[0], params, [5, 6, 7], output).argmax())
        output.append(token)
    assert len(set(output)) > 4


def test_penalised_rows_come_and_go_without_mixing_histories() -> None:
    params = replace(GREEDY, presence_penalty=2.0)
    rows = Rows()
    for round_number in range(4):
        for row in range(6):
            rows.start(
                row, params if (row + round_number) % 2 else GREEDY, token_ids=[row, 50 + row], num_prompt=1
            )
        logits = draw_logits(6, seed=round_number)
        ids = rows.ids(logits, list(range(6)), [2] * 6)
        for row in range(6):
            one = params if (row + round_number) % 2 else GREEDY
            assert ids[row] == int(penalised(logits[row], one, [row], [50 + row]).argmax())


def test_a_prompt_with_ids_past_the_vocabulary_is_counted_without_them() -> None:
    rows = Rows()
    rows.start(0, replace(GREEDY, presence_penalty=1.0), token_ids=[VOCAB + 5, 4], num_prompt=1)
    assert rows.ids(torch.zeros(1, VOCAB), [0], [2]) == [0]


# -- bias and masked stop tokens -------------------------------------------------------------------


def test_bias_is_added_and_forgotten_with_the_row() -> None:
    rows = Rows(replace(GREEDY, logit_bias=((44, 100.0), (VOCAB + 1, 100.0))))
    logits = draw_logits(1)
    assert rows.ids(logits, [0], [3]) == [44]
    rows.start(0, GREEDY)
    assert rows.ids(logits, [0], [3]) == [int(logits.argmax())]


def test_stop_tokens_are_masked_until_min_tokens_are_out() -> None:
    """Both EOS and stop ids; from then on they may be sampled."""
    params = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset({8}))
    rows = Rows()
    rows.start(0, params, token_ids=[1, 2, 3], eos=frozenset({9}))
    logits = torch.zeros(1, VOCAB)
    logits[0, [8, 9, 30]] = torch.tensor([6.0, 5.0, 4.0])
    assert [rows.ids(logits, [0], [end])[0] for end in (3, 4, 5, 6)] == [30, 30, 8, 8]


def test_stop_tokens_stay_masked_where_min_tokens_is_the_most_that_a_request_can_ask_for() -> None:
    most = 1 << 31
    params = replace(GREEDY, min_tokens=most, max_tokens=most, stop_token_ids=frozenset({8}))
    rows = Rows()
    rows.start(0, params, token_ids=[1, 2, 3])
    logits = torch.zeros(1, VOCAB)
    logits[0, [8, 30]] = torch.tensor([6.0, 4.0])
    assert rows.ids(logits, [0], [3]) == [30]


def test_min_tokens_count_output_before_a_resume() -> None:
    params = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset({8}))
    rows = Rows()
    rows.start(0, params, token_ids=[1, 2, 3, 40], num_prompt=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, [8, 30]] = torch.tensor([6.0, 4.0])
    assert [rows.ids(logits, [0], [end])[0] for end in (4, 5)] == [30, 8]


# -- log-probabilities -----------------------------------------------------------------------------


def test_logprobs_are_before_temperature_and_filters_and_only_for_who_asks() -> None:
    """B038, B064: one record per sampled token of the rows that asked."""
    rows = Rows(GREEDY, replace(WARM, temperature=0.2, top_k=2, logprobs=4), replace(GREEDY, logprobs=0))
    logits = draw_logits(3)
    sampled = rows.sample(logits, [0, 1, 2], [3] * 3)
    assert sampled.logprob_indexes == [1, 2]
    assert sampled.logprobs is not None
    warm, greedy = sampled.logprobs.on_the_way(sampled.logprob_counts)()
    expected = logits.log_softmax(-1)
    token = int(sampled.ids[1])
    assert warm.logprob == pytest.approx(float(expected[1, token]), abs=1e-6)
    assert warm.rank == 1 + int((expected[1] > expected[1, token]).sum())
    best = expected[1].topk(4)
    assert [token for token, _ in warm.alternatives] == best.indices.tolist()
    assert [value for _, value in warm.alternatives] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert (greedy.rank, greedy.alternatives) == (1, ())


def test_equal_alternatives_come_by_id() -> None:
    rows = Rows(replace(GREEDY, logprobs=4))
    logits = torch.zeros(1, VOCAB)
    logits[0, [60, 20]] = 1.0
    sampled = rows.sample(logits, [0], [3])
    assert sampled.logprobs is not None
    record = sampled.logprobs.on_the_way([4])()[0]
    assert [token for token, _ in record.alternatives][:2] == [20, 60]
    assert record.rank == 1


def test_a_step_of_many_rows_is_that_of_each_of_them() -> None:
    """They are drawn some at a time: with masks, log-probabilities, and a row without numbers at the end."""
    params = [
        SamplingParams(temperature=0.9 * (row % 2), seed=row, logprobs=row % 4 if row % 3 == 0 else None)
        for row in range(2 * ROWS_AT_ONCE + 3)
    ]
    logits = draw_logits(len(params))
    logits[-1, 0] = NAN
    only = {0: 7, ROWS_AT_ONCE - 1: 8, ROWS_AT_ONCE: 40, len(params) - 2: 96}  # allowed token, by row
    words = np.zeros((len(only), -(-VOCAB // 32)), np.int32)
    for line, token in enumerate(only.values()):
        words[line, token // 32] = np.uint32(1 << token % 32).astype(np.int32)
    ends = np.full(len(params), 3, np.int32)
    whole = Rows(*params).sampler.sample(
        logits.clone(), np.arange(len(params), dtype=np.int32), ends, StepMasks(list(only), words, {})
    )
    for row, token in only.items():
        assert int(whole.ids[row]) == token
    assert whole.is_finite.tolist() == [True] * (len(params) - 1) + [False]
    assert whole.logprob_indexes == list(range(0, len(params), 3))
    assert whole.logprobs is not None
    records = dict(zip(whole.logprob_indexes, whole.logprobs.on_the_way(whole.logprob_counts)(), strict=True))
    alone = Rows(*params).sampler
    for row in set(range(len(params) - 1)) - only.keys():
        at = slice(row, row + 1)
        one = alone.sample(logits[at].clone(), np.array([row], np.int32), ends[at])
        assert int(one.ids[0]) == int(whole.ids[row]), row
        if one.logprobs is not None:
            assert one.logprobs.on_the_way(one.logprob_counts)() == [records[row]]


def test_no_logprobs_cost_nothing() -> None:
    assert Rows(GREEDY, WARM).sample(draw_logits(2), [0, 1], [3, 3]).logprobs is None
