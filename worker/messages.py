"""What the threads of the worker say to the engine and what it answers. Frozen, plain Python.

Commands travel through CommandQueue, answers through OutputQueue, both in order, so an answer to
AddRequest is always ahead of that request's tokens.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from worker.ids import SequenceId
from worker.readers.audit import SweepReport
from worker.scheduling.output import OutputColumns
from worker.scheduling.request import AbortReason, AddOutcome, RequestSpec


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Answered by exactly one AddAnswer."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class Abort:
    """Sequences to stop; unknown ones are ignored."""

    sequence_ids: Sequence[SequenceId]
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class DropSource:
    """A service is gone: its sequences end, and nothing is said to it any more."""

    source: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who is to get the answer of a call."""

    source: str
    command_id: int


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows of the page table, from the books or from the device; empty: all in use."""

    ticket: Ticket
    rows: Sequence[int]
    from_device: bool


@dataclass(frozen=True, slots=True)
class Flush:
    """Drops what the prefix cache holds."""

    ticket: Ticket
    tenant: str
    salt: bytes | None
    include_active: bool
    include_pinned: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """Keeps the whole pages of a prefix; without tokens: lets go of the pin."""

    ticket: Ticket
    name: str
    token_ids: Sequence[int]
    salt: bytes
    ttl_seconds: float  # 0: for ever


@dataclass(frozen=True, slots=True)
class ListPins:
    """Asks for all pins."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    """A check of everything, in pieces between steps."""

    ticket: Ticket


class Recorded(Protocol):
    """A profile. `step` and `stop` on the thread that began it, `save` after that on any."""

    suffix: str  # of its file

    def step(self) -> None:
        """A step of the engine is over."""
        ...

    def stop(self) -> None:
        """Records no more."""
        ...

    def save(self, path: Path) -> None:
        """Writes it."""
        ...


@dataclass(frozen=True, slots=True)
class Profile:
    """Records what the engine's thread does in its next steps."""

    ticket: Ticket
    steps: int
    deadline: float  # monotonic seconds; then it ends with the steps that ran
    uses_torch: bool
    on_end: Callable[[Recorded | None, int, str], None]  # stopped, and its steps; or None, and why not


@dataclass(frozen=True, slots=True)
class EndProfile:
    """Nobody waits for the profile of that ticket any more."""

    ticket: Ticket


EngineCommand = (
    AddRequest
    | Abort
    | DropSource
    | ReadRows
    | Flush
    | Pin
    | ListPins
    | CheckIntegrity
    | Profile
    | EndProfile
)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One step's outputs by service, and what ended since the one before."""

    step: int
    seconds: float
    by_source: Mapping[str, OutputColumns]


@dataclass(frozen=True, slots=True)
class AddAnswer:
    """The answer to an AddRequest."""

    source: str
    sequence_id: SequenceId
    sample_count: int
    outcome: AddOutcome


@dataclass(frozen=True, slots=True)
class PageSlots:
    """The slots of pages, not written out: that is for who sends them."""

    pages: "array[int]"  # 'i', in token order
    page_size: int

    def __len__(self) -> int:
        return len(self.pages) * self.page_size


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the page table; owner 0 and no slots: not in use."""

    row: int
    owner: int
    request_id: str
    choice_index: int
    token_count: int
    slots: "PageSlots | array[int]"  # 'i'
    step: int  # it was read before this one was scheduled


@dataclass(frozen=True, slots=True)
class RowsAnswer:
    """The answer to ReadRows. Each row is as of one step boundary, not all as of the same one."""

    ticket: Ticket
    rows: Sequence[TableRow]


@dataclass(frozen=True, slots=True)
class FlushAnswer:
    """The answer to Flush."""

    ticket: Ticket
    freed_pages: int
    unindexed_pages: int


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pin on this worker."""

    name: str
    salt: bytes  # tenant, a zero byte, the salt of its requests
    token_count: int
    pinned_tokens: int
    pinned_pages: int
    computed_tokens: int
    hit_tokens: int
    seconds_left: float | None  # None: for ever


@dataclass(frozen=True, slots=True)
class PinAnswer:
    """The answer to Pin (one, or none after a removal) and to ListPins."""

    ticket: Ticket
    pins: Sequence[PinnedPrefix]
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class CheckAnswer:
    """The answer to CheckIntegrity."""

    ticket: Ticket
    report: SweepReport


class CallError(IntEnum):
    """Why a call failed; numbers are those of google.rpc.Code."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallReason(IntEnum):
    """The machine-readable reason; numbers are those of kvatlas.v1.ErrorReason."""

    NONE = 0
    INVALID_FIELD = 1
    QUEUE_FULL = 7
    QUOTA_EXCEEDED = 8
    DRAINING = 11
    NOT_READY = 12
    FEATURE_DISABLED = 15
    INTERNAL = 19
    CANCELLED_BY_OPERATOR = 21
    PIN_LIMIT = 24
    RECORDING_NOT_FOUND = 25
    RECORDING_RUNNING = 26
    DEADLINE_PASSED = 28
    RECORDING_FAILED = 29
    PROFILE_RUNNING = 30
    PROFILE_NOT_FOUND = 31


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The answer to a call that could not be done."""

    ticket: Ticket
    error: CallError
    reason: CallReason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)  # of ErrorInfo, for machines


@dataclass(frozen=True, slots=True)
class EncodedReply:
    """A CommandReply that another thread has encoded: parts of a snapshot are large."""

    ticket: Ticket
    payload: bytes
    is_last: bool


LinkMessage = (
    StepOutputs | AddAnswer | RowsAnswer | FlushAnswer | PinAnswer | CheckAnswer | CallFailure | EncodedReply
)


@dataclass(frozen=True, slots=True)
class SnapshotCall:
    """The page map from scratch; answered by the observer with EncodedReply parts."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """Page events after a number; answered by the observer."""

    ticket: Ticket
    after_number: int
    include_token_ids: bool


@dataclass(frozen=True, slots=True)
class IntegrityCall:
    """What the live audit has found so far; answered by the observer."""

    ticket: Ticket


ObserverCall = SnapshotCall | ReplayCall | IntegrityCall
