"""What the link hands to the scheduler, and the answer to it. Frozen; owns no state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from worker.ids import SequenceId
from worker.scheduling.sampling import SamplingParams


class AddStatus(IntEnum):
    """Whether a request was taken; numbers are those of worker.proto."""

    ACCEPTED = 1
    QUEUE_FULL = 2
    NEVER_FITS = 3
    TOO_LONG = 4
    TIMEOUT_TOO_SHORT = 5
    DRAINING = 6
    NOT_READY = 7
    FEATURE_DISABLED = 8
    INVALID = 9


class AbortReason(IntEnum):
    """Why a service stops a sequence; numbers are those of worker.proto."""

    UNSPECIFIED = 0
    STOP_STRING = 1
    CLIENT = 2
    DEADLINE = 3
    CANCELLED = 4
    OPERATOR = 5
    SERVICE_ERROR = 6


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request: `sample_count` sequences with ids sequence_id .. sequence_id + sample_count - 1.

    Deadlines are absolute times of the worker's monotonic clock in seconds.
    """

    sequence_id: SequenceId
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    sample_count: int = 1
    priority: int = 0
    deadline: float | None = None
    queue_deadline: float | None = None
    cache_read: bool = True
    cache_write: bool = True
    cache_salt: bytes = b""
    request_id: str = ""
    tenant: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    receive_time_ns: int = 0  # Unix time, the service's clock
    source: str = ""  # instance id of the service; outputs are grouped by it
    first_choice_index: int = 0
    resume_token_ids: Sequence[int] = ()  # output of an earlier run on a lost worker; one sample only
    attempt: int = 0
    traceparent: str = ""  # W3C trace context, for the log


class AddOutcome(NamedTuple):
    """Answer to a RequestSpec, for all its samples."""

    status: AddStatus
    queue_position: int = 0
    estimated_wait_seconds: float = 0.0  # 0: unknown
    needed_pages: int = 0  # at most
    total_pages: int = 0
    message: str = ""
