"""A request as the service sees it, and what a worker says about it: plain values, no wire types.

Owns nothing. Built by handlers and codecs; read by everything between them.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol

from kvatlas.constraints.text import ConstraintText
from service.admission import Quota

NO_TOKEN = 0xFFFFFFFF
"""In a step's token ids: no token, only the end of the sequence."""


class AddStatus(IntEnum):
    """Whether a worker took a request; numbers are those of worker.proto."""

    ACCEPTED = 1
    QUEUE_FULL = 2
    NEVER_FITS = 3
    TOO_LONG = 4
    TIMEOUT_TOO_SHORT = 5
    DRAINING = 6
    NOT_READY = 7
    FEATURE_DISABLED = 8
    INVALID = 9


class FinishCode(IntEnum):
    """Why a worker ended a sequence; numbers are those of worker.proto."""

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


class AbortReason(IntEnum):
    """Why the service stops a sequence; numbers are those of worker.proto."""

    STOP_STRING = 1
    CLIENT = 2
    DEADLINE = 3
    CANCELLED = 4
    OPERATOR = 5
    SERVICE_ERROR = 6


class FinishReason(IntEnum):
    """Why a choice ended, as the client reads it; numbers are those of generation.proto."""

    EOS = 1
    STOP_STRING = 2
    STOP_TOKEN = 3
    MAX_TOKENS = 4
    CONTEXT_LENGTH = 5
    TIME_LIMIT = 6
    CANCELLED = 7


class LostReason(Enum):
    """How a worker went away; the values are the label of `resumes_total`."""

    CRASH = "crash"  # its socket closed
    PARTITION = "partition"  # silence, lost messages or a full socket
    DRAIN = "drain"  # it shuts down and hands its sequences over


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are picked; every value resolved. Meaning of "off" as in worker.proto."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Stops:
    """When a sequence ends."""

    max_tokens: int
    is_limit_given: bool = True  # max_tokens is the client's, not what was left of context or pool
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_in_output: bool = False
    max_duration_ms: int = 0  # 0: no limit


@dataclass(frozen=True, slots=True)
class Output:
    """What the client wants back."""

    text: bool = True
    ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sent, validated and tokenized: one prompt, n samples."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    stops: Stops
    output: Output
    model_id: str = ""  # whose answer it is, wherever it goes on; empty: anybody's
    context_tokens: int = 0  # at which it ends at the latest, wherever it goes on; 0: as each worker has it
    num_samples: int = 1
    priority: int = 0
    queue_timeout_ms: int = 0  # 0: no limit
    cache_read: bool = True
    cache_write: bool = True
    cache_salt: bytes = b""
    tenant: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""
    constraint: ConstraintText | None = None
    traceparent: str = ""
    receive_time_ns: int = 0  # Unix time
    deadline: float | None = None  # monotonic clock

    @property
    def page_salt(self) -> bytes:
        """Part of the key of every page: tenant, a zero byte, the client's salt."""
        return self.tenant.encode() + b"\0" + self.cache_salt


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt to compute samples of a request: what an AddSequence says beside the Request."""

    sequence_id: int  # of its first sample; the others follow
    num_samples: int
    first_choice: int = 0
    resume_ids: Sequence[int] = ()  # output of earlier attempts; one sample only
    attempt: int = 0
    timeout_ms: int = 0  # 0: no limit
    queue_timeout_ms: int = 0
    max_duration_ms: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class AddOutcome:
    """A worker's answer to a Run."""

    sequence_id: int
    status: AddStatus
    queue_position: int = 0
    estimated_wait_ms: int = 0  # 0: unknown
    needed_pages: int = 0
    total_pages: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """How the prompt's tokens fared in the prefix cache at first admission; they add up to the prompt."""

    hit_tokens: int
    miss_cold_tokens: int
    miss_evicted_tokens: int
    unaligned_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A run left the worker's queue."""

    sequence_id: int
    prefix: PrefixCounts | None  # None: not looked up, or admitted again
    reused_pages: int
    queue_us: int
    resumed: bool  # after a preemption; no news for the client


@dataclass(frozen=True, slots=True)
class KvBill:
    """What a run cost in KV memory; fields as in generation.proto."""

    page_seconds: float = 0.0
    shared_page_seconds_saved: float = 0.0
    peak_pages: int = 0
    reused_pages: int = 0
    copied_pages: int = 0
    tail_waste_slots: int = 0
    evictions_caused: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    saved_tokens: int = 0

    def plus(self, other: "KvBill") -> "KvBill":
        """Both together. Runs follow each other, so the peak is the larger one."""
        return KvBill(
            self.page_seconds + other.page_seconds,
            self.shared_page_seconds_saved + other.shared_page_seconds_saved,
            max(self.peak_pages, other.peak_pages),
            self.reused_pages + other.reused_pages,
            self.copied_pages + other.copied_pages,
            self.tail_waste_slots + other.tail_waste_slots,
            self.evictions_caused + other.evictions_caused,
            self.preemptions + other.preemptions,
            self.recomputed_tokens + other.recomputed_tokens,
            self.saved_tokens + other.saved_tokens,
        )


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """End of one sequence on a worker: exactly one per accepted sequence."""

    sequence_id: int
    code: FinishCode
    completion_tokens: int = 0
    bill: KvBill | None = None  # with the last sequence of a run to end
    error_reason: int = 0  # FAILED: number of kvatlas.v1.ErrorReason
    message: str = ""  # FAILED: for the log


