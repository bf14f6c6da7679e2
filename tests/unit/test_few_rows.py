"""Products of few rows through Triton's interpreter: a norm spread over two products, splits, padding."""

import os
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.few_rows import MAX_ROWS, FewRowsLaunch, Scaled, add_product, product

SPLIT = FewRowsLaunch(block=32, splits=3)
WAITS_FIRST = FewRowsLaunch(block=32, splits=2, is_early=False, ahead=1)
CLOSE = {"rtol": 1e-4, "atol": 1e-3}


@pytest.mark.parametrize(
    "launch", [FewRowsLaunch(block=64), SPLIT, WAITS_FIRST], ids=["whole", "split", "waits first"]
)
@pytest.mark.parametrize(("num_rows", "num_outputs", "width"), [(2, 100, 144), (21, 64, 96)])
def test_a_product_equals_the_plain_one(num_rows, num_outputs, width, launch):
    x, weight, bias = torch.randn(num_rows, width), torch.randn(num_outputs, width), torch.randn(num_outputs)
    torch.testing.assert_close(product(x, weight, bias=bias, launch=launch), x @ weight.T + bias, **CLOSE)
    weight = torch.randn(2 * num_outputs, width) / 10
    gated = product(x, weight, gated=True, launch=launch)
    torch.testing.assert_close(gated, reference.silu_mul(x @ weight.T), **CLOSE)


@pytest.mark.parametrize(
    "launch", [FewRowsLaunch(block=64), SPLIT, WAITS_FIRST], ids=["whole", "split", "waits first"]
)
def test_an_added_product_and_the_next_one_share_the_norm(launch):
    """The residual is that of the plain network; so are products of its norm, plain and gated."""
    num_rows, inner, hidden = 5, 96, 160
    x, down = torch.randn(num_rows, inner), torch.randn(hidden, inner)
    residual, gain = torch.randn(num_rows, hidden), torch.randn(hidden)
    bias, up = torch.randn(hidden), torch.randn(48, hidden) / 10
    total = residual + x @ down.T + bias
    normed = reference.rms_norm(total, gain, 1e-5)
    scaled = add_product(x, down, residual, gain, bias=bias, launch=launch)
    torch.testing.assert_close(residual, total, **CLOSE)
    assert scaled.squares.shape == (3, MAX_ROWS)
    torch.testing.assert_close(product(scaled, up, eps=1e-5, launch=launch), normed @ up.T, **CLOSE)
    gated = product(scaled, up, eps=1e-5, gated=True, launch=launch)
    torch.testing.assert_close(gated, reference.silu_mul(normed @ up.T), **CLOSE)


def test_a_split_tile_leaves_its_counter_at_zero():
    """Launches share the counters: one that is left over would end the next launch's tile too soon."""
    x, weight = torch.randn(3, 96), torch.randn(70, 96)
    first = product(x, weight, launch=SPLIT)
    assert torch.equal(product(x, weight, launch=SPLIT), first)


def test_a_product_of_fewer_turns_than_splits_has_a_turn_for_every_program():
    """A program waits for the kernel before it in its first turn: none may have nothing to do."""
    x, weight, residual = torch.randn(3, 64), torch.randn(70, 64), torch.randn(3, 70)
    expected = residual + x @ weight.T
    add_product(x, weight, residual, torch.randn(70), launch=FewRowsLaunch(block=32, splits=7))
    torch.testing.assert_close(residual, expected, **CLOSE)


def test_rows_past_the_batch_are_not_written():
    """Padding rows of a tile belong to nobody: a larger buffer's rows behind the batch stay as they are."""
    x, weight, gain = torch.randn(3, 64), torch.randn(64, 64), torch.randn(64)
    residual = torch.full((5, 64), 7.0)
    scaled = add_product(x, weight, residual[:3], gain, launch=FewRowsLaunch(block=64))
    assert isinstance(scaled, Scaled)
    assert (residual[3:] == 7.0).all()


@pytest.mark.parametrize(
    "launch", [FewRowsLaunch(block=32), SPLIT, WAITS_FIRST], ids=["whole", "split", "waits first"]
)
def test_what_lies_beyond_a_row_or_a_tile_counts_for_nothing(launch):
    """NaN lies behind the rows and the outputs, in the same memory; the last tile and block are partial."""

    def within(num_rows: int, width: int) -> torch.Tensor:
        around = torch.full((num_rows + 70, width), torch.nan)
        around[:num_rows] = torch.randn(num_rows, width)
        return around[:num_rows]

    x, weight = within(3, 72), within(70, 72)
    torch.testing.assert_close(product(x, weight, launch=launch), x @ weight.T, **CLOSE)
    gated = product(x, weight / 10, gated=True, launch=launch)
    torch.testing.assert_close(gated, reference.silu_mul(x @ weight.T / 10), **CLOSE)


@pytest.mark.parametrize(
    "launch", [FewRowsLaunch(block=32), SPLIT, WAITS_FIRST], ids=["whole", "split", "waits first"]
)
def test_a_row_that_is_not_a_number_stays_alone(launch):
    """Through its product, its residual, its norm and the gated product: no other row has NaN."""
    x, weight, residual = torch.randn(4, 64), torch.randn(96, 64), torch.randn(4, 96)
    x[1] = torch.nan
    scaled = add_product(x, weight, residual, torch.randn(96), launch=launch)
    assert residual.isnan().any(1).tolist() == [False, True, False, False]
    found = product(scaled, torch.randn(64, 96), gated=True, launch=launch)
    assert found.isnan().any(1).tolist() == [False, True, False, False]


PROGRAM = """
import torch
from kernels.testing_driver import AbsentGpu
gpu = AbsentGpu()
from kernels import dependent_launch, few_rows
dependent_launch._is_supported = lambda device: True
with dependent_launch.dependent_launches():
    x, weight = (torch.empty(count, 1024, dtype=torch.bfloat16) for count in (8, 4096))
    few_rows.product(x, weight)
assert gpu.launched == ["_few_rows_kernel"], gpu.launched
(kernels, *_), = few_rows._few_rows_kernel.device_caches.values()
(kernel,) = kernels.values()
print(kernel.asm["ptx"].count("cp.async.cg"))
"""


def test_a_wait_within_the_loop_leaves_its_loads_asynchronous(
    run_on_absent_gpu: Callable[[str], list[str]],
):
    """Compiled for a GPU that is not there: weights are asked for turns ahead, beside and before the wait."""
    (copies,) = run_on_absent_gpu(PROGRAM)
    assert int(copies) > 0
