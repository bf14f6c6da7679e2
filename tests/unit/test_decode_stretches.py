"""Decode attention with an equal stretch of the tokens for every program, through Triton's interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import dataclasses
import itertools
import random

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.decode_plan import MANY, MAX_CHUNKS, NO_ROW, ROOM, UNEQUAL, DecodePlan, make_plan, plan_decode
from kernels.paged_decode import paged_decode
from kernels.testing import random_paged_problem

DRAW = random.Random(3)
BATCHES = {
    "one length, more than a wave": [800] * 72,
    "one wave": [640] * 8,
    "one wave but for the last token": [745] * 20,
    "one wave, padded": [500] * 33 + [1] * 31,
    "drawn": [DRAW.randint(100, 1700) for _ in range(130)],
    "long and short": [32_000, *[100] * 6, *[5, 70, 64, 300]],
    "padding behind": [DRAW.randint(1200, 2000) for _ in range(17)] + [1] * 7,
    "all short": [DRAW.randint(1, 50) for _ in range(256)],
}


def planned(
    lengths: list[int], kv_heads: int = 8, multiprocessors: int = 132, padding: int = 0
) -> DecodePlan:
    """A plan of these lengths and of spans of the dummy row; the multiprocessors of an H200 unless said
    otherwise.
    """
    lengths = lengths + [1] * padding
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    roomy = make_plan(len(lengths), kv_heads, kv_heads, 16, 65_536, kv_lens.device, chunk_scale=1)
    plan = dataclasses.replace(roomy, multiprocessors=multiprocessors, chunk_scale=None)
    assert plan.launch_of(len(lengths)) == MANY
    rows = torch.arange(len(lengths), dtype=torch.int32).clamp(max=len(lengths) - padding)
    plan_decode(plan, rows, kv_lens, dummy_row=len(lengths) - padding if padding else NO_ROW)
    return plan


def pieces(plan: DecodePlan) -> list[list[int]]:
    """Tokens of each piece of each stretch."""
    listed = plan.chunks[: int(plan.num_chunks)].tolist()
    tokens = [end - begin for _, _, begin, end, *_ in listed]
    first = plan.stretches[: plan.num_stretches(len(plan.spans)) + 1].tolist()
    return [tokens[a:b] for a, b in itertools.pairwise(first)]


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_stretches_hold_every_token_once_and_are_of_equal_work(lengths: list[int]) -> None:
    plan = planned(lengths)
    listed = plan.chunks[: int(plan.num_chunks)].tolist()
    for span, length in enumerate(lengths):
        mine = [record[1:7] for record in listed if record[0] == span]
        edges = [0, *(end for _, _, end, *_ in mine)]
        assert edges[-1] == length
        assert mine == [
            [span, edges[index], edges[index + 1], index, len(mine), length - 1] for index in range(len(mine))
        ]
        assert edges == sorted(set(edges)), "a piece without tokens"
        assert len(mine) <= MAX_CHUNKS
    count = plan.num_stretches(len(lengths))
    assert count * 8 == plan.num_programs(len(lengths)) == 528
    first = plan.stretches[: count + 1].tolist()
    assert first == sorted(first)
    assert first[0] == 0
    assert first[-1] == len(listed)
    work = [sum(tokens) + ROOM * len(tokens) for tokens in pieces(plan)]
    equal = max(sum(lengths) + ROOM * len(listed), count * 64) / count
    is_wave = max(map(len, pieces(plan))) == 1
    assert max(work) <= 1.05 * equal + 3 * ROOM + (UNEQUAL if is_wave else 0)


@pytest.mark.parametrize(
    ("lengths", "padding", "longest"),
    [
        ([1500] * 11, 5, 256),  # six pieces each fill all 66 stretches: padding has none
        ([640] * 24, 0, 320),  # 2.75 stretches each: two larger pieces, not three in 66
        ([3500] * 14, 2, 896),  # 4.7 stretches each: four larger pieces
        ([320] * 33, 7, 160),
        ([600] * 40, 0, 600),  # an equal share has 364 tokens
    ],
)
def test_a_little_longer_pieces_are_one_wave_rather_than_two_pieces_a_program(
    lengths: list[int], padding: int, longest: int
) -> None:
    found = pieces(planned(lengths, padding=padding))
    assert max(map(len, found)) == 1
    assert max(max(piece, default=0) for piece in found) == longest


@pytest.mark.parametrize("lengths", [[640] * 33 + [900], [1500] * 48])
def test_much_longer_pieces_are_no_wave(lengths: list[int]) -> None:
    assert max(map(len, pieces(planned(lengths)))) == 2


def test_the_dummy_row_has_no_piece_and_a_batch_of_nothing_else_none() -> None:
    plan = planned([700] * 70, padding=10)
    listed = plan.chunks[: int(plan.num_chunks), :2].tolist()
    assert [span for span, _ in listed] == sorted(span for span, _ in listed)
    assert {span for span, _ in listed} == set(range(70))
    assert all(span == row for span, row in listed)
    assert int(planned([], padding=8).num_chunks) == 0


def test_results_and_slots_of_padding_are_left_as_they_were() -> None:
    """As a graph has it: the last rows of a batch are the dummy row, and its page is not read either."""
    problem = random_paged_problem(
        q_lens=[1] * 7, kv_lens=[40, 7, 90, 33, 5, 1, 1], num_heads=4, num_kv_heads=2, head_dim=32
    )
    kv, batch, scale = problem.copy_of_kv(), problem.batch, problem.scale
    kv.k[batch.write_slots.long()], kv.v[batch.write_slots.long()] = problem.k, problem.v
    expected = reference.paged_attention(problem.q, kv, batch, scale=scale)
    dummy_row = batch.page_table.shape[0] - 1
    rows = batch.rows.clone()
    rows[5:] = dummy_row
    head_dim = problem.q.shape[2]
    plan = dataclasses.replace(make_plan(7, 4, 2, head_dim, 512, problem.q.device), multiprocessors=3)
    plan_decode(plan, rows, batch.kv_lens, dummy_row=dummy_row)
    out = torch.full_like(problem.q, 7.0)
    paged_decode(problem.q, kv, batch.page_table, plan, scale=scale, out=out)
    torch.testing.assert_close(out[:5], expected[:5], rtol=1e-5, atol=1e-5)
    assert (out[5:] == 7.0).all()


@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize("kv_lens", [[300, 1, 70, 129, 64, 5], [33, 500, 2, 40, 41, 42, 43]])
def test_attention_over_stretches_equals_the_reference(kv_lens: list[int], multiprocessors: int) -> None:
    """On a NaN-filled pool, twice with the same counters: programs with several pieces and with none."""
    problem = random_paged_problem(
        q_lens=[1] * len(kv_lens), kv_lens=kv_lens, num_heads=4, num_kv_heads=2, head_dim=32
    )
    kv, batch, scale = problem.copy_of_kv(), problem.batch, problem.scale
    kv.k[batch.write_slots.long()], kv.v[batch.write_slots.long()] = problem.k, problem.v
    expected = reference.paged_attention(problem.q, kv, batch, scale=scale)
    plan = make_plan(len(kv_lens), 4, 2, 32, 512, problem.q.device)
    plan = dataclasses.replace(plan, multiprocessors=multiprocessors)
    for _ in range(2):
        plan_decode(plan, batch.rows, batch.kv_lens)
        ours = paged_decode(problem.q, kv, batch.page_table, plan, scale=scale)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert plan.arrived.count_nonzero() == 0
    assert plan.queue.item() == 0
