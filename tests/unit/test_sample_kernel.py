"""The sampling kernels on CPU tensors, through Triton's interpreter, against the sampler in plain torch."""

import dataclasses
import itertools
import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")

import triton.language as tl  # noqa: E402

from kernels.noise import NoiseKeys, noise_of_vocabulary  # noqa: E402
from kernels.sample import SampleLaunch, make_scratch, sample  # noqa: E402
from kernels.sample_columns import SampleRow, make_columns, write_rows  # noqa: E402
from kernels.sample_edits import EditRow, edit_logits, make_edits, write_line  # noqa: E402
from kernels.sample_filters import lowest_kept  # noqa: E402
from kernels.sample_logprobs import make_logprob_scratch, token_logprobs  # noqa: E402
from kernels.sample_noise import fraction, log_noise, philox_words  # noqa: E402
from worker.execution import logprobs as reference_logprobs  # noqa: E402
from worker.execution.sampler import Filters, Sampler, kept_candidates  # noqa: E402
from worker.execution.sampling_state import SamplingState  # noqa: E402
from worker.scheduling.sampling import SamplingParams  # noqa: E402
from worker.scheduling.step import RowStart  # noqa: E402

CPU = torch.device("cpu")
PROMPT, OUTPUT, EOS = (1, 2, 3, 1), (4, 4, 5), 7


class Rows:
    """The same rows for both samplers: row i holds choice i of a sequence with these parameters."""

    def __init__(self, params: list[SamplingParams], vocab_size: int, **scratch: object) -> None:
        self.params, self.vocab_size = params, vocab_size
        num_rows = len(params)
        self.state = SamplingState(max_running=num_rows, vocab_size=vocab_size, device=CPU)
        self.state.start_rows([self._start(row) for row in range(num_rows)])
        self.columns = make_columns(num_rows + 1, CPU)
        self.edits = make_edits(num_rows + 1, num_rows, vocab_size, CPU, max_bias=8, max_stops=4)
        write_rows(self.columns, range(num_rows), [sample_row(p, choice) for choice, p in enumerate(params)])
        for row, p in enumerate(params):
            if p.has_penalties or p.logit_bias or p.min_tokens:
                self.edits.line[row] = row
                write_line(self.edits, row, edit_row(p))
        self.scratch = make_scratch(num_rows, vocab_size, CPU, **scratch)

    def _start(self, row: int) -> RowStart:
        return RowStart(
            row=row,
            sequence_id=row,
            choice_index=row,
            token_ids=(*PROMPT, *OUTPUT),
            num_prompt_tokens=len(PROMPT),
            params=self.params[row],
            eos_token_ids=frozenset([EOS]),
        )

    def reference(self, logits: Tensor, rows: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        sampled = Sampler(self.state).sample(
            logits.clone(), np.array(rows, np.int32), np.array(ends, np.int32)
        )
        return sampled.ids.int(), sampled.is_finite

    def ours(
        self, logits: Tensor, rows: list[int], ends: list[int], **options: object
    ) -> tuple[Tensor, Tensor]:
        row_ids, positions = torch.tensor(rows).int(), torch.tensor(ends).int()
        ids, is_finite = sample(
            logits,
            row_ids,
            positions,
            self.columns,
            self.scratch,
            self.vocab_size,
            edits=self.edits,
            **options,
        )
        assert self.scratch.arrived.count_nonzero() == 0
        return ids.clone(), is_finite.clone()

    def check(self, logits: Tensor, ends: list[int] | None = None) -> Tensor:
        """Draws for all rows with both and compares."""
        rows = list(range(len(self.params)))
        ends = ends or [len(PROMPT) + len(OUTPUT) + row for row in rows]
        expected, expected_finite = self.reference(logits, rows, ends)
        ids, is_finite = self.ours(logits, rows, ends)
        torch.testing.assert_close(ids, expected)
        torch.testing.assert_close(is_finite, expected_finite)
        return ids


def sample_row(p: SamplingParams, choice: int) -> SampleRow:
    return SampleRow(p.temperature, p.top_k, p.top_p, p.min_p, p.seed, choice)


def edit_row(p: SamplingParams) -> EditRow:
    return EditRow(
        repetition_penalty=p.repetition_penalty,
        frequency_penalty=p.frequency_penalty,
        presence_penalty=p.presence_penalty,
        first_free_end=len(PROMPT) + p.min_tokens,
        prompt_ids=PROMPT,
        output_ids=OUTPUT,
        bias=p.logit_bias,
        stop_ids={*p.stop_token_ids, EOS} if p.min_tokens else (),
    )


def normal(num_rows: int, width: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=-5),
    SamplingParams(temperature=1.0, top_k=64, seed=2**63 + 9),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=3),
    SamplingParams(temperature=1.3, top_p=0.9, seed=4),
    SamplingParams(temperature=1.0, top_k=259, seed=5),  # the whole vocabulary
    SamplingParams(temperature=1.0, top_k=2**32 - 1, seed=7),  # the most that a request can ask for
    SamplingParams(temperature=0.9, min_p=0.05, seed=6),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.1),
    SamplingParams(logit_bias=((9, 3.5), (200, -100.0)), min_tokens=5, stop_token_ids=frozenset([11])),
]


