"""Who this worker is: facts that services and metrics are told. Frozen, plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

VERSION = "0.1.0"


class WorkerState(IntEnum):
    """Life of the worker; numbers are those of kvatlas.v1.ServerState."""

    STARTING = 1
    SERVING = 2
    DRAINING = 3


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The served model. Services compare vocab_size and tokenizer_sha256 with their own tokenizer."""

    model_id: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_sha256: str = ""
    has_chat_template: bool = False
    revision: str = ""
    architecture: str = ""
    dtype: str = ""
    parameter_count: int = 0
    # Sampling values of unset request fields; the model's own where its files give some.
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    default_repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """Geometry of the pool; fixed within an epoch."""

    num_pages: int  # without the dummy page, whose id this is
    page_size: int
    max_running: int
    row_width: int  # slots per row of the page table
    eviction_policy: str
    page_bytes: int = 0
    layer_count: int = 0
    kv_head_count: int = 0
    head_dim: int = 0
    dtype: str = ""
    device: str = "cpu"
    rank_count: int = 1


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """All of it, with the limits and addresses."""

    worker_id: str
    epoch: int  # ns since 1970 at the start of this life; never goes back
    model: ModelDescription
    pool: PoolDescription
    max_queued: int
    max_context: int
    max_pinned_pages: int
    features: tuple[str, ...]
    pages_address: str
    fingerprint_key: bytes
    attention_backend: str = ""
    attention_backend_reason: str = ""
    device_name: str = ""
    device_memory_bytes: int = 0
    compute_capability: str = ""  # of a GPU, e.g. sm_90
    versions: Mapping[str, str] = field(default_factory=dict)
