"""Steps of a few short prompts by one message, through Triton's interpreter: what the other way leaves."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.toy_runners import sizes_for

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.prefill_plan import list_tiles
from kernels.prompt_step import (
    BLOCK,
    COLUMN_ROWS,
    COLUMNS,
    MESSAGE_LINES,
    NO_ENTRY,
    PAGE_IDS,
    PAGE_INDEXES,
    PAGE_ROWS,
    REST,
    TOKEN_IDS,
    TOKEN_POSITIONS,
    TOKEN_ROWS,
    WORDS,
    mark_broken,
    message_room,
    prompt_inputs,
    read_prompts,
    write_prompt_results,
)
from kernels.reference import ReferenceBackend
from kernels.sample_columns import NUM_COLUMNS
from kernels.static_prefill import MAX_SPANS, SPAN_ROOM
from kernels.triton_backend import TritonBackend
from worker.execution.cuda_runner import CudaRunner
from worker.execution.page_table import PageTable
from worker.execution.step_buffers import StepOutcome
from worker.execution.torch_runner import BAD_HIDDEN, BAD_LOGITS, NO_TOKEN_ID, TorchRunner
from worker.ids import PageId, Row, SequenceId
from worker.model.toy import toy_config, toy_model
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import PageCopy, RowStart, Step

CPU = torch.device("cpu")
CONFIG = toy_config(has_qk_norm=True)
MODEL = toy_model(CONFIG)
PAGES, PAGE_SIZE, RUNNING, CONTEXT = 40, 4, 10, 64


# --- the kernels ------------------------------------------------------------------------------------


def ints(*shape: int, below: int = 1000) -> Tensor:
    return torch.randint(0, below, shape, dtype=torch.int32)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (5, 130), (200, 3)])
def test_a_message_enters_the_tables_and_nothing_else(num_tokens: int, num_pages: int) -> None:
    """Tokens and pages in any rows, columns of some rows, the words and what is sampled."""
    room, num_words = message_room(200, 150), 150
    message = ints(MESSAGE_LINES, room)
    message[TOKEN_ROWS], message[PAGE_ROWS] = NO_ENTRY, NO_ENTRY
    table = PageTable(max_running=9, max_context=256, num_pages=90, page_size=4, device=CPU)
    width = table.slots.shape[1]
    ids, columns, words = ints(10, width), ints(NUM_COLUMNS, 10), torch.full((num_words,), -7).int()
    sampled = torch.zeros(3, MAX_SPANS, dtype=torch.int32)
    entries = torch.randperm(9 * 250)[:num_tokens].int()
    message[TOKEN_ROWS, :num_tokens], message[TOKEN_POSITIONS, :num_tokens] = entries // 250, entries % 250
    pages = torch.randperm(9 * 60)[:num_pages].int()
    message[PAGE_ROWS, :num_pages], message[PAGE_INDEXES, :num_pages] = pages // 60, pages % 60
    message[REST, COLUMN_ROWS : COLUMN_ROWS + MAX_SPANS] = NO_ENTRY
    message[REST, COLUMN_ROWS : COLUMN_ROWS + 2] = torch.tensor([8, 3])
    expected_ids, expected_columns = ids.clone(), columns.clone()
    expected_ids[entries // 250, entries % 250] = message[TOKEN_IDS, :num_tokens]
    values = message[REST, COLUMNS : COLUMNS + NUM_COLUMNS * MAX_SPANS].view(NUM_COLUMNS, MAX_SPANS)
    expected_columns[:, [8, 3]] = values[:, :2]
    expected = PageTable(max_running=9, max_context=256, num_pages=90, page_size=4, device=CPU)
    expected.write_pages(
        *(message[line, :num_pages].tolist() for line in (PAGE_ROWS, PAGE_INDEXES, PAGE_IDS))
    )

    count = max(num_tokens, num_pages, 1)
    read_prompts(message, table.slots, ids, columns, words, sampled, count, page_size=4)

    assert torch.equal(table.slots, expected.slots)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(columns, expected_columns)
    assert torch.equal(sampled.flatten(), message[REST, : 3 * MAX_SPANS])
    read = min(-(-count // BLOCK) * BLOCK, num_words)
    assert torch.equal(words[:read], message[WORDS, :read])
    assert (words[read:] == -7).all()


@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(0, 20)], [(3, 2), (0, 9), (40, 1)], [(5, 1)] * 8, [(n, n + 1) for n in range(6)]]
)
def test_inputs_of_each_token_are_those_of_the_tables(spans: list[tuple[int, int]]) -> None:
    """Spans (tokens cached, tokens new); padding is token 0 and writes the dummy slot alone."""
    table, ids, embedding = ints(9, 64), ints(9, 64, below=30), torch.randn(30, 24)
    q_lens, rows = [new for _, new in spans], torch.randperm(9)[: len(spans)].int()
    total, size = sum(q_lens), sum(q_lens) + 5
    words = torch.zeros(3, SPAN_ROOM, dtype=torch.int32)
    words[0, : len(spans)] = rows
    words[1, : len(spans)] = torch.tensor([cached + new for cached, new in spans])
    words[2, 1:] = total
    words[2, 1 : len(spans) + 1] = torch.tensor(q_lens).cumsum(0)
    positions, slots, hidden = ints(size), ints(size), torch.randn(size, 24)
    prompt_inputs(words.flatten(), table, ids, embedding, positions, slots, hidden, dummy_slot=77)
    where = torch.cat([torch.arange(cached, cached + new) for cached, new in spans])
    token_rows = rows.repeat_interleave(torch.tensor(q_lens)).long()
    assert torch.equal(positions[:total].long(), where)
    assert torch.equal(slots[:total], table[token_rows, where])
    assert torch.equal(hidden[:total], embedding[ids[token_rows, where].long()])
    assert positions[total:].tolist() == [0] * 5
    assert slots[total:].tolist() == [77] * 5
    assert torch.equal(hidden[total:], embedding[:1].expand(5, 24))


def test_a_span_is_broken_by_its_own_tokens_alone() -> None:
    """NaN, infinity of either sign and infinities that cancel; padding counts for nobody."""
    hidden, is_broken = torch.randn(20, 24), torch.zeros(33, dtype=torch.int32)
    hidden[3, 5], hidden[9, 0], hidden[10, 23] = float("nan"), float("inf"), float("-inf")
    hidden[18, 2], hidden[18, 3], hidden[19, 0] = float("inf"), float("-inf"), float("nan")
    mark_broken(hidden, is_broken)
    assert is_broken.nonzero().flatten().tolist() == [3, 9, 10, 18, 19]
    words = torch.zeros(3, SPAN_ROOM, dtype=torch.int32)
    words[2] = torch.tensor([0, 3, 5, 9, 11, 18] + [18] * (SPAN_ROOM - 6))
    results = torch.full((3, MAX_SPANS), -7, dtype=torch.int32)
    ids, is_finite = ints(6), torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.int8)
    write_prompt_results(ids, is_finite, is_broken, words.flatten(), results)
    assert results[0, :6].tolist() == ids.tolist()
    assert results[1, :6].tolist() == is_finite.tolist()
    assert results[2].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("q_len", [1, 63, 64, 65, 512, 1000])
def test_tiles_of_a_lone_prompt_are_those_it_has_beside_another(q_len: int) -> None:
    beside = list_tiles([q_len, 1], 2)
    assert list_tiles([q_len], 2) == [tile for tile in beside if tile[0] == 0]
    assert len(beside) == len(list_tiles([q_len], 2)) + 1


# --- steps ------------------------------------------------------------------------------------------


def runner(monkeypatch: pytest.MonkeyPatch) -> CudaRunner:
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    monkeypatch.setattr("worker.execution.whole_sizes.WHOLE_TOKENS", 16)
    config = sizes_for(
        CONFIG,
        max_running=RUNNING,
        max_context=CONTEXT,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        max_step_tokens=20,
    )
    backend = TritonBackend(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONTEXT)
    return CudaRunner(MODEL, backend, config, CPU)


def step_of(
    spans: Sequence[tuple[int, int, int]],
    *,
    sampled: Sequence[int],
    params: Sequence[SamplingParams] = (),
    num_decode: int = 0,
    copies: Sequence[PageCopy] = (),
) -> Step:
    """Spans (row, start, end) in pages of their own; those with `params` begin, with tokens past `end`."""
    starts, pages = [], []
    for (row, _, end), how in zip(spans, params, strict=False):
        known = array("I", [(7 * row + 3 * at) % CONFIG.vocab_size for at in range(end + 2)])
        starts.append(RowStart(Row(row), SequenceId(row + 1), row % 3, known, end + 2, how, frozenset()))
        pages += [(row, index, (5 * row + index) % PAGES) for index in range(-(-end // PAGE_SIZE))]
    page_rows, indexes, ids = (
        (array("i", column) for column in zip(*pages, strict=True)) if pages else [array("i")] * 3
    )
    return Step(
        number=1,
        sequence_ids=[SequenceId(row + 1) for row, _, _ in spans],
        rows=array("i", [row for row, _, _ in spans]),
        starts=array("i", [start for _, start, _ in spans]),
        ends=array("i", [end for _, _, end in spans]),
        sampled=sampled,
        num_decode=num_decode,
        row_starts=starts,
        page_copies=copies,
        new_page_rows=page_rows,
        new_page_indexes=indexes,
        new_page_ids=ids,
    )


PLAIN = SamplingParams(temperature=0.8, seed=5)
FILTERED = replace(PLAIN, top_k=9, top_p=0.9, min_p=0.01, seed=-3)
PENALISED, SCORED = replace(PLAIN, presence_penalty=0.5), replace(PLAIN, logprobs=1)
FIRST = ((2, 0, 5), (7, 0, 6), (0, 0, 3))


def noted(monkeypatch: pytest.MonkeyPatch, found: CudaRunner) -> list[StepOutcome | None]:
    """What the message's way makes of each step from here on."""
    outcomes: list[StepOutcome | None] = []
    run = found.prompt_steps.run

    def note(*step: Any, **how: Any) -> StepOutcome | None:
        outcomes.append(run(*step, **how))
        return outcomes[-1]

    monkeypatch.setattr(found.prompt_steps, "run", note)
    return outcomes


