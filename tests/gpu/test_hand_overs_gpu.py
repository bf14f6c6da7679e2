"""Products whose warps and programs hand over to one another, with delays wherever they do: the same bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import few_rows
from kernels.few_rows import FewRowsLaunch, Launch, add_product, product
from kernels.ring_launch import RingLaunch, is_there
from kernels.sliced_launch import SlicedLaunch
from kernels.testing_delays import compiled_anew, counted_too_early, with_delays

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LAUNCHES: dict[str, Launch] = {
    "ring": RingLaunch(outputs=64, warps=4, stages=6),
    "ring in parts": RingLaunch(stages=2, splits=3, programs=2, block=32),
    "cluster of four": SlicedLaunch(),
    "cluster of two": SlicedLaunch(programs=2, warps=8),
    "parts": FewRowsLaunch(splits=4, stages=3),
}


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not is_there(DEVICE):
        pytest.skip("needs warp groups (compute capability 9.0) and Gluon")


def kernels() -> list[object]:
    """Imported where the device has what they are written for."""
    from kernels import ring_product, sliced_product

    return [few_rows._few_rows_kernel, ring_product.ring_kernel, sliced_product.sliced_kernel]


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()


class Problem:
    """A product that adds to the residual, and a gated one of its norm."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.x, self.start, self.gain = noise(64, 1024, seed=0), noise(64, 1024, seed=1), noise(1024, seed=2)
        self.down, self.up = noise(1024, 1024, seed=3) / 32, noise(4096, 1024, seed=4) / 32

    def results(self) -> list[Tensor]:
        residual = self.start.clone()
        scaled = add_product(self.x, self.down, residual, self.gain, launch=self.launch)
        return [residual, scaled.values, product(scaled, self.up, gated=True, launch=self.launch)]

    def num_wrong(self, expected: list[Tensor]) -> int:
        """Numbers that are not as expected in 300 repeats, in a graph."""
        self.results()
        wrong, graph = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                for found, part in zip(self.results(), expected, strict=True):
                    wrong += (found.view(torch.int16) != part.view(torch.int16)).sum()
        for _ in range(30):
            graph.replay()
        return int(wrong)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_delays_change_no_bit(launch: Launch, tmp_path: Path) -> None:
    problem = Problem(launch)
    expected = problem.results()
    assert all(part.isfinite().all() for part in expected)
    with compiled_anew(kernels(), tmp_path, with_delays):
        assert problem.num_wrong(expected) == 0


@pytest.mark.parametrize("name", ["ring in parts", "parts"])
def test_they_bring_a_fault_to_light(name: str, tmp_path: Path) -> None:
    problem = Problem(LAUNCHES[name])
    expected = problem.results()
    with compiled_anew(kernels(), tmp_path, lambda ptx: with_delays(counted_too_early(ptx))):
        assert problem.num_wrong(expected) > 0
