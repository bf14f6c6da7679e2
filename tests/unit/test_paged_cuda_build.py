"""Building the historical kernel: what is compiled, kept and refused, and the constants in it."""

import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.config import cache_folder
from kernels.paged_cuda import build as build_module
from kernels.paged_cuda.backend import PagedCudaBackend, is_partitioned
from kernels.paged_cuda.build import HEAD_SIZES, BuildError, Specialization, build, find_compiler
from kernels.paged_cuda.library import PagedCudaLibrary, num_partitions
from kernels.paged_cuda.shape import BLOCK_SIZES, KernelShape

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists(), reason="no nvcc here"
)
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_size", "block_size", "scalar", "spilled_bytes"),
    [
        (128, 16, "float16", 0),
        (64, 8, "bfloat16", 0),
        (120, 32, "float16", 0),
        (80, 16, "float32", 0),
        (
            256,
            32,
            "float32",
            300,
        ),  # a whole key of 256 floats in each thread's registers, of which there are 255
    ],
)
def test_it_compiles_for_sm_90_and_its_constants_are_those_of_the_emulation(
    folder: Path, head_size: int, block_size: int, scalar: str, spilled_bytes: int
) -> None:
    """S2-05, S2-06, S2-32: the library says what it was compiled with; S2-13: K stays in registers."""
    path = build(Specialization(head_size, block_size, scalar), folder=folder)
    constants = PagedCudaLibrary(Specialization(head_size, block_size, scalar), path).constants()
    shape = KernelShape(head_size, block_size, partition_size=512, itemsize=ITEMSIZES[scalar])
    assert constants.pop("partition_tokens") == shape.partition_size
    assert constants == {name: getattr(shape, name) for name in constants}
    assert len(constants) == 12
    report = path.with_suffix(".log").read_text()
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == 4  # v1, v2, its reduce kernel, store
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert max(spills) <= spilled_bytes, report


@needs_nvcc
@pytest.mark.slow
def test_a_library_is_built_once_and_nothing_else_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Specialization(32, 16, "float16")
    own = folder / "once"
    with caplog.at_level(logging.INFO):
        first = build(shape, folder=own)
    assert "event=paged_cuda_built " in caplog.text
    assert sorted(path.suffix for path in own.iterdir()) == [".log", ".so"]

    def refuse(*_: object) -> None:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(build_module, "_compile", refuse)
    assert build(shape, folder=own) == first
    with pytest.raises(AssertionError, match="compiled twice"):
        build(shape, folder=own, architecture="sm_80")  # another architecture, another library


@needs_nvcc
def test_a_compiler_error_is_shown_and_leaves_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "--no-such-flag"))
    with pytest.raises(BuildError, match=r"nvcc failed for .*head_size=64.*no-such-flag"):
        build(Specialization(64, 16, "float16"), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_nvcc_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_module, "_USUAL_PLACES", (str(tmp_path),))
    with pytest.raises(BuildError, match=r"no nvcc on PATH.*install a CUDA toolkit"):
        find_compiler()
    with pytest.raises(BuildError, match="nvcc"):
        build(Specialization(64, 16, "float16"), folder=tmp_path)


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_module, "find_compiler", lambda: shutil.which("true"))
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(BuildError, match=re.escape(str(in_the_way))):
        build(Specialization(64, 16, "float16"), folder=in_the_way / "kernels")


def test_the_cache_folder_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/kvatlas/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path(os.path.expanduser("~/.cache/kvatlas/kernels"))


def test_only_shapes_of_the_document_exist() -> None:
    """S2-32."""
    assert {Specialization(h, b, "float16") for h in HEAD_SIZES for b in BLOCK_SIZES}
    for bad in ((48, 16, "float16"), (128, 64, "float16"), (128, 16, "float64")):
        with pytest.raises(ValueError, match=r"paged_cuda exists for \("):
            Specialization(*bad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 64}, "page size 64: .*8, 16, 32"),
        ({"page_size": 1}, "page size 1"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"num_heads": 7}, "7 heads .* 2 KV heads"),
        ({"dtype": torch.float64}, "float64"),
        ({"device": torch.device("cpu")}, "CUDA device, not cpu"),
    ],
)
def test_the_backend_names_what_it_cannot_do(changes: dict[str, object], message: str) -> None:
    """M-29: a page size that the kernel does not have is refused, not replaced."""
    arguments: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "dtype": torch.float16,
        "device": torch.device("cuda"),
    }
    with pytest.raises(ValueError, match=message):
        PagedCudaBackend(**{**arguments, **changes})  # type: ignore[arg-type]


def test_the_context_is_partitioned_where_that_fills_the_device_or_has_to_be() -> None:
    """S2-28: partitions of 512 tokens; one partition is v1's case."""
    assert [num_partitions(n) for n in (0, 1, 511, 512, 513, 4096)] == [1, 1, 1, 1, 2, 8]
    assert not is_partitioned(512, 8)
    assert is_partitioned(513, 8)
    assert not is_partitioned(8192, 256 * 32)
    assert is_partitioned(8193, 256 * 32)
