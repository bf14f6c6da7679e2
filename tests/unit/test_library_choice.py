"""The library's ways: what was measured is taken by shapes, device and version alone, else the faster of two,
which is put back behind the product."""

import json
import logging
from dataclasses import astuple
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import library_choice
from kernels.cublas_lt import Configuration, CublasLtError
from kernels.library_choice import faster_library, is_light, library_product, measured_on

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


CUDA = torch.device("cuda", 3)
SMALL = Configuration(66, 24, 35, 5, 7)
LARGE = Configuration(66, 222, 35, 3, 4, 2, 1)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """Of a product of 8 outputs at 72 and 96 rows, on a device that is there."""
    found = {
        "device": "NVIDIA H200",
        "version": 130100,
        "products": [{"outputs": 8, "width": 16, "rows": {"72": astuple(SMALL), "96": astuple(LARGE)}}],
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps(found))
    monkeypatch.setattr(library_choice, "TABLE", path)
    monkeypatch.setattr(library_choice, "_is_hopper", lambda device: True)
    monkeypatch.setattr(library_choice, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return found


@pytest.fixture(autouse=True)
def forget() -> None:
    measured_on.cache_clear()
    library_choice._prepared.cache_clear()
    library_choice._refused.clear()


def test_a_table_is_of_one_device_and_version(table, monkeypatch, caplog):
    assert measured_on(CUDA) == {(8, 16): {72: SMALL, 96: LARGE}}
    measured_on.cache_clear()
    monkeypatch.setattr(library_choice, "version", lambda: 130200)
    with caplog.at_level(logging.INFO):
        assert measured_on(CUDA) == {}
    assert "event=library_table_unused" in caplog.text
    measured_on.cache_clear()
    monkeypatch.setattr(library_choice, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert measured_on(CUDA) == {}


def test_without_the_library_nothing_was_measured(table, monkeypatch, caplog):
    def fail() -> int:
        raise CublasLtError("no cuBLASLt")

    monkeypatch.setattr(library_choice, "version", fail)
    assert measured_on(CUDA) == {}
    assert "why='no cuBLASLt'" in caplog.text


def test_a_library_that_cannot_be_set_up_ends_no_start(table, monkeypatch, caplog):
    def fail(device: torch.device) -> None:
        raise CublasLtError("cublasLtCreate: status 1")

    monkeypatch.setattr(library_choice, "set_up", fail)
    library_choice.prepare(CUDA)
    assert "why='cublasLtCreate: status 1'" in caplog.text


@pytest.mark.parametrize(
    "text", [None, "{", '{"device": "NVIDIA H200"}', "[]"], ids=["gone", "cut", "part", "list"]
)
def test_a_table_that_cannot_be_read_is_not_used(table, caplog, text):
    library_choice.TABLE.unlink()
    if text is not None:
        library_choice.TABLE.write_text(text)
    assert measured_on(CUDA) == {}
    assert "event=library_table_unused" in caplog.text


class Prepared:
    """Stands for a product by a configuration."""

    made: ClassVar[list[tuple[int, Configuration]]]
    refuses: ClassVar[bool]
    fails: ClassVar[bool]

    def __init__(self, shape: tuple[int, ...], configuration: Configuration) -> None:
        if Prepared.refuses:
            raise CublasLtError("status 15")
        Prepared.made.append((shape[0], configuration))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if Prepared.fails:
            raise CublasLtError("status 14")
        return torch.full((x.shape[0], weight.shape[0]), 7.0)


@pytest.fixture
def prepared(table, monkeypatch) -> type[Prepared]:
    Prepared.made, Prepared.refuses, Prepared.fails = [], False, False
    monkeypatch.setattr(library_choice, "LtShape", lambda *shape: shape)
    monkeypatch.setattr(library_choice, "LtProduct", Prepared)
    return Prepared


def test_rows_are_filled_up_to_those_of_graphs(prepared):
    weight = torch.randn(8, 16).bfloat16()
    for rows in (64, 65, 72, 73, 96, 97):
        x = torch.randn(rows, 16).bfloat16()
        is_prepared = bool((library_product(x, weight) == 7.0).all())
        assert is_prepared == (rows in (65, 72, 96))  # 73 to 80: torch was as fast
        if not is_prepared:
            torch.testing.assert_close(library_product(x, weight), linear(x, weight))
        library_product(x, weight)  # prepared once
    assert prepared.made == [(65, SMALL), (72, SMALL), (96, LARGE)]


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(70, 16), torch.randn(8, 16)),  # fp32
        (torch.randn(70, 32).bfloat16()[:, :16], torch.randn(8, 16).bfloat16()),
        (torch.randn(70, 16).bfloat16(), torch.randn(16, 8).bfloat16().T),
        (torch.randn(70, 24).bfloat16(), torch.randn(8, 24).bfloat16()),
        (torch.randn(70 * 16 + 1).bfloat16()[1:].view(70, 16), torch.randn(8, 16).bfloat16()),
    ],
    ids=["type", "input", "weight", "shape", "place"],
)
def test_all_else_is_torchs(prepared, x, weight):
    torch.testing.assert_close(library_product(x, weight), linear(x, weight))
    assert prepared.made == []


def test_what_the_library_refuses_is_torchs_and_said_once(prepared, caplog):
    prepared.refuses = True
    x, weight = torch.randn(70, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    for _ in range(2):
        torch.testing.assert_close(library_product(x, weight), linear(x, weight))
    assert caplog.text.count("event=library_product_refused shape=(70, 8, 16) why='status 15'") == 1


def test_what_is_refused_when_it_is_to_run_is_torchs_from_then_on(prepared, caplog):
    prepared.fails = True
    x, weight = torch.randn(70, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    torch.testing.assert_close(library_product(x, weight), linear(x, weight))
    prepared.fails = False
    torch.testing.assert_close(library_product(x, weight), linear(x, weight))
    assert caplog.text.count("event=library_product_refused shape=(70, 8, 16) why='status 14'") == 1


def test_the_table_that_ships_is_whole():
    """Every entry is a configuration, for a number of rows that has a graph."""
    found = json.loads(Path(library_choice.__file__).with_name("library_table.json").read_text())
    assert (found["device"], found["version"]) == ("NVIDIA H200", 130100)
    assert found["products"]
    for part in found["products"]:
        rows = [int(rows) for rows in part["rows"]]
        assert rows == sorted(rows)
        assert all(size % library_choice.STEP == 0 for size in rows)
        assert library_choice.LEAST_ROWS <= rows[0] <= rows[-1] <= library_choice.MOST_ROWS
        for configuration in part["rows"].values():
            assert all(number >= 0 for number in astuple(Configuration(*configuration)))
