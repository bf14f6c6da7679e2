"""Products of few rows by clusters: which it takes, and that it compiles for what it is written for.

Its results are tested on a GPU (tests/gpu/test_sliced_product_gpu.py): Gluon has no interpreter.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import sliced_launch
from kernels.sliced_launch import SlicedLaunch, choose_launch

SHARED_BYTES = 227 << 10  # of a multiprocessor of an H200, for all its programs
QWEN_06B = {
    "qkv": (4096, 1024, False, False),
    "output": (1024, 2048, False, True),
    "gate and up": (6144, 1024, True, False),
    "down": (1024, 3072, False, True),
}
LLAMA_8B = {
    "qkv": (6144, 4096, False, False),
    "output": (4096, 4096, False, True),
    "gate and up": (28_672, 4096, True, False),
    "down": (4096, 14_336, False, True),
    "head": (128_256, 4096, False, False),
}


def choice(outputs: int, width: int, gated: bool, adds: bool) -> SlicedLaunch | None:
    return choose_launch(outputs, width, gated=gated, adds=adds)


@pytest.mark.parametrize("shape", QWEN_06B.values(), ids=QWEN_06B)
def test_of_a_small_layer_all_are_taken_with_room_for_all_of_the_weight(shape):
    """Its part of the weight and of 64 rows of the input, both whole; one wave of programs."""
    launch = choice(*shape)
    assert launch is not None
    tile = launch.outputs * (2 if shape[2] else 1)
    assert 2 * (tile + 64) * shape[1] // launch.programs <= SHARED_BYTES
    assert shape[0] // tile * launch.programs <= sliced_launch.MULTIPROCESSORS


@pytest.mark.parametrize(
    "shape",
    [
        *LLAMA_8B.values(),
        (151_936, 1024, False, False),
        (4090, 1024, False, False),
        (1024, 4864, False, True),
        (1024, 2080, False, True),
    ],
    ids=[*LLAMA_8B, "small head", "part of a tile", "too long", "part of a block"],
)
def test_of_large_layers_heads_and_what_does_not_come_out_even_none_is_taken(shape):
    assert choice(*shape) is None


def test_it_is_taken_by_rows_and_by_what_is_copied(monkeypatch):
    monkeypatch.setattr(sliced_launch, "is_there", lambda device: True)

    def is_taken(rows: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x, weight = torch.empty(rows, 1024, dtype=dtype), torch.empty(4096, 1024, dtype=dtype)
        return sliced_launch.sliced_launch(x, weight) is not None

    assert [is_taken(rows) for rows in (1, 2, 64, 65)] == [False, True, True, False]
    assert not is_taken(64, dtype=torch.float32)
    monkeypatch.undo()
    assert not is_taken(64)  # a processor


PROGRAM = """
import torch
from kernels.testing_driver import AbsentGpu
gpu = AbsentGpu()
from triton import knobs
from kernels import compile_processes, dependent_launch, few_rows, sliced_product
from kernels.compile_ahead import compiling
from kernels.sliced_launch import SlicedLaunch

def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)

hits = []
knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
compile_processes._begun.append(compile_processes.CompileProcesses(["kernels.sliced_product"], 1))
with compiling(torch.device("cpu")):
    few_rows.product(empty(40, 1024), empty(256, 1024), launch=SlicedLaunch())
print(hits, gpu.loaded)

dependent_launch._is_supported = lambda device: True
with dependent_launch.dependent_launches():
    launch = SlicedLaunch(programs=8)
    few_rows.add_product(empty(40, 1024), empty(256, 1024), empty(40, 256), empty(256), launch=launch)
assert gpu.launched == ["sliced_kernel"], gpu.launched
(kernels, *_), = sliced_product.sliced_kernel.device_caches.values()
kernel = list(kernels.values())[-1]
ptx = kernel.asm["ptx"]
early, _, late = ptx.partition("griddepcontrol.wait")
print(early.count("cp.async.cg"), *(late.count(name) for name in ("cp.async.cg", "wgmma.mma_async", "mapa")))
print(kernel.metadata.num_ctas, kernel.metadata.shared)
scaled = few_rows.Scaled(empty(64, 1024), torch.empty(64, few_rows.MAX_ROWS))
few_rows.product(scaled, empty(512, 1024), gated=True, launch=SlicedLaunch(programs=2, warps=8))
kernel = list(kernels.values())[-1]
print(kernel.metadata.num_ctas, kernel.metadata.shared)
launch = SlicedLaunch(outputs=512, programs=8, warps=8)
try:
    few_rows.product(empty(128, 1024), empty(1024, 1024), launch=launch)
except AssertionError as error:
    print(error)
"""


def test_it_compiles_here_and_in_a_process(run_on_absent_gpu: Callable[[str], list[str]]):
    """With the instructions that it is for; what a process compiled is found in the cache."""
    compiled, instructions, small, gated, refused = run_on_absent_gpu(PROGRAM)
    early, late, products, taken = map(int, instructions.split())
    assert early == 64 * 128 // 8 // 128, "not all of a program's weight is asked for before the wait"
    assert late == early, "the input is not asked for behind it"
    assert products > 0, "no product by warp groups"
    assert taken == 8, "sums are not taken from all programs of the cluster"
    # Weight and input and no more, or sums would be put over something else.
    assert small == f"8 {2 * (64 + 64) * 128}"
    assert gated == f"2 {2 * (128 + 64) * 512}"
    assert refused == "264704 bytes of sums over 163840 of weight and input"
    assert compiled == "[True] ['sliced_kernel']"


def test_of_many_rows_those_that_add_to_a_residual_are_taken_alone():
    """With room for 128 rows of the input beside a program's weight."""
    for name, shape in QWEN_06B.items():
        outputs, width, gated, adds = shape
        launch = choose_launch(outputs, width, gated=gated, adds=adds, num_rows=65)
        assert (launch is not None) == adds, name
        if launch is not None:
            assert 2 * (launch.outputs + 128) * width // launch.programs <= SHARED_BYTES
    assert all(
        choose_launch(outputs, width, gated=gated, adds=adds, num_rows=128) is None
        for outputs, width, gated, adds in LLAMA_8B.values()
    )
