"""What a service may ask besides sequences: who answers it, how long it may take, how many at once.

Page map and events are answered by the observer, rows and flushes by the engine between two steps.
Owns the open calls; a call that nobody answered in time is answered here, and a late answer dropped.
"""

from collections.abc import Callable
from typing import Protocol

from kvatlas.worker.v1 import worker_pb2
from worker.link.codec import Unfit, token_ids
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    CheckIntegrity,
    EngineCommand,
    Flush,
    IntegrityCall,
    ListPins,
    ObserverCall,
    Pin,
    ReadRows,
    ReplayCall,
    SnapshotCall,
    Ticket,
)

DEFAULT_TIMEOUT_SECONDS = 10.0
MAX_TIMEOUT_SECONDS = 60.0
MAX_OPEN_CALLS = 64  # of one service
MAX_ROWS = 64
DEVICE_READ_INTERVAL_SECONDS = 1.0
CHECK_INTERVAL_SECONDS = 1.0


class CallRefused(Exception):
    """A call that is answered at once."""

    def __init__(self, error: CallError, reason: CallReason, message: str) -> None:
        super().__init__(message)
        self.error = error
        self.reason = reason
        self.message = message


class OtherDesk(Protocol):
    """Takes calls that neither engine nor observer answer."""

    kinds: frozenset[str]  # of Command

    def take(self, ticket: Ticket, command: worker_pb2.Command, seconds: float) -> None:
        """Passes a call on that is to be answered within so many seconds. Raises CallRefused."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more; may come for any call."""
        ...

    def tick(self) -> None:
        """Now and then."""
        ...


class Desks:
    """Several as one."""

    def __init__(self, *desks: OtherDesk) -> None:
        self._desks = desks
        self._by_kind = {kind: desk for desk in desks for kind in desk.kinds}
        self.kinds = frozenset(self._by_kind)

    def take(self, ticket: Ticket, command: worker_pb2.Command, seconds: float) -> None:
        """To the desk for that kind."""
        self._by_kind[command.WhichOneof("command") or ""].take(ticket, command, seconds)

    def cancel(self, ticket: Ticket) -> None:
        """To all: none of them minds what is not its own."""
        for desk in self._desks:
            desk.cancel(ticket)

    def tick(self) -> None:
        """To all."""
        for desk in self._desks:
            desk.tick()


class CommandDesk:
    """Takes calls in, hands them to the thread that can answer, and sees to it that each has one end."""

    def __init__(
        self,
        to_engine: Callable[[EngineCommand], None],
        to_observer: Callable[[ObserverCall], bool],
        other: OtherDesk | None = None,
        *,
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._to_engine = to_engine
        self._to_observer = to_observer
        self._other = other
        self._open: dict[Ticket, float] = {}  # when each open call runs out
        self._open_by_source: dict[str, int] = {}
        self._next_device_read = 0.0
        self._next_check = 0.0

    def take(
        self, source: str, command: worker_pb2.Command, *, now: float, is_ready: bool
    ) -> CallFailure | None:
        """Passes a call on; a failure is the answer where it cannot be."""
        ticket = Ticket(source, command.command_id)
        kind = command.WhichOneof("command")
        if kind == "cancel":
            self.claim(Ticket(source, command.cancel.command_id), is_last=True)
            return None
        seconds = min(command.timeout_ms / 1000 or DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS)
        try:
            self._check(ticket, is_ready)
            if self._other is not None and kind in self._other.kinds:
                self._other.take(ticket, command, seconds)
            else:
                self._pass_on(ticket, kind, command, now)
        except CallRefused as refused:
            return CallFailure(ticket, refused.error, refused.reason, refused.message)
        self._open[ticket] = now + seconds
        self._open_by_source[source] = self._open_by_source.get(source, 0) + 1
        return None

    def _check(self, ticket: Ticket, is_ready: bool) -> None:
        if not is_ready:
            raise CallRefused(CallError.UNAVAILABLE, CallReason.NOT_READY, "the worker is loading its model")
        if ticket in self._open:
            raise CallRefused(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, "command_id is in use")
        if self._open_by_source.get(ticket.source, 0) >= MAX_OPEN_CALLS:
            text = f"{MAX_OPEN_CALLS} calls of this service are open"
            raise CallRefused(CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)

    def _pass_on(self, ticket: Ticket, kind: str | None, command: worker_pb2.Command, now: float) -> None:
        match kind:
            case "snapshot":
                self._observe(SnapshotCall(ticket))
            case "replay":
                asked_events = command.replay
                self._observe(ReplayCall(ticket, asked_events.after_number, asked_events.include_token_ids))
            case "page_table":
                self._to_engine(self._read_rows(ticket, command, now))
            case "flush":
                asked = command.flush
                salt = asked.salt.encode() if asked.HasField("salt") else None
                self._to_engine(Flush(ticket, asked.tenant, salt, asked.include_active, asked.include_pinned))
            case "pin":
                self._to_engine(self._pin(ticket, command.pin))
            case "list_pins":
                self._to_engine(ListPins(ticket))
            case "integrity":
                self._observe(IntegrityCall(ticket))
            case "check_integrity":
                self._to_engine(self._check_integrity(ticket, now))
            case None:
                raise CallRefused(
                    CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, "command: none is set"
                )
            case _:
                raise CallRefused(
                    CallError.UNIMPLEMENTED,
                    CallReason.FEATURE_DISABLED,
                    f"{kind} is not a feature of this worker",
                )

    def _observe(self, call: ObserverCall) -> None:
        if not self._to_observer(call):
            text = "too many calls wait for the page map"
            raise CallRefused(CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)

    def _read_rows(self, ticket: Ticket, command: worker_pb2.Command, now: float) -> ReadRows:
        asked = command.page_table
        if len(asked.rows) > MAX_ROWS:
            text = f"rows: {len(asked.rows)} asked for, at most {MAX_ROWS} at once"
            raise CallRefused(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
        if asked.from_device:
            if now < self._next_device_read:
                text = "from_device: one call a second"
                raise CallRefused(CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)
            self._next_device_read = now + DEVICE_READ_INTERVAL_SECONDS
        return ReadRows(ticket, tuple(asked.rows), asked.from_device)

    def _pin(self, ticket: Ticket, pin: worker_pb2.PinPrefix) -> Pin:
        try:
            ids = token_ids(pin.token_ids, self._vocab_size, "token_ids")
        except Unfit as unfit:
            raise CallRefused(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, str(unfit)) from None
        return Pin(ticket, pin.name, ids, pin.cache_salt, pin.ttl_ms / 1000)

    def _check_integrity(self, ticket: Ticket, now: float) -> CheckIntegrity:
        if now < self._next_check:
            text = "RunIntegrityCheck: one call a second"
            raise CallRefused(CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)
        self._next_check = now + CHECK_INTERVAL_SECONDS
        return CheckIntegrity(ticket)

    def claim(self, ticket: Ticket, *, is_last: bool) -> bool:
        """Whether an answer still finds an open call; the last one ends it."""
        if ticket not in self._open:
            return False
        if is_last:
            self._end(ticket)
        return True

    def expired(self, now: float) -> list[CallFailure]:
        """Ends the calls whose time is up; called at each heartbeat."""
        if self._other is not None:
            self._other.tick()
        tickets = [ticket for ticket, end in self._open.items() if now >= end]
        for ticket in tickets:
            self._end(ticket)
        text = "the worker did not answer in time"
        return [
            CallFailure(ticket, CallError.DEADLINE_EXCEEDED, CallReason.DEADLINE_PASSED, text)
            for ticket in tickets
        ]

    def close(self, source: str) -> None:
        """Forgets the calls of a service that is gone."""
        for ticket in [ticket for ticket in self._open if ticket.source == source]:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        del self._open[ticket]
        if self._other is not None:
            self._other.cancel(ticket)
        self._open_by_source[ticket.source] -= 1
        if not self._open_by_source[ticket.source]:
            del self._open_by_source[ticket.source]
