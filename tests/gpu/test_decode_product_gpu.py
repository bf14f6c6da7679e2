"""Decode attention of the qkv product on a device: against its two kernels, and begun early in a chain."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import fp8
from kernels.batch import KvLayer
from kernels.decode_plan import BESIDE, FEW, MANY, DecodeLaunch, DecodePlan, plan_decode
from kernels.dependent_launch import allow_dependent_launches, dependent_launches
from kernels.few_rows import product
from kernels.matvec import matvec
from kernels.paged_decode import paged_decode_product
from kernels.testing_decode import DecodeProblem, bits, copied

pytestmark = pytest.mark.gpu
EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 2049, 4096]
LAYERS, STEPS = 12, 24
QUEUED = DecodeLaunch(block=32, warps=4, stages=3, programs_per_sm=1, wave_per_sm=2)
"""More tiles than programs: each layer's programs take theirs from one queue."""


def check(problem: DecodeProblem, launch: DecodeLaunch | None, pool: KvLayer | None = None) -> None:
    """Close to two kernels in bf16; V, and every slot but the new tokens', bit for bit."""
    pool = pool or problem.kv
    one, two, plan = copied(pool), copied(pool), problem.plan(launch)
    expected = problem.by_two_kernels(two, plan)
    ours = problem.by_one(one, plan)
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
    assert plan.arrived.count_nonzero() == 0
    assert plan.queue.item() == 0
    slots = problem.slots.long()
    torch.testing.assert_close(one.k[slots].float(), two.k[slots].float(), rtol=8e-3, atol=1e-2)
    assert torch.equal(bits(KvLayer(one.v, one.v)), bits(KvLayer(two.v, two.v)))
    one.k[slots] = two.k[slots]
    assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "with_norm"),
    [
        (2, 2, 64, True),
        (16, 8, 128, True),
        (32, 8, 128, False),
        (7, 1, 80, False),
        (9, 3, 64, False),
        (16, 1, 256, True),
    ],
)
def test_groups_and_head_sizes_leave_what_two_kernels_do(
    heads: int, kv_heads: int, dim: int, with_norm: bool
) -> None:
    """Pages of 1 to 256 tokens; one sequence, and more than have the short tiles' launch."""
    page = [1, 16, 64, 256][(heads + dim // 16) % 4]
    for kv_lens in ([700], [1, 130, 700, 37, 261]):
        problem = DecodeProblem(
            (heads, kv_heads, dim), page, kv_lens, with_norm=with_norm, dtype=torch.bfloat16, device="cuda"
        )
        check(problem, None)


@pytest.mark.parametrize("launch", [FEW, MANY, BESIDE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_lengths_at_every_edge_leave_what_two_kernels_do(dtype: torch.dtype, launch: DecodeLaunch) -> None:
    if dtype == torch.float32:
        launch = replace(launch, stages=2)  # its turns are twice the bytes
    check(DecodeProblem((8, 2, 64), 16, EDGES, with_norm=True, dtype=dtype, device="cuda"), launch)


@pytest.mark.parametrize("kv_lens", [[600], EDGES])
def test_e4m3_pages_get_and_give_what_two_kernels_do(kv_lens: list[int]) -> None:
    problem = DecodeProblem((16, 8, 128), 16, kv_lens, with_norm=True, dtype=torch.bfloat16, device="cuda")
    kv = problem.kv
    pool = KvLayer(fp8.to_fp8(kv.k.float(), 0.02), fp8.to_fp8(kv.v.float(), 0.05), 0.02, 0.05)
    check(problem, None, pool)


@pytest.mark.parametrize("attend", [DecodeProblem.by_one, DecodeProblem.by_two_kernels])
def test_a_query_that_is_no_number_makes_its_heads_none_over_e4m3_pages(
    attend: Callable[[DecodeProblem, KvLayer, DecodePlan], Tensor],
) -> None:
    """They are multiplied in fp16, for which queries are cut off: a minimum would drop NaN."""
    problem = DecodeProblem((4, 2, 128), 16, [70, 130], with_norm=False, dtype=torch.bfloat16, device="cuda")
    problem.qkv[1, :256] = float("nan")  # of the first KV head's two
    kv = problem.kv
    pool = KvLayer(fp8.to_fp8(kv.k.float(), 0.02), fp8.to_fp8(kv.v.float(), 0.05), 0.02, 0.05)
    is_nan = attend(problem, pool, problem.plan()).isnan()
    assert is_nan[1, :2].all()
    assert not is_nan[0].any()
    assert not is_nan[1, 2:].any()


@pytest.mark.parametrize("attend", [DecodeProblem.by_one, DecodeProblem.by_two_kernels])
def test_what_is_no_number_is_stored_as_none_in_e4m3_pages(
    attend: Callable[[DecodeProblem, KvLayer, DecodePlan], Tensor],
) -> None:
    """What is too large is cut off; a minimum would make NaN a number, too."""
    problem = DecodeProblem((4, 2, 128), 16, [70, 130], with_norm=False, dtype=torch.bfloat16, device="cuda")
    problem.qkv[0, 512:], problem.qkv[1, 512:] = 1e9, float("nan")  # K and V of both KV heads
    kv, (large, nothing) = problem.kv, problem.slots.tolist()
    pool = KvLayer(fp8.to_fp8(kv.k.float(), 0.02), fp8.to_fp8(kv.v.float(), 0.05), 0.02, 0.05)
    attend(problem, pool, problem.plan())
    assert pool.k[nothing].float().isnan().all()
    assert pool.v[nothing].float().isnan().all()
    assert (pool.v[large].float() == fp8.LARGEST).all()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "launch"),
    [(1, None), (2, None), (4, None), (4, QUEUED), (8, None), (16, None), (64, None), (64, BESIDE)],
)
def test_a_chain_that_begins_early_leaves_the_bits_of_one_that_waits(
    num_rows: int, launch: DecodeLaunch | None, with_norm: bool
) -> None:
    """Attention reads list, slots, K and V of earlier tokens before its product is there. In every step of a
    graph all of these change: lengths, so the list; rows, so slots; and pages, which pass from one row to
    another with new content, as a pool's do.
    """
    left = [_replayed(num_rows, launch, with_norm, is_dependent) for is_dependent in (False, True)]
    for ordinary, early in zip(*left, strict=True):
        assert torch.equal(ordinary, early)


def _replayed(
    num_rows: int, launch: DecodeLaunch | None, with_norm: bool, is_dependent: bool
) -> list[Tensor]:
    """Outputs of the last layer in each of STEPS replays, then all pools."""
    draw, width = random.Random(num_rows), 1024
    lens = [draw.randrange(200, width - STEPS) for _ in range(num_rows)]
    problem = DecodeProblem(
        (16, 8, 128), 16, [width] * num_rows, with_norm=with_norm, dtype=torch.bfloat16, device="cuda"
    )
    normal = torch.Generator("cuda").manual_seed(num_rows)
    pools = [copied(problem.kv) for _ in range(LAYERS)]
    for pool in pools:
        pool.k.normal_(generator=normal)
        pool.v.normal_(generator=normal)
    mix = torch.randn(4096, 2048, generator=normal, device="cuda").to(torch.bfloat16) / 45
    plan = problem.plan(launch)
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    kv_lens = torch.full((num_rows,), width, dtype=torch.int32, device="cuda")
    start, out = problem.qkv.clone(), torch.empty(num_rows, 2048, dtype=torch.bfloat16, device="cuda")
    allow_dependent_launches(is_dependent)
    try:
        with dependent_launches():
            graph = _captured(problem, pools, plan, rows, kv_lens, start, mix, out)
        left = []
        for step in range(STEPS):
            now = [length + step for length in lens]
            draw.shuffle(now)
            kv_lens.copy_(torch.tensor(now, dtype=torch.int32))
            order = draw.sample(range(num_rows), num_rows)
            problem.page_table[:num_rows] = problem.page_table[order]
            start.normal_(generator=normal)
            graph.replay()
            left.append(out.clone())
    finally:
        allow_dependent_launches(True)
    return [*left, *(part for pool in pools for part in (pool.k, pool.v))]


def _captured(
    problem: DecodeProblem,
    pools: list[KvLayer],
    plan: DecodePlan,
    rows: Tensor,
    kv_lens: Tensor,
    start: Tensor,
    mix: Tensor,
    out: Tensor,
) -> torch.cuda.CUDAGraph:
    """Layers in turn, each product out of the attention before it, by kernels that begin early."""
    num_rows = len(rows)

    def body() -> None:
        plan_decode(plan, rows, kv_lens)
        qkv = start
        for pool in pools:
            attended = paged_decode_product(
                qkv, pool, problem.page_table, plan, problem.rotary, scale=128**-0.5
            )
            flat = attended.flatten(1)
            qkv = matvec(flat, mix) if num_rows == 1 else product(flat, mix)
        out.copy_(attended.flatten(1))

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph
