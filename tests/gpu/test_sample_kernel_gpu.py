"""The sampling kernels on a GPU against the plain sampler on the CPU, at real vocabulary sizes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.noise import NoiseKeys, noise_of_tokens
from kernels.sample import make_scratch, sample
from kernels.sample_columns import SampleRow, make_columns, write_rows
from kernels.sample_edits import EditRow, make_edits, write_line
from kernels.sample_filters import lowest_kept
from kernels.sample_logprobs import best_of, find_best, make_logprob_scratch, token_logprobs
from worker.execution.sampler import Sampler
from worker.execution.sampling_state import SamplingState
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
PROMPT, OUTPUT = (1, 2, 3, 1), (4, 4, 5)

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=-5),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=3),
    SamplingParams(temperature=1.3, top_p=0.9, seed=4),
    SamplingParams(temperature=0.9, min_p=0.02, seed=6),
    SamplingParams(temperature=1.0, top_k=1000, seed=2**63 + 9),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.1),
    SamplingParams(temperature=0.7, top_k=50, logit_bias=((9, 3.5), (200, -100.0)), seed=12),
]


class Rows:
    """Row i is sampled like SETTINGS[i % 8], as choice i, on the GPU and by the plain sampler."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.params = [SETTINGS[row % len(SETTINGS)] for row in range(num_rows)]
        self.device = torch.device("cuda")
        self.columns = make_columns(num_rows + 1, self.device)
        edited = [row for row, p in enumerate(self.params) if p.has_penalties or p.logit_bias]
        self.edits = make_edits(
            num_rows + 1, max(1, len(edited)), vocab_size, self.device, max_bias=1024, max_stops=72
        )
        write_rows(
            self.columns,
            range(num_rows),
            [
                SampleRow(p.temperature, p.top_k, p.top_p, p.min_p, p.seed, row)
                for row, p in enumerate(self.params)
            ],
        )
        for line, row in enumerate(edited):
            p = self.params[row]
            self.edits.line[row] = line
            write_line(
                self.edits,
                line,
                EditRow(
                    p.repetition_penalty,
                    p.frequency_penalty,
                    p.presence_penalty,
                    prompt_ids=PROMPT,
                    output_ids=OUTPUT,
                    bias=p.logit_bias,
                ),
            )
        self.scratch = make_scratch(num_rows, vocab_size, self.device)

    def ours(self, logits: Tensor, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        return sample(logits, rows, ends, self.columns, self.scratch, self.vocab_size, edits=self.edits)

    def reference(self, logits: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        state = SamplingState(max_running=len(self.params), vocab_size=self.vocab_size, device=CPU)
        state.start_rows(
            [
                RowStart(row, row, row, (*PROMPT, *OUTPUT), len(PROMPT), p, frozenset())
                for row, p in enumerate(self.params)
            ]
        )
        rows = np.arange(len(self.params), dtype=np.int32)
        sampled = Sampler(state).sample(logits.cpu(), rows, ends.cpu().numpy())
        return sampled.ids, sampled.is_finite

    def scores(self, logits: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """What the plain sampler compares, of one token per row without edits or filters."""
        keys = NoiseKeys(
            *(
                torch.tensor([value & 0xFFFFFFFF for value in column])
                for column in (
                    [p.seed for p in self.params],
                    [p.seed >> 32 for p in self.params],
                    range(len(self.params)),
                    ends.tolist(),
                )
            )
        )
        temperature = torch.tensor([p.temperature or 1.0 for p in self.params])
        noise = noise_of_tokens(keys, ids[:, None])[:, 0].log()
        noise = torch.where(torch.tensor([p.temperature > 0 for p in self.params]), noise, 0.0)
        return logits.cpu().float().gather(1, ids[:, None])[:, 0] / temperature - noise


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 151_936), (8, 262_144), (64, 128_256), (256, 49_152), (16, 50_257)]
)
def test_tokens_are_those_of_the_plain_sampler(num_rows, vocab_size, scale, dtype):
    """Where two scores are closer than the device's logarithms can tell, either token will do."""
    rows = Rows(num_rows, vocab_size)
    logits = random_logits(num_rows, vocab_size, dtype, scale)
    ends = torch.arange(7, 7 + num_rows, dtype=torch.int32, device="cuda")
    ids, is_finite = rows.ours(logits, torch.arange(num_rows, dtype=torch.int32, device="cuda"), ends)
    expected, _ = rows.reference(logits, ends)
    assert is_finite.all()
    assert rows.scratch.arrived.count_nonzero() == 0
    differ = ids.cpu().long() != expected
    if differ.any():
        ours, best = (
            rows.scores(logits, token_ids, ends.cpu()) for token_ids in (ids.cpu().long(), expected)
        )
        assert differ.sum() <= 2, f"{int(differ.sum())} of {num_rows} tokens differ"
        assert ((ours - best).abs()[differ] < 2e-5).all(), (ours[differ], best[differ])


def test_a_row_gives_the_same_token_in_any_company_and_every_time():
    """B052: one row alone, in a batch, and 100 times over, while programs finish in any order."""
    rows = Rows(256, 151_936)
    logits = random_logits(256, 151_936, torch.bfloat16, 2.0)
    index = torch.arange(256, dtype=torch.int32, device="cuda")
    ends = index + 7
    ids = rows.ours(logits, index, ends)[0].clone()
    rows.edits.output_counts.zero_()  # the draw above is history now, for rows with penalties
    plain = [row for row, p in enumerate(rows.params) if not p.has_penalties]
    for row in plain[:40]:
        alone, _ = rows.ours(logits[row : row + 1], index[row : row + 1], ends[row : row + 1])
        assert int(alone) == int(ids[row]), row
    for _ in range(100):
        again, _ = rows.ours(logits, index, ends)
        assert torch.equal(again[plain], ids[plain])
    assert rows.scratch.arrived.count_nonzero() == 0


