"""Decode attention by clusters: which batches it takes, and what it compiles to.

Its results are tested on a GPU (tests/gpu/test_cluster_decode_gpu.py): Gluon has no interpreter.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import cluster_launch
from kernels.batch import KvLayer
from kernels.decode_plan import FEW, make_plan
from kernels.triton_backend import TritonBackend


def is_taken(
    rows: int,
    heads: int = 16,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    pool: torch.dtype = torch.bfloat16,
    most_tokens: int = 4096,
) -> bool:
    kv = KvLayer(*(torch.empty(64, kv_heads, dim, dtype=pool) for _ in range(2)))
    return cluster_launch.cluster_launch(rows, heads, dtype, kv, most_tokens) is not None


def test_it_is_taken_by_rows_heads_lengths_and_what_pages_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_launch, "is_there", lambda device: True)
    assert [is_taken(rows) for rows in (1, 2)] == [True, False]
    longest = cluster_launch.LONGEST
    assert [is_taken(1, most_tokens=most) for most in (longest, longest + 1)] == [True, False]
    assert is_taken(1, heads=32)
    assert is_taken(1, dim=64)
    assert not is_taken(1, heads=24)  # of three queries a group
    assert not is_taken(1, heads=128)  # of sixteen
    assert not is_taken(1, dim=80)
    assert not is_taken(1, dtype=torch.float32, pool=torch.float32)
    assert not is_taken(1, pool=torch.float8_e4m3fn)
    monkeypatch.undo()
    assert not is_taken(1)  # a processor


def test_a_lone_sequence_takes_the_graph_of_two_rows_where_it_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the kernel of several; lengths are known when a graph is replayed, not when it is made."""
    table = torch.zeros(5, 2 * cluster_launch.LONGEST, dtype=torch.int32)
    decode = TritonBackend(16, 8, 128, table.shape[1]).static_decode(table, 4)
    kv = KvLayer(*(torch.empty(64, 8, 128, dtype=torch.bfloat16) for _ in range(2)))
    longest = cluster_launch.LONGEST
    assert decode.least_size([longest + 1], kv) == 1  # a processor
    monkeypatch.setattr(cluster_launch, "is_there", lambda device: True)
    sizes = [decode.least_size(lens, kv) for lens in ([longest], [longest + 1], [longest + 1, 3], [])]
    assert sizes == [1, 2, 1, 1]
    fp8 = KvLayer(kv.k.to(torch.float8_e4m3fn), kv.v.to(torch.float8_e4m3fn))
    assert decode.least_size([longest + 1], fp8) == 1


def test_a_plan_with_chunks_or_a_launch_of_its_own_is_no_place_for_it() -> None:
    """Chunks by length are the promise of bits that do not depend on company."""
    sizes = (4, 16, 8, 128, 4096, torch.device("cpu"))
    assert make_plan(*sizes).follows_batch
    assert not make_plan(*sizes, chunk_scale=1).follows_batch
    assert not make_plan(*sizes, launch=FEW).follows_batch


# Prints of each kernel: bytes of shared memory, instructions that must be there, and of what is asked for
# before the wait for the product.
PROGRAM = """
import torch
from kernels.testing_driver import AbsentGpu
gpu = AbsentGpu()
from kernels import dependent_launch, launcher, paged_decode
from kernels.cluster_launch import ClusterLaunch
from kernels.testing_decode import DecodeProblem

dependent_launch._is_supported = lambda device: True

def describe(shape, launch, attend):
    launcher._compiled.clear()
    paged_decode.cluster_launch = lambda *arguments: launch
    problem = DecodeProblem(shape, 16, [40], with_norm=True, dtype=torch.bfloat16)
    plan = problem.plan()
    with dependent_launch.dependent_launches():
        attend(problem, problem.kv, plan)
    (kernel,) = (one for one in launcher._compiled.values() if one.name == "cluster_kernel")
    ptx = kernel.asm["ptx"]
    early, _, late = ptx.partition("griddepcontrol.wait")
    counts = (early.count("ld.global.cg.v4"), ptx.count("mma.sync"), ptx.count("st.async"))
    print(kernel.metadata.num_ctas, kernel.metadata.shared, *counts, ptx.count("bar.sync"))

describe((16, 8, 128), ClusterLaunch(), DecodeProblem.by_one)
describe((32, 8, 128), ClusterLaunch(8, 8), DecodeProblem.by_two_kernels)
describe((4, 4, 64), ClusterLaunch(), DecodeProblem.by_one)
"""


@pytest.mark.slow
def test_a_warp_waits_for_no_other_and_k_and_v_are_asked_for_early(
    run_on_absent_gpu: Callable[[str], list[str]],
) -> None:
    """Shared memory is what the kernel counts on, or the compiler would put something of its own in it."""
    lone, eights, small = (tuple(map(int, line.split())) for line in run_on_absent_gpu(PROGRAM))
    # Of 16 tokens a warp has 256 bytes of K and of V each: 16 bytes a thread and load. Of the products 16 are
    # a turn's, and there are three; 8 are the new token's. Warps meet once.
    assert lone == (16, 8192, 16, 56, 2, 1)
    assert eights == (8, 32768, 0, 48, 2, 1)
    assert small == (16, 4096, 8, 28, 2, 1)