def test_a_message_leaves_what_the_other_way_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings with and without filters, a later piece without a token, pages copied before."""
    ways = runner(monkeypatch), runner(monkeypatch)
    outcomes = noted(monkeypatch, ways[0])
    monkeypatch.setattr(ways[1].prompt_steps, "run", lambda *step, **how: None)
    steps = [
        step_of(
            FIRST,
            sampled=[0, 2],
            params=[FILTERED, replace(PLAIN, seed=1 << 60), replace(PLAIN, temperature=0.0)],
        ),
        step_of([(7, 6, 7)], sampled=()),
        step_of([(7, 7, 8), (4, 6, 11)], sampled=[1], params=[], copies=[PageCopy(PageId(10), PageId(21))]),
    ]
    for way in ways:  # row 4 shares a page with row 2 and goes on in a copy of its next one
        way.page_table.write_pages([4, 4, 4, 4], [0, 1, 2, 3], [10, 21, 22, 23])
        way.token_pool.ids[4, :20] = torch.arange(20, dtype=torch.int32)
    for step in steps:
        results = [way.launch(step).result() for way in ways]
        assert list(results[0].token_ids) == list(results[1].token_ids)
        assert len(results[0].token_ids) == len(step.sampled)
        assert results[0].failed == results[1].failed == {}
        assert torch.equal(ways[0].page_table.slots, ways[1].page_table.slots)
        assert torch.equal(ways[0].token_pool.ids[:RUNNING], ways[1].token_pool.ids[:RUNNING])
        assert torch.equal(ways[0]._columns.matrix, ways[1]._columns.matrix)
        for left, right in zip(ways[0].kv_pool.layers, ways[1].kv_pool.layers, strict=True):
            used = slice(PAGES * PAGE_SIZE)
            torch.testing.assert_close(left.k[used], right.k[used], rtol=1e-5, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(left.v[used], right.v[used], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert all(outcome is not None for outcome in outcomes)
    assert len(outcomes) == len(steps)


def test_other_steps_go_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes beside prompts, more spans or tokens than a graph holds, special rows and scored ones."""
    found = runner(monkeypatch)
    outcomes = noted(monkeypatch, found)
    many = [(row, 0, 1 + row % 2) for row in range(9)]
    assert len(found.launch(step_of(many, sampled=range(9), params=[PLAIN] * 9)).result().token_ids) == 9
    assert outcomes == [None], "nine spans"
    long = step_of([(1, 0, 17)], sampled=[0], params=[PLAIN])
    assert found.launch(long).result().failed == {}
    assert outcomes == [None] * 2, "a prompt of 17 tokens"
    for params in (PENALISED, SCORED, replace(PLAIN, prompt_logprobs=0)):
        result = found.launch(step_of([(3, 0, 5)], sampled=[0], params=[params])).result()
        assert len(result.token_ids) == 1
        assert result.failed == {}
    mixed = step_of([(3, 5, 6), (5, 0, 2)], sampled=[0, 1], params=[], num_decode=1)
    assert len(found.launch(mixed).result().token_ids) == 2
    assert len(outcomes) == 2
    assert found.launch(step_of([(3, 0, 5)], sampled=[0], params=[PLAIN])).result().failed == {}
    assert outcomes[2] is not None, "the row is plain again"


