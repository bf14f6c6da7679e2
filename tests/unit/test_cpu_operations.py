"""Fused operations of the cpu library against the reference."""

import pytest
import torch

from kernels import reference
from kernels.testing import assert_no_worse
from tests import needs
from worker.execution.cpu_model import cpu_operations
from worker.model.layers import Operations


@pytest.fixture
def operations() -> Operations:
    return cpu_operations(needs.compiled())


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [16, 40, 64, 576, 1001])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_rms_norm(operations: Operations, num_rows: int, width: int) -> None:
    x, weight = draw(num_rows, width), draw(width, seed=1)
    x64 = x.double()
    exact = x64 * torch.rsqrt(x64.square().mean(dim=-1, keepdim=True) + 1e-5) * weight.double()
    plain = reference.rms_norm(x, weight, 1e-5)
    assert_no_worse(operations.rms_norm(x, weight, 1e-5), plain=plain, exact=exact, factor=4)


def test_rms_norm_of_heads_in_a_fused_product(operations: Operations) -> None:
    """q/k norm: rows are heads of a slice."""
    qkv, weight = draw(5, 8, 24), draw(24, seed=1)
    for part in (qkv[:, :4], qkv[:, 4:6]):
        ours = operations.rms_norm(part, weight, 1e-6)
        torch.testing.assert_close(ours, reference.rms_norm(part, weight, 1e-6))


@pytest.mark.parametrize("width", [16, 40, 576])
def test_add_rms_norm(operations: Operations, width: int) -> None:
    x, residual, weight = draw(9, width), draw(9, width, seed=1), draw(width, seed=2)
    expected_norm, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-5)
    norm, total = operations.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(total, expected_sum)
    torch.testing.assert_close(norm, expected_norm)


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 128])
def test_rotary_of_a_slice(operations: Operations, head_dim: int) -> None:
    qkv = draw(7, 6, head_dim)
    cos, sin = draw(7, head_dim // 2, seed=1), draw(7, head_dim // 2, seed=2)
    for part in (qkv[:, :3], qkv[:, 3:5]):
        torch.testing.assert_close(operations.rotary(part, cos, sin), reference.rotary(part, cos, sin))


@pytest.mark.parametrize("width", [8, 100, 1536])
def test_silu_mul(operations: Operations, width: int) -> None:
    gate_up = draw(5, 2 * width) * 10
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 88.0, -88.0])
    torch.testing.assert_close(operations.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_nan_stays_nan(operations: Operations) -> None:
    """B057: no operation may wash it out."""
    x = draw(2, 32)
    x[1, 7] = float("nan")
    ones, cos = torch.ones(32), torch.ones(2, 16)
    assert operations.rms_norm(x, ones, 1e-5)[1].isnan().all()
    assert operations.add_rms_norm(x, torch.zeros(2, 32), ones, 1e-5)[0][1].isnan().all()
    assert operations.rotary(x.view(2, 1, 32), cos, cos)[1, 0, 7].isnan()
    assert operations.silu_mul(x)[1, 7].isnan()
    for result in (operations.rms_norm(x, ones, 1e-5), operations.silu_mul(x)):
        assert result[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_go_to_the_reference(operations: Operations, dtype: torch.dtype) -> None:
    x = draw(3, 32).to(dtype)
    assert torch.equal(operations.silu_mul(x), reference.silu_mul(x))
    ones = torch.ones(32, dtype=dtype)
    assert torch.equal(operations.rms_norm(x, ones, 1e-5), reference.rms_norm(x, ones, 1e-5))


@pytest.mark.parametrize("width", [1, 15, 16, 17, 49152])
def test_best_is_the_lowest_index_of_the_highest(width: int) -> None:
    """B060: ties go to the lowest id; NaN anywhere shows."""
    library = needs.compiled()
    x = draw(6, width).round()
    x[1] = 3.0
    x[2, width // 2] = float("nan")
    x[3, width // 2] = float("inf")
    x[4] = float("-inf")
    values, indexes = library.best(x)
    expected_values, expected_indexes = x.max(dim=-1)
    assert torch.equal(values.nan_to_num(7.5), expected_values.nan_to_num(7.5))
    assert torch.equal(indexes, expected_indexes)