@triton.jit
def _noise_kernel(words, fractions, logs, keys, COUNTERS: tl.constexpr):
    counter = tl.arange(0, COUNTERS)
    seed_low, seed_high = tl.load(keys).to(tl.uint32), tl.load(keys + 1).to(tl.uint32)
    choice, position = tl.load(keys + 2).to(tl.uint32), tl.load(keys + 3).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(counter.to(tl.uint32), (position, choice, seed_low, seed_high))
    for place in tl.static_range(4):
        word = w0 if place == 0 else (w1 if place == 1 else (w2 if place == 2 else w3))
        tl.store(words + 4 * counter + place, word.to(tl.int64))
        tl.store(fractions + 4 * counter + place, fraction(word))
        tl.store(logs + 4 * counter + place, log_noise(word))


@pytest.mark.parametrize("key", [(0, 0, 0, 0), (123, 7, 2, 40_000), (2**32 - 1, 2**31, 19, 2**31 - 1)])
def test_noise_in_a_kernel_is_the_noise_of_its_definition(key):
    """Words and fractions bit for bit; the logarithm as good as two roundings."""
    count = 4096
    words, fractions, logs = torch.zeros(count, dtype=torch.int64), torch.zeros(count), torch.zeros(count)
    _noise_kernel[(1,)](words, fractions, logs, torch.tensor(key), COUNTERS=count // 4)
    noise = noise_of_vocabulary(NoiseKeys(*(torch.tensor([value]) for value in key)), count)[0]
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.equal(fractions, v)
    assert torch.equal(-torch.log1p(-v), noise)
    torch.testing.assert_close(logs, noise.log(), rtol=3e-7, atol=3e-7)


def test_a_mixture_of_settings_gives_the_tokens_of_the_plain_sampler():
    rows = Rows(SETTINGS, 259)
    logits = normal(len(SETTINGS), 259)
    ids = rows.check(logits)
    assert len(set(ids.tolist())) > 3
    ends = [len(PROMPT) + 4 if p.min_tokens else len(PROMPT) + 40 for p in SETTINGS]
    rows.check(logits.bfloat16(), ends)  # where min_tokens still masks, and further on


def test_every_pair_of_settings_gives_what_each_gives_alone():
    """B052, B056: "off" is a value of its own, and no row's parameters reach its neighbour."""
    logits = normal(4, 259)
    logits[0, 5:90] = -math.inf  # a greedy row with banned tokens
    chosen = [SETTINGS[0], SETTINGS[2], SETTINGS[4], SETTINGS[5]]
    expected, _ = Rows(chosen, 259).reference(logits, [0, 1, 2, 3], [8] * 4)
    for pair in itertools.combinations(range(4), 2):
        ids, is_finite = Rows(chosen, 259).ours(logits[list(pair)], list(pair), [8, 8])
        assert ids.tolist() == expected[list(pair)].tolist(), pair
        assert is_finite.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab_size", "width", "first"), [(1000, 1000, 0), (1001, 1008, 0), (1001, 1001, 1)]
)
def test_any_width_start_and_type_of_the_logits_will_do(vocab_size, width, first, dtype):
    """Rows that start at odd addresses, vocabularies that fill no vector, and padding. B054: large values
    in the padding of the vocabulary are never drawn."""
    params = [SamplingParams(temperature=t, seed=int(10 * t)) for t in (0.0, 5.0, 1.0)]
    memory = torch.full((3, width + first), 1e4, dtype=dtype)
    logits = memory[:, first : first + width]
    logits[:, :vocab_size] = normal(3, vocab_size)
    assert (Rows(params, vocab_size).check(logits) < vocab_size).all()


