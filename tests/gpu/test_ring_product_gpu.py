"""Products of 33 to 64 rows by a loading warp and warp groups, on a GPU: no worse than plain torch."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.dependent_launch import dependent_launches
from kernels.few_rows import Scaled, add_product, product
from kernels.ring_launch import RingLaunch, is_there, ring_launch
from kernels.rms_norm import rms_norm
from kernels.testing import assert_no_worse

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
EPS = 1e-5
LAUNCHES = [
    RingLaunch(stages=3),
    RingLaunch(outputs=64, warps=4, splits=2, stages=4),
    RingLaunch(stages=2, splits=3, programs=2, block=32),
]
SHAPES = [(33, 72, 200), (64, 1024, 2048), (50, 1000, 1096), (40, 264, 520)]  # rows, outputs, width


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not is_there(DEVICE):
        pytest.skip("needs warp groups (compute capability 9.0) and Gluon")


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()


def norm64(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * gain.double()


@pytest.mark.parametrize("launch", LAUNCHES, ids=["whole", "halves", "thirds"])
@pytest.mark.parametrize(("num_rows", "num_outputs", "width"), SHAPES)
def test_products_are_no_worse_than_plain_torch(num_rows, num_outputs, width, launch):
    """With bias, with the activation, and added to a residual whose norm the next product takes."""
    x, weight = noise(num_rows, width, seed=0), noise(num_outputs, width, seed=1) * width**-0.5
    bias, gain = noise(num_outputs, seed=2), noise(num_outputs, seed=3)
    exact, plain = x.double() @ weight.double().T, linear(x, weight)
    ours = product(x, weight, bias=bias, launch=launch)
    assert_no_worse(ours, plain=linear(x, weight, bias), exact=exact + bias.double())
    gate, up = exact.chunk(2, dim=-1)
    gated = product(x, weight, gated=True, launch=launch)
    assert_no_worse(gated, plain=reference.silu_mul(plain), exact=torch.nn.functional.silu(gate) * up)
    residual = noise(num_rows, num_outputs, seed=4)
    wanted, plain_total = residual.double() + exact, residual + plain
    scaled = add_product(x, weight, residual, gain, launch=launch)
    assert_no_worse(residual, plain=plain_total, exact=wanted)
    back = noise(256, num_outputs, seed=5) * num_outputs**-0.5
    ours = product(scaled, back, eps=EPS, launch=launch)
    plain = linear(reference.rms_norm(plain_total, gain, EPS), back)
    assert_no_worse(ours, plain=plain, exact=norm64(wanted, gain) @ back.double().T)


@pytest.mark.parametrize("launch", LAUNCHES, ids=["whole", "halves", "thirds"])
def test_a_thousand_products_in_a_graph_leave_the_same_bits(launch):
    """Sums of `thirds` need more memory than its ring: they were laid over barriers, and some went wrong."""
    x, weight = noise(64, 2048, seed=0), noise(1024, 2048, seed=1) * 2048**-0.5
    gain, start = noise(1024, seed=3), noise(64, 1024, seed=4)
    expected = start.clone()
    add_product(x, weight, expected, gain, launch=launch)
    num_wrong, graph = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            residual = start.clone()
            scaled = add_product(x, weight, residual, gain, launch=launch)
            num_wrong += (residual != expected).sum() + (~scaled.values.isfinite()).sum()
    for _ in range(50):
        graph.replay()
    assert int(num_wrong) == 0


def layer(residual: Tensor, attended: Tensor, weights: list[Tensor], gain: Tensor) -> Tensor:
    """The products between two attentions, as a decode step has them; the next qkv."""
    output, gate_up, down, qkv = weights
    scaled: Scaled = add_product(attended, output, residual, gain)
    active = product(scaled, gate_up, eps=EPS, gated=True)
    return product(add_product(active, down, residual, gain), qkv, eps=EPS)


@pytest.mark.parametrize("num_rows", [33, 64])
def test_a_large_layer_in_a_chain_of_dependent_launches_keeps_its_bits(num_rows):
    """Three of its four products, 10 times in a graph, 20 replays; rows do not see what other rows hold."""
    shapes = [(4096, 4096), (28_672, 4096), (4096, 14_336), (6144, 4096)]
    weights = [noise(*shape, seed=n) * shape[1] ** -0.5 for n, shape in enumerate(shapes)]
    gain, start = noise(4096, seed=8), noise(num_rows, 4096, seed=9)
    assert ring_launch(start, weights[1], gated=True) is not None
    assert ring_launch(start, weights[3]) is not None

    def chain(start: Tensor) -> tuple[Tensor, Tensor]:
        residual = start.clone()
        qkv = rms_norm(residual, gain, EPS)
        for _ in range(10):
            qkv = layer(residual, qkv[:, :4096].contiguous(), weights, gain)
        return residual, qkv

    expected = chain(start)
    assert all(part.isfinite().all() for part in expected)
    graph = torch.cuda.CUDAGraph()
    with dependent_launches():
        chain(start)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = chain(start)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    other = start.clone()
    other[1:] = noise(num_rows - 1, 4096, seed=10)
    assert torch.equal(chain(other)[1][0], expected[1][0])
