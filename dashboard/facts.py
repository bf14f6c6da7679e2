"""What the service says, as frozen values: the types between the wire and the views.

Durations are seconds, moments are milliseconds since 1970. Knows neither protobuf nor Streamlit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

RESULTS = ("hit", "miss_cold", "miss_evicted", "unaligned")
"""Outcomes of a look-up in the prefix cache, in the order of stacks and legends."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker as GetServerInfo has it."""

    worker_id: str
    epoch: int
    state: str  # starting, serving, draining, lost
    model_id: str
    device_name: str
    attention_backend: str


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A service and its workers."""

    version: str
    instance_id: str
    state: str
    features: frozenset[str]
    workers: tuple[WorkerFacts, ...]


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is."""

    worker_id: str
    running_sequences: int
    waiting_requests: int
    available_pages: int
    total_pages: int
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    prefix_hit_rate: float  # 0..1, in tokens


@dataclass(frozen=True, slots=True)
class PageHolder:
    """A sequence that refers to a page."""

    owner: int
    request_id: str
    choice_index: int
    state: str
    token_count: int


@dataclass(frozen=True, slots=True)
class PageEventFacts:
    """One event of a page."""

    number: int
    kind: str  # allocated, shared, sealed, released, cached, evicted, freed, ...
    step: int
    time_ms: int
    owner: int
    request_id: str
    ref_count: int
    other_page_id: int | None


@dataclass(frozen=True, slots=True)
class PageFacts:
    """One page in words."""

    page_id: int
    state: str
    is_sealed: bool
    is_pinned: bool
    ref_count: int
    filled_slots: int
    holders: tuple[PageHolder, ...]
    parent_page_id: int | None
    child_page_ids: tuple[int, ...]
    hit_count: int
    age_seconds: float
    idle_seconds: float
    events: tuple[PageEventFacts, ...]  # oldest first


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the page table: the slot of each token."""

    row: int
    owner: int
    request_id: str
    token_count: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one setting of the cache would have done."""

    pool_slots: int
    page_size: int
    policy: str
    tokens: Mapping[str, int]  # by result
    hit_ratio: float
    hit_ratio_error: float
    evictions: int | None  # None: not known, of what was counted
    mean_wasted_slots: float | None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EstimateReport:
    """Estimates, what was really counted, and what they rest on."""

    estimates: tuple[Estimate, ...]
    observed: Estimate
    sampling_rate: float
    request_count: int
    token_count: int
    seconds: float
    token_granularity: int


@dataclass(frozen=True, slots=True)
class CheckFacts:
    """One invariant of the worker's audit."""

    name: str
    pass_count: int
    fail_count: int
    last_run_ms: int | None
    last_pass_ms: int | None


@dataclass(frozen=True, slots=True)
class ViolationFacts:
    """An invariant that does not hold, with both sides."""

    check: str
    subject: str
    expected: str
    found: str
    page_id: int | None
    row: int | None
    time_ms: int | None


@dataclass(frozen=True, slots=True)
class IntegrityFacts:
    """What the live audit has found."""

    checks: tuple[CheckFacts, ...]
    violations: tuple[ViolationFacts, ...]
    violations_total: int
    last_success_ms: int | None
    last_round_seconds: float
    sweep_count: int


@dataclass(frozen=True, slots=True)
class CheckRun:
    """A full check that was asked for."""

    violations: tuple[ViolationFacts, ...]
    violations_total: int
    checked_pages: int
    checked_rows: int
    engine_seconds: float


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model reads it."""

    text: str  # with the chat template around it
    pieces: tuple[str, ...]  # of the text, one for each token
    cached_tokens: int  # that the prefix cache has right now
    page_count: int


@dataclass(frozen=True, slots=True)
class Answer:
    """How a playground's request went."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    tokens: Mapping[str, int] = field(default_factory=dict)  # of the prompt, by result
    first_token_seconds: float = 0.0
    page_seconds: float = 0.0
    page_seconds_saved: float = 0.0
    reused_pages: int = 0
    tail_waste_slots: int = 0
    finish_reason: str = ""
