"""Kernels in Gluon are left out where they cannot run, and it is said why."""

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

import triton

from kernels.gluon_there import gluon_is_there

HOPPER, SLICED = torch.device("cuda", 0), "kernels.sliced_product"


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gluon_is_there.cache_clear()
    monkeypatch.delitem(sys.modules, SLICED, raising=False)
    yield
    gluon_is_there.cache_clear()


def test_on_another_device_it_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not gluon_is_there(SLICED, HOPPER)
    assert not gluon_is_there(SLICED, torch.device("cpu"))
    assert SLICED not in sys.modules


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1"])
def test_shared_memory_of_an_unknown_triton_is_not_written_to(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "__version__", version)
    with caplog.at_level(logging.WARNING):
        assert not gluon_is_there(SLICED, HOPPER)
    assert f"event=kernel_absent module={SLICED}" in caplog.text
    assert version in caplog.text


def test_with_a_known_triton_on_hopper_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gluon_is_there(SLICED, HOPPER)
    assert gluon_is_there("kernels.ring_product", HOPPER)
