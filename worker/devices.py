"""Which runner a config asks for: first the facts of its model, in milliseconds, then the runner itself.

The worker answers services while the runner still loads, so both are apart. torch is imported only
where the torch runner was chosen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.resolve import resolve_model
from kvatlas.models.shapes import SHAPES
from kvatlas.models.text_vocabulary import read_chat_template
from kvatlas.models.vocabulary import read_json, read_vocabulary, tokenizer_digest
from worker.config import WorkerConfig
from worker.description import ModelDescription
from worker.execution.fake_runner import FakeModel, FakeRunner
from worker.execution.runner import Runner

ROW_ALIGNMENT = 32  # entries of a row of the page table
FAKE_CONTEXT = 8192
FAKE_PAGES = 4096
_GENERATION_CONFIG = "generation_config.json"
_SAMPLING_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "repetition_penalty": (1e-6, 1e6),
}
"""What a request may have at all: with a default past it every request that leaves it out would fail."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is known before anything is loaded."""

    model: ModelDescription
    automatic_pages: int  # the pool's size where the config names none
    page_bytes: int = 0
    layer_count: int = 0
    kv_head_count: int = 0
    head_dim: int = 0
    doubling_context: int = 0  # see worker.model.parameters; 0: unknown
    dtype: str = ""
    device: str = "cpu"
    device_name: str = ""
    device_memory_bytes: int = 0
    compute_capability: str = ""  # of a GPU, e.g. sm_90
    attention_backend: str = ""
    attention_backend_reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


class Device(Protocol):
    """One kind of runner."""

    def facts(self, config: WorkerConfig) -> DeviceFacts:
        """Reads the model's description; fast. Raises ModelError, ConfigError."""
        ...

    def build(self, config: WorkerConfig) -> Runner:
        """Loads the model and allocates the pool; slow. `config` is resolved."""
        ...


def choose_device(config: WorkerConfig) -> Device:
    """The kind that the config names."""
    if config.runner == "fake":
        return FakeDevice()
    return cast(Device, import_module("worker.torch_device").TorchDevice())


def row_width(config: WorkerConfig) -> int:
    """Slots per row: whole pages for the longest sequence, a multiple of 128 bytes (S1-02, H16)."""
    step = math.lcm(ROW_ALIGNMENT, config.page_size)
    longest = min(config.max_context, config.num_pages * config.page_size)
    return -(-longest // step) * step


class FakeDevice:
    """A device of lists. Takes ids and digests of a model's tokenizer, never its weights."""

    def facts(self, config: WorkerConfig) -> DeviceFacts:
        """See Device."""
        return DeviceFacts(
            model=describe(resolve_model(config.model), FAKE_CONTEXT),
            automatic_pages=FAKE_PAGES,
            layer_count=1,
            kv_head_count=1,
            head_dim=1,
            dtype="int64",
            device_name="lists",
            attention_backend="fake",
        )

    def build(self, config: WorkerConfig) -> Runner:
        """See Device."""
        model = describe(resolve_model(config.model), FAKE_CONTEXT)
        return FakeRunner(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_running=config.max_running,
            row_width=row_width(config),
            model=FakeModel(model.vocab_size, model.eos_token_ids, config.fake_eos_every),
            step_seconds=config.fake_step_ms / 1000,
            is_slow=Path(config.fake_hold).exists if config.fake_hold else None,
        )


def describe(files: ModelFiles, max_context: int, vocab_size: int | None = None) -> ModelDescription:
    """What services are told of a model; without a `vocab_size`, that of its tokenizer."""
    vocabulary = read_vocabulary(files)
    size = vocab_size or vocabulary.num_ids or _shape_vocab_size(files)
    defaults = _generation_config(files)
    return ModelDescription(
        model_id=files.model_id,
        revision=files.revision,
        vocab_size=size,
        max_context_tokens=max_context,
        eos_token_ids=tuple(sorted(vocabulary.eos_ids)),
        tokenizer_sha256=tokenizer_digest(files),
        has_chat_template=read_chat_template(files) is not None,
        default_temperature=_sampling(defaults, "temperature", 1.0),
        default_top_p=_sampling(defaults, "top_p", 1.0),
        default_top_k=int(_sampling(defaults, "top_k", 0)),
        default_repetition_penalty=_sampling(defaults, "repetition_penalty", 1.0),
    )


def _generation_config(files: ModelFiles) -> Mapping[str, object]:
    """How its makers sample from a model; GGUF files do not say."""
    path = files.location / _GENERATION_CONFIG if files.kind is ModelKind.FOLDER else None
    return read_json(path) if path is not None and path.is_file() else {}


def _sampling(values: Mapping[str, object], name: str, default: float) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    low, high = _SAMPLING_RANGES[name]
    if not low <= value <= high:
        raise ModelError(
            ModelErrorReason.INVALID_CONFIG,
            f"{_GENERATION_CONFIG}: {name} is {value}, expected {low:g} to {high:g}",
        )
    return float(value)


def _shape_vocab_size(files: ModelFiles) -> int:
    size = SHAPES.get(files.shape or "", {}).get("vocab_size")
    if not isinstance(size, int):
        text = f"{files.name}: nothing says how many tokens there are"
        raise ModelError(ModelErrorReason.INVALID_CONFIG, text)
    return size