@pytest.mark.slow
def test_a_large_vocabulary_gives_the_tokens_of_the_plain_sampler():
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=50, top_p=0.9, seed=2),
    ]
    rows = Rows(params, 32_000)
    rows.check(normal(3, 32_000, scale=3.0).bfloat16())


@pytest.mark.parametrize("programs", [1, 5, 1000])
def test_the_token_does_not_depend_on_how_a_row_is_split(programs):
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(2)] + [SamplingParams()]
    rows = Rows(params, 3000, launch=SampleLaunch(counters=64))
    rows.scratch = dataclasses.replace(rows.scratch, num_programs=programs)
    logits = normal(3, 3000, scale=1.0)
    logits[2, [700, 2900]] = 50.0
    assert rows.check(logits)[2] == 700


def test_rows_without_a_finite_answer_are_reported_and_their_neighbours_are_not_harmed():
    """B057: NaN, one NaN among numbers, +inf, and nothing but -inf; greedy, drawn and filtered."""
    params = [dataclasses.replace(SETTINGS[i % 4], seed=i) for i in range(10)]
    logits = normal(10, 300)
    logits[[1, 2]] = math.nan
    logits[3, 123] = math.nan
    logits[[4, 5], 299] = math.inf
    logits[[6, 7]] = -math.inf
    logits[8, 1:] = -math.inf
    rows = Rows(params, 300)
    ids = rows.check(logits)
    assert ids[8] == 0
    assert rows.scratch.is_finite.tolist() == [True] + [False] * 7 + [True, True]
    rows.check(normal(10, 300, seed=1))  # nothing of those rows is left for the next ones there


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_scores_beyond_what_floats_hold_are_equal_and_the_lowest_id_is_drawn():
    """Logits that a low temperature takes to infinity: each of them is the best."""
    logits = normal(1, 5000)
    logits[0, [1300, 2600, 4999]] = 3e37
    params = [SamplingParams(temperature=2e-5, seed=1)]
    assert Rows(params, 5000, launch=SampleLaunch(counters=64)).check(logits).tolist() == [1300]


@pytest.mark.parametrize("logits", [[1.0, 3.0, 2.0, 3.0, 3.0], [0.5, 0.25, 0.125, -1.0, -2.0]])
def test_temperature_0_equals_top_k_1_and_takes_the_lowest_of_equals(logits):
    """B060."""
    params = [SamplingParams(), SamplingParams(temperature=0.7, top_k=1), SamplingParams(temperature=1e-7)]
    ids = Rows(params, 5).check(torch.tensor([logits] * 3))
    assert ids.tolist() == [logits.index(max(logits))] * 3


def test_of_equal_scores_the_lowest_id_is_drawn_whichever_was_scored_first():
    """At a low temperature equal logits have equal scores: most of their noise is rounded off."""
    params = [SamplingParams(temperature=1e-5, seed=seed) for seed in range(36, 48)]
    logits = normal(12, 1000)
    logits[:, [3, 400, 700]] = 25.0
    drawn = set(Rows(params, 1000).check(logits).tolist())
    assert drawn == {3, 400, 700}


# -- filters ---------------------------------------------------------------------------------------------


def kept_by_torch(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    vocab_size = logits.shape[-1]
    scores = logits.float() / temperature
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.float32(min_p))
    filters = Filters(
        top_k=torch.full((len(logits),), min(top_k or vocab_size, vocab_size)),
        top_p=torch.full((len(logits),), np.float32(top_p), dtype=torch.float64),
        log_min_p=torch.full((len(logits),), float(log_min_p)),
    )
    values, _, is_kept = kept_candidates(scores, filters)
    return scores >= values.masked_fill(~is_kept, math.inf).amin(dim=-1)[:, None]


def kept_by_kernel(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, room: int = 8192
) -> Tensor:
    num_rows, vocab_size = logits.shape
    columns = make_columns(num_rows, CPU)
    write_rows(columns, range(num_rows), [SampleRow(temperature, top_k, top_p, min_p)] * num_rows)
    lowest = torch.zeros(num_rows)
    filters = (columns.temperature, columns.top_k, columns.top_p, columns.log_min_p)
    aside = torch.empty(num_rows, room)
    lowest_kept(logits, None, torch.arange(num_rows).int(), *filters, vocab_size, aside, out=lowest)
    return logits.float() >= lowest[:, None]


