"""The torch runner put together: model, attention backend, pool, on `cpu` or `cuda`.

Imported only when the torch runner is chosen. Owns the choice of dtype, backend and pool size; how a step
runs is worker.execution's.
"""

import logging
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import cast

import torch

from kernels.compile_processes import close_begun
from kernels.cpu.library import cpu_library
from kernels.fp8 import E4M3
from kvatlas.models.files import ModelFiles
from kvatlas.models.resolve import resolve_model
from worker.attention_backends import make_backend
from worker.attention_choice import Choice, choose, look_around
from worker.config import ConfigError, WorkerConfig
from worker.description import ModelDescription
from worker.devices import DeviceFacts, describe
from worker.execution.cpu_model import cpu_parts
from worker.execution.headroom import step_bytes
from worker.execution.kv_pool import bytes_per_page, pages_that_fit
from worker.execution.runner import Runner
from worker.execution.torch_runner import RunnerConfig, TorchRunner
from worker.log import log_event, log_phase
from worker.model.config import ModelConfig
from worker.model.invariant import invariant_linear
from worker.model.layers import LinearFactory, torch_linear
from worker.model.llama import Model
from worker.model.parameters import doubling_context, parameter_shapes
from worker.model.quantized import LEAST_CAPABILITY, fp8_linear
from worker.model.quantized_kv import measure_kv_scales
from worker.model.source import load_model, read_config

MAX_AUTOMATIC_CPU_BYTES = 4 << 30  # a pool on the CPU takes memory from everybody on the machine
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": E4M3}
logger = logging.getLogger("worker.device")


class TorchDevice:
    """See worker.devices.Device."""

    def facts(self, config: WorkerConfig) -> DeviceFacts:
        """See Device."""
        files = resolve_model(config.model)
        model, device, dtype = read_config(files), _device(config), _dtype(config)
        kv_dtype = _kv_dtype(config, dtype)
        _check_weight_dtype(config, device, dtype)
        choice = choose(config, model, look_around(config, model, device, kv_dtype))
        num_parameters = sum(prod(shape) for shape in parameter_shapes(model).values())
        page_bytes = _page_bytes(model, config.page_size, kv_dtype)
        if choice.name == "paged_cuda":
            page_bytes *= 2  # its own layout beside the pool's
        description = describe(files, model.usable_context, model.vocab_size)
        return DeviceFacts(
            model=_completed(description, model, dtype, num_parameters),
            automatic_pages=_automatic_pages(
                config,
                device,
                model_bytes=_model_bytes(config, model, dtype),
                page_bytes=page_bytes,
                step_bytes=_step_bytes(config, model, dtype),
            ),
            page_bytes=page_bytes,
            layer_count=model.num_layers,
            kv_head_count=model.num_kv_heads,
            head_dim=model.head_dim,
            doubling_context=doubling_context(model),
            dtype=_name(kv_dtype),
            device=str(device),
            device_name=_device_name(device),
            device_memory_bytes=_total_bytes(device),
            compute_capability=_compute_capability(device),
            attention_backend=choice.label,
            attention_backend_reason=choice.reason,
            versions=_versions(),
        )

    def build(self, config: WorkerConfig) -> Runner:
        """See Device."""
        if config.device == "cpu":
            torch.set_num_threads(config.threads or os.cpu_count() or 1)
        files, device, dtype = resolve_model(config.model), _device(config), _dtype(config)
        kv_dtype = _kv_dtype(config, dtype)
        choice = choose(config, read_config(files), look_around(config, read_config(files), device, kv_dtype))
        with log_phase(logger, "weights"):
            model = _load(files, config, device, dtype, is_fast_cpu=choice.name == "cpu")
        shape = model.config
        backend = make_backend(choice, shape, config, device, kv_dtype)
        runner_config = RunnerConfig(
            max_running=config.max_running,
            max_context=config.max_context,
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            attention_scale=shape.attention_scale,
            kv_dtype=kv_dtype,
            poison=config.debug_poison,
            max_step_tokens=config.max_batch_tokens,
            kv_scales=measure_kv_scales(model, device) if kv_dtype == E4M3 else (),
        )
        log_event(
            logger,
            logging.INFO,
            "model_loaded",
            model=files.model_id,
            device=device,
            dtype=_name(dtype),
            weight_dtype=config.weight_dtype,
            kv_dtype=_name(kv_dtype),
            backend=choice.label,
            because=choice.reason,
        )
        make = _runner(choice, device)
        is_made = False
        try:
            runner = make(model, backend, runner_config, device)
            is_made = True
        finally:
            close_begun(is_needless=is_made)  # for kernels that this runner does not have
        return runner


