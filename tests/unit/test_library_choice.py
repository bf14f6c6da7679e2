"""The library's two ways: the faster is chosen by shapes alone, and put back behind the product."""

import pytest
import torch

from kernels import library_choice
from kernels.library_choice import faster_library, is_light

BF16 = torch.bfloat16
DOWN, OUTPUT, GATE_UP = ((4096, 14_336), (4096, 4096), (28_672, 4096))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is asked for; it prefers cuBLAS."""
    found: list[str] = []

    def prefer(library: str | None = None) -> str:
        found.extend([library] if library else [])
        return found[-1] if found else "cublas"

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(library_choice, "_is_hopper", lambda device: True)
    return found


@pytest.mark.parametrize(
    ("shape", "rows", "expected"),
    [
        (DOWN, 64, False),
        (DOWN, 65, True),
        (DOWN, 112, True),
        (DOWN, 120, False),
        (OUTPUT, 72, True),
        (OUTPUT, 232, True),
        (OUTPUT, 240, False),
        (GATE_UP, 96, False),
        ((1024, 3072), 96, False),  # small
    ],
)
def test_it_is_chosen_where_it_was_measured_to_be_faster(asked, shape, rows, expected):
    assert is_light(rows, torch.empty(shape, dtype=BF16)) is expected
    assert not is_light(rows, torch.empty(shape))


def test_it_is_put_back_behind_the_product(asked):
    weight = torch.empty(DOWN, dtype=BF16)
    with faster_library(96, weight):
        assert asked == ["cublaslt"]
    assert asked == ["cublaslt", "cublas"]
    with pytest.raises(ZeroDivisionError), faster_library(96, weight):
        raise ZeroDivisionError
    assert asked == ["cublaslt", "cublas"] * 2
    with faster_library(256, weight):
        pass
    assert asked == ["cublaslt", "cublas"] * 2


def test_a_processor_has_no_choice():
    assert not is_light(96, torch.empty(DOWN, dtype=BF16))
