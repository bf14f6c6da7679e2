"""A worker's device from its settings on a GPU: each option is built, told, and computes."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from worker.config import ConfigError, WorkerConfig
from worker.process import warm_up
from worker.torch_device import TorchDevice

pytestmark = pytest.mark.gpu
BASE: dict[str, Any] = {
    "model": "random:qwen3-0.6b", "device": "cuda", "num_pages": 64, "max_running": 4, "max_context": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "backend", "dtype", "runner"),
    [
        ({"attention_backend": "triton"}, "triton", "bf16", "CudaRunner"),
        ({"attention_backend": "reference"}, "reference", "bf16", "TorchRunner"),
        ({"attention_backend": "paged_cuda"}, "paged_cuda", "bf16", "TorchRunner"),
        ({"weight_dtype": "fp8", "attention_backend": "triton"}, "triton", "bf16", "CudaRunner"),
        ({"kv_dtype": "fp8"}, "triton", "fp8", "CudaRunner"),
        ({"weight_dtype": "fp8", "kv_dtype": "fp8"}, "triton", "fp8", "CudaRunner"),
        ({"deterministic": True}, "triton", "bf16", "CudaRunner"),
        ({"deterministic": True, "kv_dtype": "fp8"}, "triton", "fp8", "CudaRunner"),
    ],
)
def test_an_option_is_built_told_and_computes(
    changes: dict[str, Any], backend: str, dtype: str, runner: str
) -> None:
    """M-30, S1-09: two steps, a prompt and a token; the page's bytes are those of its type."""
    config = WorkerConfig(**BASE, **changes)
    device = TorchDevice()
    facts = device.facts(config)
    assert (facts.attention_backend, facts.dtype) == (backend, dtype)
    assert facts.attention_backend_reason
    copies = 2 if backend == "paged_cuda" else 1
    itemsize = 1 if dtype == "fp8" else 2
    assert (
        facts.page_bytes
        == copies * 2 * facts.layer_count * 16 * facts.kv_head_count * facts.head_dim * itemsize
    )
    built = device.build(config.resolved(model_context=512, automatic_pages=64))
    try:
        assert type(built).__name__ == runner
        warm_up(built, 16)
    finally:
        built.close()
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_backend": "paged_cuda", "page_size": 64}, "page size 64"),
        ({"attention_backend": "paged_cuda", "kv_dtype": "fp8"}, "fp8 pages"),
        ({"weight_dtype": "fp8", "deterministic": True}, "fp8 products"),
        ({"weight_dtype": "fp8", "dtype": "fp32"}, "bf16"),
        ({"attention_backend": "cpu"}, "cpu"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """M-29: at the start, before anything is loaded or right when it is made."""
    config = WorkerConfig(**BASE, **changes)
    with pytest.raises(ConfigError, match=named):
        start(config)


def start(config: WorkerConfig) -> None:
    """As a worker does."""
    TorchDevice().facts(config)
    TorchDevice().build(config.resolved(model_context=512, automatic_pages=64))
