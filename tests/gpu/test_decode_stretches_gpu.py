"""Decode attention of many sequences on a GPU: an equal stretch of all tokens for every program."""

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.decode_plan import make_plan, plan_decode
from kernels.dependent_launch import dependent_launches
from kernels.paged_decode import paged_decode
from kernels.testing import PagedProblem, assert_no_worse, random_paged_problem

pytestmark = pytest.mark.gpu
DRAW = random.Random(11)
BATCHES = {
    "more than a wave": [800] * 72,
    "drawn": [DRAW.randint(1, 1700) for _ in range(131)],
    "one long": [9000, *[100] * 6, *[5, 70, 64, 300]],
    "padding behind": [DRAW.randint(300, 900) for _ in range(17)] + [1] * 7,
    "all": [DRAW.randint(30, 400) for _ in range(256)],
}


def drawn_problem(kv_lens: list[int], heads: int, kv_heads: int, dim: int) -> tuple[PagedProblem, Tensor]:
    """K and V of the step stored; exact attention, fp64 [num_spans, heads, dim]."""
    problem = random_paged_problem(
        q_lens=[1] * len(kv_lens), kv_lens=kv_lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    reference.store_kv(problem.k, problem.v, problem.kv, problem.batch.write_slots)
    exact = torch.empty_like(problem.q, dtype=torch.float64)
    for span, (row, length) in enumerate(zip(problem.batch.rows_host, kv_lens, strict=True)):
        slots = problem.batch.page_table[row, :length].long()
        pool = (problem.kv.k, problem.kv.v)
        k, v = (part[slots].double().repeat_interleave(heads // kv_heads, 1) for part in pool)
        scores = torch.einsum("hd,thd->ht", problem.q[span].double(), k) * problem.scale
        exact[span] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
    return problem, exact


@pytest.mark.parametrize("kv_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (9, 3, 64)])
def test_many_sequences_equal_exact_attention_in_every_replay(kv_lens, heads, kv_heads, dim):
    """On a NaN-filled pool; the list is made anew in the graph, dependent launches leave the same bits."""
    problem, exact = drawn_problem(kv_lens, heads, kv_heads, dim)
    batch = problem.batch
    plan = make_plan(len(kv_lens), heads, kv_heads, dim, max(kv_lens), problem.q.device)
    assert plan.is_stretched(len(kv_lens))
    plain = reference.paged_attention(problem.q, problem.kv, batch, scale=problem.scale)
    found = []
    for is_dependent in (False, True):
        with dependent_launches(is_dependent):
            for _ in range(10):
                plan_decode(plan, batch.rows, batch.kv_lens)
                found += [paged_decode(problem.q, problem.kv, batch.page_table, plan, scale=problem.scale)]
                found += [paged_decode(problem.q, problem.kv, batch.page_table, plan, scale=problem.scale)]
    assert_no_worse(found[0], plain=plain, exact=exact)
    assert all(torch.equal(found[0], other) for other in found)
    assert plan.arrived.count_nonzero() == 0
    assert plan.queue.item() == 0


def test_a_plan_follows_its_batch():
    """One plan for batches of several sizes, one behind the other: nothing of the last list is left."""
    problems = [
        drawn_problem(BATCHES[name], 16, 8, 128) for name in ("all", "more than a wave", "padding behind")
    ]
    plan = make_plan(256, 16, 8, 128, 1024, torch.device("cuda", 0))
    for _ in range(3):
        for problem, exact in problems:
            batch = problem.batch
            plan_decode(plan, batch.rows, batch.kv_lens)
            ours = paged_decode(problem.q, problem.kv, batch.page_table, plan, scale=problem.scale)
            plain = reference.paged_attention(problem.q, problem.kv, batch, scale=problem.scale)
            assert_no_worse(ours, plain=plain, exact=exact)
