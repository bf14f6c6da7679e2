"""Which attention backend is chosen for what, and why: the whole table, without a GPU."""

from dataclasses import replace

import pytest
import torch

from worker.attention_choice import NAMES, Choice, Surroundings, choose
from worker.config import ConfigError, WorkerConfig
from worker.model.toy import toy_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
AUTO = WorkerConfig(model="random:tiny", device="cuda")
WITH_ALL = Surroundings(CUDA, BF16, has_flashinfer=True, has_flashinfer_kernels=True)
WITHOUT = Surroundings(CUDA, BF16, has_flashinfer=False, has_flashinfer_kernels=False)


def chosen(around: Surroundings, head_dim: int = 128, **changes: object) -> Choice:
    return choose(replace(AUTO, **changes), toy_config(head_dim=head_dim), around)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("around", "label", "because"),
    [
        (replace(WITH_ALL, device=CPU, kv_dtype=FP32), "cpu", "processor"),
        (replace(WITH_ALL, device=CPU, kv_dtype=FP8), "cpu", "processor"),
        (WITHOUT, "triton", "not installed"),
        (replace(WITH_ALL, has_flashinfer_kernels=False), "triton", "not compiled"),
        (replace(WITH_ALL, kv_dtype=FP8), "triton", "fp8"),
        (replace(WITH_ALL, kv_dtype=FP32), "triton", "fp32"),
        (WITH_ALL, "flashinfer+triton", "compiled"),
    ],
)
def test_auto_takes_what_is_there_and_says_why(around: Surroundings, label: str, because: str) -> None:
    """M-30, B085: nothing is compiled for it, and the reason goes into the log."""
    choice = chosen(around)
    assert choice.label == label
    assert because in choice.reason


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_shape_has_a_backend(head_dim: int) -> None:
    """B085: a head size that FlashInfer lacks, or was not measured at, goes to ours, at the start."""
    choice = chosen(WITH_ALL, head_dim=head_dim)
    assert choice.label == ("flashinfer+triton" if head_dim == 128 else "triton")


def test_deterministic_outputs_have_one_backend_for_each_device() -> None:
    """One that does not keep the promise is refused, also by name."""
    assert chosen(WITH_ALL, deterministic=True).label == "triton"
    assert chosen(replace(WITH_ALL, device=CPU, kv_dtype=FP32), deterministic=True).label == "cpu"
    for around, name in ((WITH_ALL, "flashinfer"), (WITH_ALL, "paged_cuda"), (WITH_ALL, "reference")):
        with pytest.raises(ConfigError, match=f"deterministic.*{name}"):
            chosen(around, deterministic=True, attention_backend=name)


@pytest.mark.parametrize(
    ("name", "around", "named"),
    [
        ("triton", replace(WITHOUT, device=CPU), "triton needs a CUDA device"),
        ("paged_cuda", replace(WITHOUT, device=CPU), "paged_cuda needs a CUDA device"),
        ("flashinfer", WITHOUT, "not installed"),
        ("flashinfer", replace(WITH_ALL, kv_dtype=FP8), "fp8 pages"),
        ("paged_cuda", replace(WITHOUT, kv_dtype=FP8), "fp8 pages"),
        ("cpu", WITH_ALL, "needs --device cpu"),
        ("fastest", WITH_ALL, "none of auto, cpu"),
    ],
)
def test_a_named_backend_that_cannot_be_is_refused(name: str, around: Surroundings, named: str) -> None:
    """M-29: nothing else is taken in its place."""
    with pytest.raises(ConfigError, match=named):
        chosen(around, attention_backend=name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_a_named_backend_is_taken_at_its_word(name: str) -> None:
    around = replace(WITH_ALL, device=CPU, kv_dtype=FP32) if name == "cpu" else WITH_ALL
    choice = chosen(around, attention_backend=name)
    assert (choice.name, choice.decode, choice.reason) == (name, "", "asked for")
