"""The kernel of products of 33 to 64 rows: which it takes, and that it compiles for what it is written for.

Its results are tested on a GPU (tests/gpu/test_ring_product_gpu.py): Gluon has no interpreter.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import ring_launch
from kernels.ring_launch import RingLaunch, choose_launch

SHARED_BYTES = 227 << 10  # of a multiprocessor of an H200, for all its programs
LLAMA_8B = {
    "qkv": (6144, 4096, False, False),
    "output": (4096, 4096, False, True),
    "gate and up": (28_672, 4096, True, False),
    "down": (4096, 14_336, False, True),
    "head": (128_256, 4096, False, False),
}

QWEN_06B = {
    "qkv": (4096, 1024, False, False),
    "output": (1024, 2048, False, True),
    "gate and up": (6144, 1024, True, False),
    "down": (1024, 3072, False, True),
    "head": (151_936, 1024, False, False),
}


def choice(outputs: int, width: int, gated: bool, adds: bool) -> RingLaunch | None:
    return choose_launch(outputs, width, gated=gated, adds=adds)


def test_of_a_large_layer_all_but_the_output_product_are_taken():
    taken = {name for name, shape in LLAMA_8B.items() if choice(*shape) is not None}
    assert taken == {"qkv", "gate and up", "down", "head"}


def test_of_a_small_layer_those_that_add_are_not_taken():
    taken = {name for name, shape in QWEN_06B.items() if choice(*shape) is not None}
    assert taken == {"qkv", "gate and up", "head"}


@pytest.mark.parametrize(
    "shape", [(1024, 512, False, False), (16_384, 1024, True, False)], ids=["few", "many"]
)
def test_of_a_small_layer_with_other_numbers_of_tiles_none_is_taken(shape):
    """They were not measured."""
    assert choice(*shape) is None


@pytest.mark.parametrize("shape", [*LLAMA_8B.values(), *QWEN_06B.values()])
def test_a_ring_is_as_large_as_a_multiprocessor_has_room_for(shape):
    """Each turn holds a tile of the weight, gates and ups where gated, and 64 rows of the input."""
    launch = choice(*shape)
    if launch is not None:
        turn = 2 * launch.block * (launch.outputs * (2 if shape[2] else 1) + 64)
        laid_out_anew = 4 << 10
        assert launch.programs * (launch.stages * turn + laid_out_anew) <= SHARED_BYTES


def test_it_is_taken_by_rows_and_by_what_the_copy_engine_reads(monkeypatch):
    monkeypatch.setattr(ring_launch, "is_there", lambda device: True)

    def is_taken(rows: int, width: int = 4096, dtype: torch.dtype = torch.bfloat16) -> bool:
        x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(6144, width, dtype=dtype)
        return ring_launch.ring_launch(x, weight) is not None

    assert [is_taken(rows) for rows in (2, 32, 33, 64, 65)] == [False, False, True, True, False]
    assert not is_taken(64, dtype=torch.float32)
    assert not is_taken(64, width=4100)  # rows of 8,200 bytes lie off 16
    monkeypatch.undo()
    assert not is_taken(64)  # a processor


PROGRAM = """
import torch
from kernels.testing_driver import AbsentGpu
gpu = AbsentGpu()
from triton import knobs
from kernels import compile_processes, dependent_launch, few_rows, ring_product
from kernels.compile_ahead import compiling
from kernels.ring_launch import RingLaunch

def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)

hits = []
knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
compile_processes._begun.append(compile_processes.CompileProcesses(["kernels.ring_product"], 1))
with compiling(torch.device("cpu")):
    few_rows.product(empty(40, 256), empty(320, 256), launch=RingLaunch(outputs=64, warps=4))
print(hits, gpu.loaded)

dependent_launch._is_supported = lambda device: True
with dependent_launch.dependent_launches():
    few_rows.product(empty(40, 256), empty(320, 256), launch=RingLaunch(stages=2), bias=empty(320))
assert gpu.launched == ["ring_kernel"], gpu.launched
(kernels, *_), = ring_product.ring_kernel.device_caches.values()
ptx = list(kernels.values())[-1].asm["ptx"]
print(ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor"), ptx.count("griddepcontrol.wait"))
before, *_ = ptx.rpartition("mbarrier.arrive.shared")
print("bar.sync" in before.rpartition("wgmma.wait_group")[2])

launch = RingLaunch(stages=2, splits=3, block=32)
few_rows.add_product(empty(64, 512), empty(256, 512), empty(64, 256), empty(256), launch=launch)
kernel = list(ring_product.ring_kernel.device_caches.values())[0][0].popitem()[1]
print(kernel.metadata.shared - 4 * launch.outputs * 64 - 2 * 8 * launch.stages)
"""


def test_it_compiles_here_and_in_a_process(run_on_absent_gpu: Callable[[str], list[str]]):
    """With the instructions that it is for; what a process compiled is found in the cache."""
    compiled, instructions, is_together, room = run_on_absent_gpu(PROGRAM)
    products, copies, waits = map(int, instructions.split())
    assert products > 0, "no product by warp groups"
    assert copies > 0, "no copy by the copy engine"
    assert waits > 0, "nobody waits for the kernel before"
    assert is_together == "True", "a slot is told to be free that the other warp group still reads"
    assert int(room) >= 0, "sums change their layout in the memory of the barriers"
    assert compiled == "[True] ['ring_kernel']"


def test_of_many_rows_those_of_small_layers_are_taken_but_for_the_head():
    """In a ring that leaves room for 128 rows of the input."""
    shapes = {**{f"small {name}": shape for name, shape in QWEN_06B.items()}, **LLAMA_8B}
    for name, (outputs, width, gated, adds) in shapes.items():
        launch = choose_launch(outputs, width, gated=gated, adds=adds, num_rows=65)
        assert (launch is not None) == (name in ("small qkv", "small gate and up")), name
        if launch is not None:
            turn = 2 * launch.block * (launch.outputs * (2 if gated else 1) + 128)
            assert launch.stages * turn <= 227 << 10