def test_a_prompt_that_is_scored_goes_through_the_last_layer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, in pieces beside a decode, and eagerly; next to prompts that are only continued."""
    config = replace(runner(monkeypatch)._config, max_step_tokens=0)
    plain = TorchRunner(MODEL, ReferenceBackend(), config, CPU)
    scored = replace(PLAIN, temperature=0.0, prompt_logprobs=1)
    begin = step_of([(1, 0, 5), (3, 0, 4)], sampled=[0], params=[scored, PLAIN])
    mixed = step_of([(1, 5, 6), (2, 0, 6), (3, 4, 6)], sampled=[0, 1], num_decode=1)
    mixed = mixed._replace(row_starts=[RowStart(Row(2), SequenceId(3), 0, range(8), 8, scored, frozenset())])
    mixed = mixed._replace(**pages_of(2, 6))
    long = step_of([(4, 0, 22)], sampled=[0], params=[scored])  # more tokens than any graph holds
    steps = [begin, mixed, long]
    expected = [plain.launch(step).result() for step in steps]
    found = runner(monkeypatch)
    for step, theirs in zip(steps, expected, strict=True):
        ours = found.launch(step).result()
        assert list(ours.token_ids) == list(theirs.token_ids)
        assert ours.failed == {}
        assert {span: len(records) for span, records in ours.prompt_logprobs.items()} == {
            span: len(records) for span, records in theirs.prompt_logprobs.items()
        }
        for span, records in theirs.prompt_logprobs.items():
            given = [record.logprob for record in ours.prompt_logprobs[span]]
            assert given == pytest.approx([record.logprob for record in records], abs=1e-4)
    assert [list(theirs.prompt_logprobs) for theirs in expected] == [[0], [0, 1], [0]]


def pages_of(row: int, end: int) -> dict[str, Any]:
    """Columns of new pages for a row that begins."""
    count = -(-end // PAGE_SIZE)
    return {
        "new_page_rows": array("i", [row] * count),
        "new_page_indexes": array("i", range(count)),
        "new_page_ids": array("i", [(5 * row + index) % PAGES for index in range(count)]),
    }


def test_more_known_tokens_and_pages_than_a_message_holds_are_sent_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.execution.prompt_steps.TOKEN_ROOM", BLOCK)
    found, expected = runner(monkeypatch), runner(monkeypatch)
    monkeypatch.setattr(expected.prompt_steps, "run", lambda *step, **how: None)
    outcomes = noted(monkeypatch, found)
    room = found.prompt_steps._room
    spans = [(row, 19, 20) for row in range(8)]
    step = step_of(spans, sampled=range(8), params=[PLAIN] * 8)
    assert sum(len(start.token_ids) for start in step.row_starts) > room
    repeats = -(-(room + 1) // len(step.new_page_ids))
    step = step._replace(
        new_page_rows=step.new_page_rows * repeats,
        new_page_indexes=step.new_page_indexes * repeats,
        new_page_ids=step.new_page_ids * repeats,
    )
    for way in (found, expected):
        for layer in way.kv_pool.layers:
            layer.k.zero_()
            layer.v.zero_()
    assert list(found.launch(step).result().token_ids) == list(expected.launch(step).result().token_ids)
    assert outcomes[0] is not None
    assert torch.equal(found.page_table.slots, expected.page_table.slots)
    assert torch.equal(found.token_pool.ids[:RUNNING], expected.token_pool.ids[:RUNNING])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of the NaN
def test_who_reads_what_is_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span whose pages hold NaN, one without a token among them; the others have theirs."""
    found = runner(monkeypatch)
    outcomes = noted(monkeypatch, found)
    first = step_of(FIRST, sampled=[0, 1, 2], params=[PLAIN] * 3)
    good = list(found.launch(first).result().token_ids)
    for layer in found.kv_pool.layers:
        layer.k[found.page_table.slots[7, :4].long()] = float("nan")
    result = found.launch(step_of([(2, 4, 5), (7, 5, 6), (0, 2, 3)], sampled=[0, 1, 2])).result()
    assert list(result.token_ids) == [good[0], NO_TOKEN_ID, good[2]]
    assert result.failed == {1: BAD_HIDDEN}
    result = found.launch(step_of([(7, 4, 5), (0, 2, 3)], sampled=[1])).result()
    assert list(result.token_ids) == [good[2]]
    assert result.failed == {0: BAD_HIDDEN}
    monkeypatch.setattr(found.prompt_steps, "_model", Infinite())
    result = found.launch(step_of([(2, 4, 5), (0, 2, 3)], sampled=[1])).result()
    assert list(result.token_ids) == [NO_TOKEN_ID]
    assert result.failed == {1: BAD_LOGITS}
    assert None not in outcomes


class Infinite:
    """A head that overflows."""

    config = CONFIG

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.full((len(hidden), CONFIG.vocab_size), float("inf"))


def test_a_step_of_nobody_changes_the_dummy_row_and_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = runner(monkeypatch)
    tables = [found.page_table.slots.clone(), found.token_pool.ids.clone(), found._columns.matrix.clone()]
    pages = found.kv_pool.buffer[:, :, :PAGES].clone()
    with torch.inference_mode():
        found.prompt_steps.run_bodies()
    assert torch.equal(found.page_table.slots, tables[0])
    assert torch.equal(found.token_pool.ids[:RUNNING], tables[1][:RUNNING])
    assert torch.equal(found._columns.matrix[:, :RUNNING], tables[2][:, :RUNNING])
    assert np.array_equal(found.kv_pool.buffer[:, :, :PAGES].numpy(), pages.numpy(), equal_nan=True)
