"""Products of few rows by clusters that share the width, on a GPU: no worse than plain torch."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.dependent_launch import dependent_launches
from kernels.few_rows import FewRowsLaunch, add_product, product
from kernels.rms_norm import rms_norm
from kernels.sliced_launch import SlicedLaunch, is_there, sliced_launch
from kernels.testing import assert_no_worse

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
EPS = 1e-5
CASES = {  # launch; rows, outputs, width
    "pairs": (SlicedLaunch(programs=2), 17, 128, 1024),
    "pairs of eight warps": (SlicedLaunch(programs=2, warps=8), 64, 384, 1024),
    "fours": (SlicedLaunch(), 50, 1024, 3072),
    "fours of eight warps": (SlicedLaunch(warps=8), 2, 128, 2048),
    "eights": (SlicedLaunch(programs=8), 33, 1024, 1024),
    "fours of many rows": (SlicedLaunch(), 100, 1024, 2048),
    "eights of large tiles and many rows": (
        SlicedLaunch(outputs=128, programs=8, warps=8),
        128,
        512,
        3072,
    ),
    "large tiles": (SlicedLaunch(outputs=128, warps=8), 5, 256, 1024),
}


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not is_there(DEVICE):
        pytest.skip("needs clusters and warp groups (compute capability 9.0), and Gluon")


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()


def norm64(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * gain.double()


@pytest.mark.parametrize(("launch", "num_rows", "num_outputs", "width"), CASES.values(), ids=CASES)
def test_products_are_no_worse_than_plain_torch(launch, num_rows, num_outputs, width):
    """With bias, and added to a residual whose norm the next product takes, by this kernel and by another."""
    x, weight = noise(num_rows, width, seed=0), noise(num_outputs, width, seed=1) * width**-0.5
    bias, gain = noise(num_outputs, seed=2), noise(num_outputs, seed=3)
    exact, plain = x.double() @ weight.double().T, linear(x, weight)
    ours = product(x, weight, bias=bias, launch=launch)
    assert_no_worse(ours, plain=linear(x, weight, bias), exact=exact + bias.double())
    residual = noise(num_rows, num_outputs, seed=4)
    wanted, plain_total = residual.double() + exact, residual + plain
    scaled = add_product(x, weight, residual, gain, launch=launch)
    assert_no_worse(residual, plain=plain_total, exact=wanted)
    back = noise(256, num_outputs, seed=5) * num_outputs**-0.5
    plain = linear(reference.rms_norm(plain_total, gain, EPS), back)
    exact = norm64(wanted, gain) @ back.double().T
    assert_no_worse(product(scaled, back, eps=EPS, launch=FewRowsLaunch()), plain=plain, exact=exact)
    if num_outputs == 1024:
        assert_no_worse(product(scaled, back, eps=EPS, launch=launch), plain=plain, exact=exact)


@pytest.mark.parametrize("name", ["pairs", "pairs of eight warps", "eights", "large tiles"])
def test_a_gated_product_is_no_worse_than_plain_torch(name):
    launch, num_rows, num_outputs, width = CASES[name]
    x, weight = noise(num_rows, width, seed=0), noise(2 * num_outputs, width, seed=1) * width**-0.5
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    ours = product(x, weight, gated=True, launch=launch)
    plain = reference.silu_mul(linear(x, weight))
    assert_no_worse(ours, plain=plain, exact=torch.nn.functional.silu(gate) * up)


def test_rows_past_the_batch_are_neither_read_nor_written():
    """What lies behind the rows is NaN, and stays."""
    x, weight = noise(24, 1024, seed=0), noise(128, 1024, seed=1)
    x[20:] = torch.nan
    residual = torch.full((24, 128), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    residual[:20] = 1
    gain = noise(128, seed=2)
    scaled = add_product(x[:20], weight, residual[:20], gain, launch=SlicedLaunch(programs=2))
    assert residual[:20].isfinite().all()
    assert residual[20:].isnan().all()
    assert scaled.squares[:, :20].isfinite().all()


def layer(residual: Tensor, attended: Tensor, weights: list[Tensor], gain: Tensor) -> Tensor:
    """The products between two attentions, as a decode step has them; the next qkv."""
    output, gate_up, down, qkv = weights
    active = product(add_product(attended, output, residual, gain), gate_up, eps=EPS, gated=True)
    return product(add_product(active, down, residual, gain), qkv, eps=EPS)


@pytest.mark.parametrize("num_rows", [2, 17, 33, 64])
def test_a_small_layer_in_a_chain_of_dependent_launches_keeps_its_bits(num_rows):
    """All of its four products, 10 times in a graph, 20 replays; rows do not see what other rows hold."""
    shapes = [(1024, 2048), (6144, 1024), (1024, 3072), (4096, 1024)]
    weights = [noise(*shape, seed=n) * shape[1] ** -0.5 for n, shape in enumerate(shapes)]
    gain, start = noise(1024, seed=8), noise(num_rows, 1024, seed=9)
    kinds = [{"adds": True}, {"gated": True}, {"adds": True}, {}]
    for (_, width), weight, kind in zip(shapes, weights, kinds, strict=True):
        assert sliced_launch(noise(num_rows, width, seed=0), weight, **kind) is not None

    def chain(start: Tensor) -> tuple[Tensor, Tensor]:
        residual = start.clone()
        qkv = product(rms_norm(residual, gain, EPS), weights[3])
        for _ in range(10):
            qkv = layer(residual, qkv[:, :2048].contiguous(), weights, gain)
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
    other[1:] = noise(num_rows - 1, 1024, seed=10)
    assert torch.equal(chain(other)[1][0], expected[1][0])