@pytest.mark.parametrize("room", [20, 8192])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(700, 1.0, 0.0), (0, 0.99, 0.0), (0, 1.0, 0.1), (100, 0.8, 0.02)]
)
def test_the_kept_set_is_that_of_the_plain_sampler(top_k, top_p, min_p, room):
    """However few candidates can be put aside; rows of many values, of few, and with banned tokens."""
    logits = torch.cat([normal(1, 1500), normal(1, 1500, scale=0.1), (normal(1, 1500) * 2).round() / 2])
    logits[1, ::3] = -math.inf
    settings = (0.7, top_k, top_p, min_p)
    assert torch.equal(kept_by_kernel(logits, *settings, room=room), kept_by_torch(logits, *settings))


def equals(low: float) -> tuple[float, float]:
    """The float after `low`, and a temperature at which both have one score."""
    pair = torch.tensor([low, float(np.nextafter(np.float32(low), np.float32(np.inf)))])
    for temperature in np.arange(1.0, 2.0, 0.01):
        scores = pair / float(temperature)
        if scores[0] == scores[1]:
            return float(pair[1]), float(temperature)
    raise AssertionError(f"no such temperature for {low}")


def test_equals_of_the_last_kept_token_are_kept():
    """Logits one float apart give one score: they are equals as well."""
    low = 1.5
    high, temperature = equals(low)
    logits = torch.tensor([[0.0, low, 3.0, high, low, 1.0]])
    for settings in ((temperature, 2, 1.0, 0.0), (temperature, 0, 0.55, 0.0)):
        kept = kept_by_kernel(logits, *settings)
        assert kept.tolist() == [[False, True, True, True, True, False]]
        assert torch.equal(kept, kept_by_torch(logits, *settings))


def test_all_equals_count_in_the_mass_of_what_top_k_kept():
    """The search for top-k may put aside only some of the logits that share the last kept score."""
    high, temperature = equals(1.5)
    lowest = torch.nextafter(torch.tensor(-3.0), torch.tensor(0.0))  # so that 1.5 is a quarter of the range
    logits = torch.tensor([[3.0, high, 1.5, 1.5, 1.5, float(lowest)]])
    settings = (temperature, 2, 0.7, 0.0)
    kept = kept_by_kernel(logits, *settings, room=2)
    assert kept.tolist() == [[True] * 5 + [False]]
    assert torch.equal(kept, kept_by_torch(logits, *settings))


def test_the_last_kept_tokens_are_drawn_as_often_as_their_noise_says():
    params = [SamplingParams(temperature=9.0, top_k=2, seed=seed) for seed in range(12)]
    ids = Rows(params, 6).check(torch.tensor([[0.5, 1.0, 0.75, 2.0, -1.0, 1.0]] * 12))
    assert set(ids.tolist()) == {1, 3, 5}


def test_top_p_close_to_one_keeps_all_and_close_to_none_keeps_one():
    """B053."""
    flat = normal(1, 40_000, scale=1e-3)
    assert kept_by_kernel(flat, 1.0, 0, 0.9999999, 0.0).all()
    peaked = torch.zeros(1, 1000)
    peaked[0, 77] = 9.0
    first = float(peaked.softmax(dim=-1)[0, 77])
    assert kept_by_kernel(peaked, 1.0, 0, first * 0.9999, 0.0).nonzero().tolist() == [[0, 77]]
    assert kept_by_kernel(peaked, 1.0, 0, 1e-9, 0.0).nonzero().tolist() == [[0, 77]]
    assert kept_by_kernel(torch.zeros(1, 9000), 1.0, 5, 0.5, 0.5).all()  # nothing but equals


