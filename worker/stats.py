"""Frozen numbers of one step, and frozen views of sequences, for observers on other threads.

Knows nothing of the pool or the scheduler: they fill it, readers read it.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from worker.ids import Owner, PageId, Row, SequenceId


class SequenceState(IntEnum):
    """Life of a sequence; numbers are those of cache.proto."""

    WAITING = 1
    PREFILL = 2
    DECODE = 3
    PREEMPTED = 4


class WaitReason(IntEnum):
    """Why a sequence does not run; numbers are those of cache.proto."""

    NONE = 0
    PAGES = 1
    ROWS = 2
    STEP_TOKENS = 3
    PRIORITY = 4


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A live sequence as the page map shows it."""

    sequence_id: SequenceId
    request_id: str
    choice_index: int
    owner: Owner  # 0 while it waits
    row: Row | None
    state: SequenceState
    page_ids: tuple[PageId, ...]  # in token order, from first_page_index on
    first_page_index: int  # pages before page_ids that did not change
    token_count: int  # tokens with KV in those pages
    prompt_tokens: int
    prefix: tuple[int, int, int, int] | None  # hit, miss_cold, miss_evicted, unaligned
    priority: int
    preemptions: int
    receive_time_ns: int
    wait_reason: WaitReason
    needed_pages: int
    tenant: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Growth:
    """Pages that sequences got, or got in exchange, in order; entry i of all columns together."""

    owners: "array[int]" = field(default_factory=lambda: array("H"))
    page_indexes: "array[int]" = field(default_factory=lambda: array("i"))  # number in the sequence
    page_ids: "array[int]" = field(default_factory=lambda: array("I"))


class StepStats(NamedTuple):
    """One step as the metrics see it. A tuple, since one is made for each step."""

    number: int
    seconds: float  # launch to result
    num_sequences: int
    num_prefill_tokens: int
    num_decode_tokens: int
    is_replayed: bool = False  # from a CUDA graph

    @property
    def phase(self) -> str:
        """prefill, decode or mixed."""
        if self.num_prefill_tokens == 0:
            return "decode"
        return "mixed" if self.num_decode_tokens else "prefill"


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Totals of the engine since its start, and what it holds now. One snapshot, so that it adds up."""

    running_sequences: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    waiting_by_reason: Mapping[WaitReason, int] = field(default_factory=dict)
    waiting_uncached_tokens: int = 0
    estimated_wait_seconds: float = 0.0  # of a request that comes now; 0: unknown, or none
    prompt_tokens_computed_total: int = 0
    output_tokens_total: int = 0
    hit_tokens_total: int = 0
    miss_cold_tokens_total: int = 0
    miss_evicted_tokens_total: int = 0
    unaligned_tokens_total: int = 0
    preemptions_total: int = 0
    preempted_tokens_total: int = 0
    recomputed_tokens_total: int = 0  # of those, what no page had when the sequence came back
    allocation_failures_total: int = 0
    capacity_evictions_total: int = 0
    flush_evictions_total: int = 0
    pin_pages: int = 0  # of pinned prefixes, referenced or not


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """What the pool is at one revision: the fold of all page events up to it."""

    revision: int  # number of the last page event
    step: int  # engine step of that event
    free_pages: int
    active_pages: int
    cached_pages: int
    pinned_pages: int
    reserved_pages: int
    shared_pages: int = 0  # active pages with two or more references
    references: int = 0
    filled_slots: int = 0  # of active pages
    unfilled_slots: int = 0  # of active pages
    allocations_total: int = 0
    evictions_total: int = 0
    copies_total: int = 0

    @property
    def available_pages(self) -> int:
        """What admission can use: free and evictable pages."""
        return self.free_pages + self.cached_pages

    @property
    def total_pages(self) -> int:
        """All pages but the reserved ones."""
        return self.free_pages + self.active_pages + self.cached_pages + self.pinned_pages


@dataclass(frozen=True, slots=True)
class LoadView:
    """Load of the worker as of the observer's last turn."""

    counts: EngineCounts
    pool: PoolTotals
    output_tokens_per_second: float = 0.0  # over 10 s
    prompt_tokens_per_second: float = 0.0  # over 10 s, cached ones not counted
    prefix_hit_rate: float = 0.0  # over 60 s, 0..1
    mean_step_seconds: float = 0.0  # over 10 s
