"""Makes the attention backend that was chosen; imports no other one. Owns what each maker is given."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

import torch

from kernels.backend import AttentionBackend
from kernels.cpu_backend import CpuBackend
from kernels.reference import ReferenceBackend
from worker.attention_choice import Choice
from worker.config import ConfigError, WorkerConfig
from worker.model.config import ModelConfig


def make_backend(
    choice: Choice, shape: ModelConfig, config: WorkerConfig, device: torch.device, kv_dtype: torch.dtype
) -> AttentionBackend:
    """The chosen one, made. Raises ConfigError with what its maker says."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    makers: dict[str, Callable[[], AttentionBackend]] = {
        "reference": ReferenceBackend,
        "cpu": CpuBackend,
        "triton": lambda: _triton(heads, config),
        "flashinfer": lambda: _flashinfer(choice, heads, config, device, kv_dtype),
        "paged_cuda": lambda: _paged_cuda(heads, config, device, kv_dtype),
    }
    try:
        return makers[choice.name]()
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"attention_backend: {choice.name}: {error}") from error


def _triton(heads: tuple[int, int, int], config: WorkerConfig) -> AttentionBackend:
    if config.deterministic:
        invariant = import_module("kernels.invariant_backend").InvariantBackend
        return cast(AttentionBackend, invariant(*heads[:2]))
    backend = import_module("kernels.triton_backend").TritonBackend
    return cast(AttentionBackend, backend(*heads, config.max_context))


def _flashinfer(
    choice: Choice,
    heads: tuple[int, int, int],
    config: WorkerConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionBackend:
    backend = import_module("kernels.flashinfer_backend").FlashInferBackend
    beside = _triton(heads, config) if choice.decode else None
    made = backend(*heads, page_size=config.page_size, dtype=dtype, device=device, beside=beside)
    return cast(AttentionBackend, made)


def _paged_cuda(
    heads: tuple[int, int, int], config: WorkerConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    backend = import_module("kernels.paged_cuda.backend").PagedCudaBackend
    return cast(AttentionBackend, backend(*heads, page_size=config.page_size, dtype=dtype, device=device))