def test_a_captured_graph_draws_what_its_tables_say_at_replay():
    """B081: rows, positions, columns and logits are read on the device; padding rows do no harm."""
    rows = Rows(16, 128_256)
    dummy = 16
    logits = random_logits(16, 128_256, torch.bfloat16, 2.0)
    index = torch.full((16,), dummy, dtype=torch.int32, device="cuda")
    ends = torch.ones(16, dtype=torch.int32, device="cuda")
    pool = torch.zeros(17, 64, dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        return sample(
            logits,
            index,
            ends,
            rows.columns,
            rows.scratch,
            rows.vocab_size,
            edits=rows.edits,
            token_pool=pool,
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, is_finite = step()
    for round_number in range(3):
        rows.edits.output_counts.zero_()
        logits.copy_(random_logits(16, 128_256, torch.bfloat16, 2.0, seed=round_number))
        index[:12] = torch.arange(12, dtype=torch.int32, device="cuda")
        ends[:12] = torch.arange(20, 32, dtype=torch.int32, device="cuda") + round_number
        graph.replay()
        from_graph = ids[:12].clone()
        assert is_finite.all()
        assert torch.equal(pool[index[:12].long(), ends[:12].long()], from_graph)
        rows.edits.output_counts.zero_()
        eager, _ = rows.ours(logits[:12], index[:12], ends[:12])
        assert torch.equal(eager, from_graph)


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(40, 1.0), (20_000, 1.0), (0, 0.5), (0, 0.95), (0, 0.9999), (5000, 0.9)]
)
def test_filters_keep_what_they_are_defined_to_keep(top_k, top_p, scale):
    """Against sums in fp64; B053."""
    num_rows, vocab_size, temperature = 6, 151_936, 0.8
    logits = random_logits(num_rows, vocab_size, torch.float32, scale)
    logits[1::2] = logits[1::2].bfloat16().float()  # with many equals
    device = torch.device("cuda")
    columns = make_columns(num_rows, device)
    write_rows(columns, range(num_rows), [SampleRow(temperature, top_k, top_p)] * num_rows)
    lowest, aside = torch.zeros(num_rows, device=device), torch.empty(num_rows, 8192, device=device)
    filters = (columns.temperature, columns.top_k, columns.top_p, columns.log_min_p)
    index = torch.arange(num_rows, dtype=torch.int32, device=device)
    lowest_kept(logits, None, index, *filters, vocab_size, aside, out=lowest)
    candidates = torch.ones_like(logits, dtype=torch.bool)
    if top_k:
        candidates = logits >= logits.topk(top_k, dim=-1).values[:, -1:]
    is_kept = logits >= lowest[:, None]
    assert not (is_kept & ~candidates).any()
    if top_p == 1.0:
        assert torch.equal(is_kept, candidates)
        return
    probs = torch.where(candidates, (logits.double() / temperature).softmax(dim=-1), 0.0)
    probs /= probs.sum(dim=-1, keepdim=True)
    mass = torch.where(is_kept, probs, 0.0).sum(dim=-1)
    scores = logits / temperature
    last = torch.where(is_kept, scores, math.inf).amin(dim=-1)
    above = torch.where(scores > last[:, None], probs, 0.0).sum(dim=-1)
    assert (mass >= top_p - 1e-6).all(), mass
    assert (above < top_p + 1e-6).all(), above


def test_rows_without_a_finite_answer_are_reported():
    """B057."""
    rows = Rows(8, 128_256)
    logits = random_logits(8, 128_256, torch.bfloat16, 2.0)
    logits[1] = math.nan
    logits[2, 100_000] = math.nan
    logits[3, 5] = math.inf
    logits[4] = -math.inf
    index = torch.arange(8, dtype=torch.int32, device="cuda")
    ids, is_finite = rows.ours(logits, index, index + 7)
    assert is_finite.tolist() == [True, False, False, False, False, True, True, True]
    assert ids[1:5].tolist() == [0] * 4


def test_log_probabilities_are_those_of_torch():
    rows = Rows(64, 151_936)
    rows.params = [dataclasses.replace(p, logprobs=0) for p in rows.params]
    logits = random_logits(64, 151_936, torch.bfloat16, 2.0)
    index = torch.arange(64, dtype=torch.int32, device="cuda")
    ids, _ = rows.ours(logits, index, index + 7)
    scratch = make_logprob_scratch(64, 151_936, torch.device("cuda"))
    asks = torch.zeros(65, dtype=torch.int32, device="cuda")
    token_logprobs(logits, index, ids, asks, scratch, 151_936, edits=rows.edits)
    edited = logits.float()
    lines = rows.edits.line[:64]
    edited[lines >= 0] = rows.edits.edited[lines[lines >= 0].long(), :151_936]
    exact = edited.double().log_softmax(dim=-1)
    chosen = exact.gather(1, ids.long()[:, None])
    torch.testing.assert_close(scratch.chosen, chosen[:, 0].float(), rtol=1e-5, atol=1e-5)
    picked = edited.gather(1, ids.long()[:, None])
    assert torch.equal(scratch.ranks.long(), (edited > picked).sum(dim=-1) + 1)
    asks.fill_(20)
    find_best(logits, index, asks, scratch, 151_936, edits=rows.edits)
    values, best_ids = best_of(scratch, index.long(), 20)
    assert torch.equal(best_ids.long(), edited.sort(dim=-1, descending=True, stable=True).indices[:, :20])
    torch.testing.assert_close(values, exact.gather(1, best_ids.long()).float(), rtol=1e-5, atol=1e-5)