@dataclass(slots=True)
class Scores:
    """Log-probabilities as columns, one entry per token; 8 bytes per alternative."""

    logprobs: "array[float]" = field(default_factory=lambda: array("f"))  # NaN: unknown
    ranks: "array[int]" = field(default_factory=lambda: array("I"))
    counts: bytearray = field(default_factory=bytearray)  # alternatives of each token
    alternative_ids: "array[int]" = field(default_factory=lambda: array("I"))
    alternative_logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.logprobs)

    def append(self, other: "Scores", entry: int, first_alternative: int) -> None:
        """Copies one entry of other; its alternatives begin at `first_alternative` there."""
        end = first_alternative + other.counts[entry]
        self.logprobs.append(other.logprobs[entry])
        self.ranks.append(other.ranks[entry])
        self.counts.append(other.counts[entry])
        self.alternative_ids.extend(other.alternative_ids[first_alternative:end])
        self.alternative_logprobs.extend(other.alternative_logprobs[first_alternative:end])

    def take(self, count: int) -> "Scores":
        """Removes the first entries and returns them."""
        alternatives = sum(self.counts[:count])
        taken = Scores(
            self.logprobs[:count],
            self.ranks[:count],
            self.counts[:count],
            self.alternative_ids[:alternatives],
            self.alternative_logprobs[:alternatives],
        )
        del self.logprobs[:count], self.ranks[:count], self.counts[:count]
        del self.alternative_ids[:alternatives], self.alternative_logprobs[:alternatives]
        return taken


class SequenceReceiver(Protocol):
    """Where a link puts what comes for one sequence. Never waits, never fails."""

    def put(self, token_id: int) -> None:
        """A token."""
        ...

    def put_scored(self, token_id: int, scores: Scores, entry: int, first_alternative: int) -> None:
        """A token with its log-probabilities."""
        ...

    def finish(self, end: SequenceEnd) -> None:
        """The end; nothing follows."""
        ...


class RunReceiver(Protocol):
    """Where a link puts what comes for a whole run. Never waits, never fails."""

    def added(self, outcome: AddOutcome) -> None:
        """The worker's answer."""
        ...

    def started(self, start: SequenceStart) -> None:
        """It left the queue."""
        ...

    def prompt_scored(self, scores: Scores) -> None:
        """Log-probabilities of the prompt."""
        ...

    def lost(self, reason: LostReason) -> None:
        """The worker is gone; nothing follows."""
        ...


@dataclass(slots=True)
class Call:
    """One call of this process, for interceptors and handlers on its way in and out."""

    method: str
    receive_time_ns: int = 0  # Unix time
    received: float = 0.0  # monotonic clock; uvloop's own ticks in milliseconds
    deadline: float | None = None  # monotonic clock; the earlier of the client's and ours
    deadline_is_ours: bool = False
    attempts_before: int = 0  # grpc-previous-rpc-attempts
    traceparent: str = ""  # W3C trace context: the client's, or that of our own span below it
    tracestate: str = ""
    request_id: str = ""
    principal: str = ""
    tenant: str = ""
    quota: Quota | None = None  # of the principal; None: no limit of its own
    scopes: frozenset[str] | None = None  # None: no credentials are asked for, everything is allowed
    code: str = "OK"  # name of the status that the guard gave

    def may(self, scope: str) -> bool:
        """Whether the caller has that scope."""
        return self.scopes is None or scope in self.scopes

    def is_over(self, now: float) -> bool:
        """Whether its deadline is what ends it now."""
        if self.deadline is None:
            return False
        # Ours is not rounded, and nobody else keeps it.
        whole = 0.0 if self.deadline_is_ours else self.deadline - self.received
        return is_deadline_over(self.deadline - now, whole)


current_call: ContextVar[Call] = ContextVar("current_call")

_DEADLINE_SLACK_SECONDS = 0.01  # timers ring a little before their time
_DEADLINE_ROUNDING = 0.01  # gRPC's core sends a timeout rounded up, by a hundredth at most


def is_deadline_over(left: float, whole: float) -> bool:
    """Whether a call that ends `left` seconds before its deadline, of `whole` seconds, ends because of it.

    A client keeps its own deadline and then cancels, so that what comes is a cancel, and before our time:
    of 10.51 s we are told 10.6.
    """
    return left <= max(_DEADLINE_SLACK_SECONDS, _DEADLINE_ROUNDING * whole)


_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")


def trace_id_of(traceparent: str) -> str:
    """Trace id of a W3C trace context; empty for anything else, which a client may send."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else ""


def sampled_trace_id(traceparent: str) -> str:
    """The same, but empty where the context says that nobody keeps the trace."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found and int(found[2], 16) & 1 else ""
