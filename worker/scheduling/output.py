"""What the scheduler tells services: tokens, starts and ends, one set of columns per service.

Built on the engine thread, handed over whole, encoded on another thread. Plain Python.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from worker.ids import SequenceId
from worker.scheduling.step import TokenLogprob

NO_TOKEN = 0xFFFFFFFF
"""In OutputColumns.token_ids: no token, only the end of the sequence."""


class FinishCode(IntEnum):
    """Why a sequence ended; numbers are those of worker.proto. 0: it goes on."""

    NONE = 0
    EOS = 1
    STOP_TOKEN = 2
    MAX_TOKENS = 3
    CONTEXT_LENGTH = 4
    TIME_LIMIT = 5
    ABORTED = 6
    TIMED_OUT = 7
    QUEUE_TIMEOUT = 8
    FAILED = 9
    DRAINED = 10


class FailureReason(IntEnum):
    """Reason of FinishCode.FAILED; numbers are those of kvatlas.v1.ErrorReason."""

    DEVICE_OUT_OF_MEMORY = 14
    INTERNAL = 19
    CONSTRAINT_DEAD_END = 32


class PrefixCounts(NamedTuple):
    """How a prompt's tokens fared in the prefix cache at first admission; they add up to the prompt."""

    hit_tokens: int
    miss_cold_tokens: int
    miss_evicted_tokens: int
    unaligned_tokens: int


class SequenceStart(NamedTuple):
    """A request left the queue, all its samples together; or one of them did, after a preemption."""

    sequence_id: SequenceId  # of sample 0; after a preemption of the one that it is about
    prefix: PrefixCounts | None  # None: not looked up, or admitted again after a preemption
    reused_pages: int
    queue_seconds: float  # since its arrival, or since the preemption
    resumed: bool


class BillCounters(NamedTuple):
    """A request's KV bill, over all its sequences; see KvBill in generation.proto."""

    page_seconds: float = 0.0
    shared_page_seconds_saved: float = 0.0
    saved_tokens: int = 0
    peak_pages: int = 0
    reused_pages: int = 0
    copied_pages: int = 0
    tail_waste_slots: int = 0
    evictions_caused: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


class SequenceEnd(NamedTuple):
    """End of one sequence: exactly one per accepted sequence, whatever happens."""

    sequence_id: SequenceId
    code: FinishCode
    completion_tokens: int
    bill: BillCounters | None = None  # with the last sequence of its request to end
    failure: FailureReason | None = None
    message: str = ""


@dataclass(slots=True)
class OutputColumns:
    """One service's share of a step. Entry i of the first three columns belongs together."""

    sequence_ids: "array[int]" = field(default_factory=lambda: array("Q"))
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    finish_codes: bytearray = field(default_factory=bytearray)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by entry; only who asked
    starts: list[SequenceStart] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)  # one per non-zero finish code, same order
    # Sample 0's id and one entry per prompt token; the first is None.
    prompt_logprobs: list[tuple[SequenceId, Sequence[TokenLogprob | None]]] = field(default_factory=list)
