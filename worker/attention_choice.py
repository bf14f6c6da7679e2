"""Which attention backend a worker uses, and why: one name, one sentence.

Owns the rule of `auto`. Decides by what is installed, what is compiled and what was measured; compiles
nothing and loads no kernel. Figures: docs/kernels/backends.md.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from worker.config import ConfigError, WorkerConfig
from worker.model.config import ModelConfig

NAMES = ("auto", "cpu", "flashinfer", "paged_cuda", "reference", "triton")
_ON_CUDA_ONLY = ("flashinfer", "paged_cuda", "triton")
_WITH_FP8_PAGES = ("cpu", "reference", "triton")
FLASHINFER_PREFILL_DIMS = (128,)
"""Head sizes at which FlashInfer's prefill was measured to be faster than ours."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend by name; `decode`: who decodes beside it, if not itself."""

    name: str
    reason: str
    decode: str = ""

    @property
    def label(self) -> str:
        """What services and metrics are told."""
        return f"{self.name}+{self.decode}" if self.decode else self.name


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the rule asks of the machine."""

    device: torch.device
    kv_dtype: torch.dtype
    has_flashinfer: bool
    has_flashinfer_kernels: bool  # of prefill, compiled already, for this model's shape


def choose(config: WorkerConfig, model: ModelConfig, around: Surroundings) -> Choice:
    """The backend that was named, or the best one. Raises ConfigError where the named one cannot be."""
    name = config.attention_backend
    if name not in NAMES:
        raise ConfigError(f"attention_backend: {name!r} is none of {', '.join(NAMES)}")
    if name == "auto":
        return _automatic(config, model, around)
    if name in _ON_CUDA_ONLY and around.device.type != "cuda":
        raise ConfigError(f"attention_backend: {name} needs a CUDA device, not {around.device}")
    if name == "cpu" and around.device.type != "cpu":
        raise ConfigError(f"attention_backend: cpu needs --device cpu, not {around.device}")
    if around.kv_dtype == torch.float8_e4m3fn and name not in _WITH_FP8_PAGES:
        raise ConfigError(f"kv_dtype: fp8 pages are read by {', '.join(_WITH_FP8_PAGES)}, not by {name}")
    if name == "flashinfer" and not around.has_flashinfer:
        raise ConfigError("attention_backend: flashinfer is not installed (pip install kvatlas[flashinfer])")
    keeper = "triton" if around.device.type == "cuda" else "cpu"
    if config.deterministic and name != keeper:
        raise ConfigError(f"deterministic: on {around.device.type} only {keeper} promises it, not {name}")
    return Choice(name, "asked for")


def _automatic(config: WorkerConfig, model: ModelConfig, around: Surroundings) -> Choice:
    if around.device.type != "cuda":
        return Choice("cpu", "a processor")
    if config.deterministic:
        return Choice("triton", "deterministic")
    if around.kv_dtype == torch.float8_e4m3fn:
        return Choice("triton", "fp8 pages")
    if around.kv_dtype == torch.float32:
        return Choice("triton", "fp32 pages")
    if not around.has_flashinfer:
        return Choice("triton", "flashinfer is not installed")
    if model.head_dim not in FLASHINFER_PREFILL_DIMS:
        return Choice("triton", f"flashinfer was not measured at head_dim {model.head_dim}")
    if not around.has_flashinfer_kernels:
        return Choice("triton", "flashinfer's kernels are not compiled for this shape")
    return Choice("flashinfer", "faster prefill, and its kernels are compiled", decode="triton")


def look_around(
    config: WorkerConfig, model: ModelConfig, device: torch.device, kv: torch.dtype
) -> Surroundings:
    """Asks the machine; imports flashinfer only where `auto` could take it."""
    installed = find_spec("flashinfer") is not None
    asks = installed and device.type == "cuda" and config.attention_backend == "auto"
    compiled = False
    if asks and model.head_dim in FLASHINFER_PREFILL_DIMS and kv == torch.bfloat16:
        from kernels.flashinfer_backend import compiled_kernels, prefill_family

        compiled = prefill_family(device) in compiled_kernels(model.head_dim, kv)
    return Surroundings(device, kv, installed, compiled)