def _runner(choice: Choice, device: torch.device) -> Callable[..., Runner]:
    if device.type != "cuda" or choice.name not in ("triton", "flashinfer"):
        return TorchRunner
    return cast(Callable[..., Runner], import_module("worker.execution.cuda_runner").CudaRunner)


def _load(
    files: ModelFiles, config: WorkerConfig, device: torch.device, dtype: torch.dtype, *, is_fast_cpu: bool
) -> Model:
    library = cpu_library() if is_fast_cpu and dtype == torch.float32 else None
    if library is None:
        if config.deterministic and device.type == "cpu":
            raise ConfigError("deterministic: on a processor it needs the compiled kernels, and dtype fp32")
        return load_model(
            files,
            device=device,
            dtype=dtype,
            max_context=config.max_context,
            linear_factory=_linear_factory(config),
            seed=config.seed,
        )
    library.use_precision("fast" if config.cpu_precision == "fast" else "exact")
    parts = cpu_parts(library)
    return load_model(
        files,
        device=device,
        dtype=dtype,
        max_context=config.max_context,
        linear_factory=parts.linear_factory,
        embedding_factory=parts.embedding_factory,
        operations=parts.operations,
        seed=config.seed,
    )


def _linear_factory(config: WorkerConfig) -> LinearFactory:
    if config.deterministic:
        return invariant_linear
    return fp8_linear if config.weight_dtype == "fp8" else torch_linear


def _device(config: WorkerConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, torch sees no CUDA device")
    return torch.device(config.device, 0) if config.device == "cuda" else torch.device("cpu")


def _dtype(config: WorkerConfig) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if config.device == "cuda" else torch.float32
    return DTYPES[config.dtype]


def _kv_dtype(config: WorkerConfig, dtype: torch.dtype) -> torch.dtype:
    return E4M3 if config.kv_dtype == "fp8" else dtype


def _check_weight_dtype(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> None:
    if config.weight_dtype != "fp8":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        raise ConfigError(f"weight_dtype: fp8 products need a CUDA device of capability {needed} or more")
    if dtype != torch.bfloat16:
        raise ConfigError("weight_dtype: fp8 goes with dtype bf16")
    if config.deterministic:
        raise ConfigError("deterministic: fp8 products depend on the batch")


def _model_bytes(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Of the loaded model: matrices of layers as weight_dtype says, all else as dtype says."""
    total = 0
    for name, shape in parameter_shapes(model).items():
        is_layer_matrix = len(shape) == 2 and name.startswith("model.layers.")
        size = 1 if is_layer_matrix and config.weight_dtype == "fp8" else dtype.itemsize
        total += prod(shape) * size
    return total


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def _page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    return bytes_per_page(
        num_layers=model.num_layers,
        page_size=page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def _step_bytes(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    if config.device == "cpu":
        return 0  # its pool is small, and untouched memory costs nothing
    tokens, running = config.step_tokens, config.max_running
    return step_bytes(model, max_step_tokens=tokens, max_running=running, itemsize=dtype.itemsize)


def _automatic_pages(
    config: WorkerConfig, device: torch.device, *, model_bytes: int, page_bytes: int, step_bytes: int
) -> int:
    if config.num_pages:
        return config.num_pages
    try:
        fitting = pages_that_fit(
            memory_ratio=config.memory_ratio,
            free_bytes=_free_bytes(device),
            model_bytes=model_bytes,
            page_bytes=page_bytes,
            step_bytes=step_bytes,
        )
    except ValueError as error:
        raise ConfigError(f"num_pages: {error}") from None
    if device.type == "cpu":
        fitting = min(fitting, max(1, MAX_AUTOMATIC_CPU_BYTES // page_bytes))
    return fitting


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return platform.processor() or platform.machine()


def _compute_capability(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _completed(
    description: ModelDescription, model: ModelConfig, dtype: torch.dtype, num_parameters: int
) -> ModelDescription:
    return replace(
        description,
        architecture=model.architecture,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
        dtype=_name(dtype),
        parameter_count=num_parameters,
    )