# -- what else a step does -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_round_like_plain_operations_one_after_the_other(dtype):
    """Penalties over prompt and output, counts, bias, stop ids masked before first_free_end and not at it."""
    values = EditRow(1.3, 0.37, 0.21, 9, (1, 2, 3, 1), (4, 4, 4, 5), ((2, 0.3), (4, -1.7), (6, 9.0)), (6, 7))
    logits = normal(2, 200).to(dtype)
    logits[0, :8] = torch.tensor([1.1, -1.2, 2.3, -0.4, 0.6, -0.7, 0.8, 0.9])
    edits = make_edits(3, 2, 200, CPU, max_bias=4, max_stops=3)
    edits.line[:] = torch.tensor([1, -1, -1])
    write_line(edits, 1, values)
    expected = logits[0].float()
    seen, counts = torch.zeros(200, dtype=torch.bool), torch.zeros(200)
    seen[[1, 2, 3, 4, 5]] = True
    counts[[4, 5]] = torch.tensor([3.0, 1.0])
    penalised = torch.where(
        expected > 0, expected / values.repetition_penalty, expected * values.repetition_penalty
    )
    expected = torch.where(seen, penalised, expected) - values.frequency_penalty * counts
    expected = expected - values.presence_penalty * (counts > 0)
    for token, added in values.bias:
        expected[token] += added
    edit_logits(logits, edits, torch.tensor([0, 1]).int(), torch.tensor([9, 9]).int())
    assert torch.equal(edits.edited[1, :200], expected)
    edit_logits(logits, edits, torch.tensor([0, 1]).int(), torch.tensor([8, 9]).int())
    expected[[6, 7]] = -math.inf
    assert torch.equal(edits.edited[1, :200], expected)
    assert edits.edited[0].count_nonzero() == 0


def test_drawn_tokens_enter_the_history_and_the_token_pool():
    """M-04; B062: step by step, with the history the kernel keeps on the device."""
    params = [
        SamplingParams(temperature=1.0, seed=8, repetition_penalty=1.5, presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.7),
        SamplingParams(),
    ]
    rows = Rows(params, 40)
    pool = torch.zeros(4, 10, dtype=torch.int32)
    for step in range(4):
        logits = normal(3, 40, scale=0.5, seed=step)
        ends = [len(PROMPT) + len(OUTPUT) + step] * 3
        expected, _ = rows.reference(logits, [0, 1, 2], ends)
        ids, _ = rows.ours(logits, [0, 1, 2], ends, token_pool=pool)
        assert ids.tolist() == expected.tolist()
        if ends[0] < 10:
            assert pool[:3, ends[0]].tolist() == ids.tolist()
    assert pool[3].tolist() == [0] * 9 + [int(ids[-1])]  # past the end: into the row nobody reads
    assert torch.equal(rows.edits.output_counts[:2], rows.state.history.output_counts([0, 1]))


def test_log_probabilities_and_ranks_are_those_of_torch():
    params = [dataclasses.replace(p, logprobs=3) for p in (SETTINGS[0], SETTINGS[1], SETTINGS[7])]
    rows = Rows(params, 20_000)
    logits = normal(3, 20_000)
    ids, _ = rows.ours(logits, [0, 1, 2], [8] * 3)
    logits[2] = rows.edits.edited[2, :20_000]
    scratch = make_logprob_scratch(4, 20_000, CPU)
    asks = torch.tensor([0, -1, 3, -1]).int()
    row_ids = torch.tensor([0, 1, 2]).int()
    token_logprobs(logits, row_ids, ids, asks, scratch, 20_000, edits=rows.edits)
    expected = reference_logprobs.token_logprobs(logits, ids.long(), 0)
    torch.testing.assert_close(scratch.chosen[[0, 2]], expected.chosen[[0, 2]], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        scratch.log_mass[[0, 2]], logits.logsumexp(dim=-1)[[0, 2]], rtol=1e-6, atol=1e-6
    )
    assert scratch.ranks.tolist() == [int(expected.ranks[0]), 0, int(expected.ranks[2]), 0]
    assert scratch.arrived.count_nonzero() == 0


def test_a_list_that_does_not_fit_its_table_is_refused():
    edits = make_edits(2, 1, 50, CPU, max_bias=2, max_stops=1)
    with pytest.raises(ValueError, match="3 biased ids in a table of 2"):
        write_line(edits, 0, EditRow(bias=[(1, 1.0), (2, 1.0), (3, 1.0)]))
    with pytest.raises(ValueError, match="2 stop ids in a table of 1"):
        write_line(edits, 0, EditRow(stop_ids=[3, 4]))
    write_line(edits, 0, EditRow(bias=[(1, 1.0), (99, 1.0)], stop_ids=[3, 50], output_ids=[7, 7, 60]))
    assert edits.bias_ids.tolist() == [[1, -1]]
    assert edits.stop_ids.tolist() == [[3]]
    assert edits.output_counts.sum() == 2
