"""Products by the configurations of the table that ships, on the device they were measured on."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.library_choice import LEAST_ROWS, _prepared, library_product, measured_on
from kernels.testing import assert_no_worse

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()


@pytest.fixture(scope="module")
def weights() -> dict[tuple[int, int], Tensor]:
    measured = measured_on(DEVICE)
    if not measured:
        pytest.skip("the table is of another device or version of cuBLASLt")
    return {shape: noise(*shape, seed=1) * shape[1] ** -0.5 for shape in measured}


def test_every_entry_is_no_worse_than_torchs_product_and_leaves_the_same_bits(weights):
    """Also for a row less than was measured, and from within a graph."""
    for shape, by_rows in measured_on(DEVICE).items():
        weight = weights[shape]
        for rows in by_rows:
            for num_rows in {max(LEAST_ROWS, rows - 1), rows}:
                x = noise(num_rows, shape[1], seed=num_rows)
                assert _prepared(num_rows, *shape, DEVICE) is not None, f"{shape} {num_rows}: refused"
                found = library_product(x, weight)
                exact = x.double() @ weight.double().T
                assert_no_worse(found, plain=linear(x, weight), exact=exact)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    again = library_product(x, weight)
                for _ in range(3):
                    again.zero_()
                    graph.replay()
                    assert torch.equal(again, found), f"{shape} {num_rows}: other bits"


def test_rows_do_not_see_what_other_rows_hold(weights):
    for shape, weight in weights.items():
        rows = max(measured_on(DEVICE)[shape])
        x = noise(rows, shape[1], seed=3)
        expected = library_product(x, weight)[0].clone()
        x[1:] = noise(rows - 1, shape[1], seed=4)
        assert torch.equal(library_product(x, weight)[0], expected)
