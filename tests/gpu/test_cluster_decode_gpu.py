"""Decode attention by clusters on a GPU: no worse than plain torch, and the bits of its two forms."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import launcher, paged_decode
from kernels.batch import KvLayer
from kernels.cluster_launch import ClusterLaunch, is_there
from kernels.decode_plan import FEW, DecodePlan
from kernels.testing import assert_no_worse
from kernels.testing_decode import DecodeProblem, bits, copied
from kernels.testing_delays import compiled_anew, with_delays

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 257, 1023, 1024, 1025, 2049, 5000]
"""Of one warp's turn, of all warps' and of a cluster's: at the edges of each."""
CASES = [  # heads, KV heads, head_dim; launch
    ((16, 8, 128), ClusterLaunch()),
    ((32, 8, 128), ClusterLaunch(programs=8, warps=8)),
    ((8, 8, 64), ClusterLaunch()),
    ((16, 2, 64), ClusterLaunch(programs=4, warps=8)),
]


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not is_there(DEVICE):
        pytest.skip("needs clusters (compute capability 9.0), and Gluon")


def taken(monkeypatch: pytest.MonkeyPatch, launch: ClusterLaunch | None) -> None:
    monkeypatch.setattr(paged_decode, "cluster_launch", lambda *arguments: launch)


def plain(problem: DecodeProblem, kv: KvLayer, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention of q over what lies in `kv`, one sequence after the other."""
    group = q.shape[1] // kv.k.shape[1]
    rows = []
    for row, length, one in zip(problem.rows.tolist(), problem.kv_lens.tolist(), q, strict=True):
        slots = problem.page_table[row, :length].long()
        k, v = (pool[slots].to(dtype).repeat_interleave(group, 1) for pool in (kv.k, kv.v))
        scores = torch.einsum("hd,thd->ht", one.to(dtype), k) * q.shape[2] ** -0.5
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(1), v))
    return torch.stack(rows)


@pytest.mark.parametrize(("shape", "launch"), CASES, ids=str)
def test_lengths_at_every_edge_are_no_worse_than_plain_torch(
    shape: tuple[int, int, int], launch: ClusterLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that hold no token of a sequence are NaN."""
    for kv_lens in ([length] for length in LENGTHS):
        problem = DecodeProblem(shape, 16, kv_lens, with_norm=True, dtype=torch.bfloat16, device=DEVICE)
        kv, q = copied(problem.kv), torch.randn(1, shape[0], shape[2], device=DEVICE).bfloat16()
        problem.by_two_kernels(kv, problem.plan())  # stores the new token
        taken(monkeypatch, launch)
        ours = paged_decode.paged_decode(q, kv, problem.page_table, problem.plan(), scale=shape[2] ** -0.5)
        assert_no_worse(
            ours,
            plain=plain(problem, kv, q, torch.bfloat16),
            exact=plain(problem, kv, q, torch.float64),
        )


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("shape", "launch"), CASES[:3], ids=str)
def test_from_the_product_it_leaves_what_two_kernels_do(
    shape: tuple[int, int, int], with_norm: bool, launch: ClusterLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kv_lens in (*([length] for length in LENGTHS), [1, 1600, 3, 640]):
        problem = DecodeProblem(shape, 16, kv_lens, with_norm=with_norm, dtype=torch.bfloat16, device=DEVICE)
        one, two, plan = copied(problem.kv), copied(problem.kv), problem.plan(FEW)
        taken(monkeypatch, None)
        expected = problem.by_two_kernels(two, plan)
        taken(monkeypatch, launch)
        ours = problem.by_one(one, problem.plan())
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
        slots = problem.slots.long()
        torch.testing.assert_close(one.k[slots].float(), two.k[slots].float(), rtol=8e-3, atol=1e-2)
        one.k[slots] = two.k[slots]
        assert torch.equal(bits(one), bits(two))


def test_a_broken_row_has_no_numbers_and_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken(monkeypatch, ClusterLaunch())
    problem = DecodeProblem((16, 8, 128), 16, [700, 40], with_norm=True, dtype=torch.bfloat16, device=DEVICE)
    alone = problem.by_one(copied(problem.kv), problem.plan())
    problem.qkv[1, 256:512] = float("nan")  # of the second KV head's two
    left = problem.by_one(copied(problem.kv), problem.plan())
    assert left[1, 2:4].isnan().all()
    left[1, 2:4] = alone[1, 2:4]
    assert torch.equal(left, alone)


@pytest.mark.parametrize("attend", [DecodeProblem.by_one, DecodeProblem.by_two_kernels])
@pytest.mark.parametrize(("shape", "launch"), CASES[:2], ids=str)
def test_delays_change_no_bit_in_a_graph(
    shape: tuple[int, int, int],
    launch: ClusterLaunch,
    attend: Callable[[DecodeProblem, KvLayer, DecodePlan], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """300 times in a graph, with sleeps wherever warps and programs hand over to one another."""
    from kernels.cluster_decode import cluster_kernel  # where the device has what it is written for

    taken(monkeypatch, launch)
    monkeypatch.setattr(launcher, "_compiled", {})
    problem = DecodeProblem(shape, 16, [700], with_norm=True, dtype=torch.bfloat16, device=DEVICE)
    kv, plan = copied(problem.kv), problem.plan()
    expected = attend(problem, kv, plan)
    wrong, graph = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.cuda.CUDAGraph()
    launcher._compiled.clear()
    with compiled_anew([cluster_kernel], tmp_path, with_delays):
        attend(problem, kv, plan)
        with torch.cuda.graph(graph):
            for _ in range(10):
                wrong += (attend(problem, kv, plan) != expected).sum()
        for _ in range(30):
            graph.replay()
        assert wrong.item() == 0
