"""Triton's interpreter made quick for tests: the same results, and everything it patches is put back."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import inspect

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

import triton
import triton.language as tl
from triton.runtime import interpreter

from kernels.testing_interpreter import quicken


@triton.jit
def scaled(x, factor):
    return tl.maximum(x * factor, -2.0)


@triton.jit
def summed_rows(values, weights, out, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Functions inside a kernel, ours and Triton's own; pointers, integers and floats of two widths."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * num_columns + column[None, :]
    loaded = tl.load(values + at, column[None, :] < num_columns, other=0.0).to(tl.float32)
    weight = tl.load(weights + tl.minimum(column, num_columns - 1)).to(tl.float32)
    product = tl.where(column[None, :] < num_columns, scaled(loaded, weight[None, :]), 0.0)
    tl.store(out + row, tl.sum(product, 1) + tl.max(product, 1) + tl.cdiv(num_columns, 4))


def expected(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    product = (values.float() * weights.float()).clamp(min=-2.0)
    padded = torch.cat([product, torch.zeros(len(product), 1)], 1)
    return product.sum(1) + padded.amax(1) + (values.shape[1] + 3) // 4


@pytest.mark.parametrize("columns", [1, 5, 7])
def test_a_kernel_with_functions_in_it_gives_what_torch_does(columns: int) -> None:
    quicken()
    values, weights = torch.randn(8, columns, dtype=torch.bfloat16), torch.randn(columns)
    for _ in range(2):  # the second launch finds what the first has left
        out = torch.empty(8)
        summed_rows[(4,)](values, weights, out, columns, ROWS=2, COLUMNS=8)
        torch.testing.assert_close(out, expected(values, weights))


def test_a_launch_patches_once_however_many_functions_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken()
    patched = []
    patch = interpreter._patch_lang_core
    monkeypatch.setattr(
        interpreter, "_patch_lang_core", lambda lang, scope: patched.append(lang) or patch(lang, scope)
    )
    summed_rows[(4,)](torch.zeros(8, 5), torch.zeros(5), torch.empty(8), 5, ROWS=2, COLUMNS=8)
    assert patched[0] is tl, "for the kernel"
    assert patched.count(tl.core) == 1, "for Triton's own functions, whose modules may see both"
    assert patched.count(tl) <= 2


def test_after_a_launch_the_language_is_as_it_was() -> None:
    quicken()
    before = [inspect.getmembers(place) for place in (tl, tl.tensor, tl.math)]
    summed_rows[(4,)](torch.zeros(8, 5), torch.zeros(5), torch.empty(8), 5, ROWS=2, COLUMNS=8)
    after = [inspect.getmembers(place) for place in (tl, tl.tensor, tl.math)]
    for old, new in zip(before, after, strict=True):
        assert [name for name, _ in old] == [name for name, _ in new]
        assert all(
            tl.core.is_builtin(a) == tl.core.is_builtin(b) for (_, a), (_, b) in zip(old, new, strict=True)
        )


def test_a_kernel_that_raises_leaves_the_next_launch_whole() -> None:
    quicken()

    @triton.jit
    def broken(out):
        tl.static_assert(1 > 2, "never")

    with pytest.raises(interpreter.InterpreterError, match="never"):
        broken[(1,)](torch.empty(1))
    out = torch.empty(8)
    values, weights = torch.randn(8, 5), torch.randn(5)
    summed_rows[(4,)](values, weights, out, 5, ROWS=2, COLUMNS=8)
    torch.testing.assert_close(out, expected(values, weights))


@triton.jit
def outer_product(rows, columns, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    product = tl.load(rows + row)[:, None] * tl.load(columns + column)[None, :]
    tl.store(out + row[:, None] * COLUMNS + column[None, :], product + tl.load(columns + column))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 4), (4, 1), (4, 4), (2, 8)])
def test_values_of_all_shapes_meet_as_they_did(rows: int, columns: int) -> None:
    """Also where the shape of one is that of another with the dimensions exchanged."""
    quicken()
    left, right = torch.randn(rows), torch.randn(columns)
    out = torch.empty(rows, columns)
    outer_product[(1,)](left, right, out, ROWS=rows, COLUMNS=columns)
    torch.testing.assert_close(out, left[:, None] * right + right)


def test_types_of_one_shape_share_it() -> None:
    """Else Triton has other insides, and is as slow as it was."""
    quicken()
    one, other = tl.block_type(tl.int32, [2, 4]), tl.block_type(tl.float32, [tl.constexpr(2), 4])
    assert one.shape is other.shape
    assert tl.block_type(tl.int32, [4, 2]).shape is not one.shape
    assert (one.numel, one.name) == (8, f"<{one.shape}, int32>")
    assert other.name == f"<{one.shape}, fp32>"
    assert one == tl.block_type(tl.int32, one.shape)
    assert one != other


@pytest.mark.parametrize("shape", [[3], [2, 0], [4.0], [1 << 30]])
def test_a_shape_that_no_block_has_is_refused_each_time(shape: list[int]) -> None:
    quicken()
    tl.block_type(tl.int32, [4])  # equal to 4.0, and known
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            tl.block_type(tl.int32, shape)


def test_shapes_that_do_not_meet_are_refused() -> None:
    quicken()
    with pytest.raises(interpreter.InterpreterError, match="Cannot make_shape_compatible"):
        mismatched[(1,)](torch.empty(8))


@triton.jit
def mismatched(out):
    tl.store(out + tl.arange(0, 8), tl.arange(0, 8) + tl.arange(0, 4))
