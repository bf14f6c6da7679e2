"""Pins on demand: a prefix that the cache lacks is computed first, by a request without a reader.

Runs on the engine's thread. Owns the requests it made; what a pin is, the scheduler knows.
"""

from dataclasses import dataclass

from worker.channels import OutputQueue
from worker.ids import SequenceId
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    LinkMessage,
    ListPins,
    Pin,
    PinAnswer,
    PinnedPrefix,
)
from worker.scheduling.output import FinishCode, OutputColumns
from worker.scheduling.pins import MAX_PINS, PinOutcome, PinStatus
from worker.scheduling.pins import Pin as KeptPin
from worker.scheduling.request import AbortReason, AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler

PIN_SOURCE = "#pins"
"""Source of the requests made here; no service can have it: an instance id stands before its '#'."""

MAX_COMPUTED = 3  # a flush of pages in use takes those of a pin that is being computed, too


@dataclass(slots=True)
class _Pending:
    command: Pin
    expires: float | None
    num_computed: int = 0  # how often, by a request of ours
    hit_tokens: int = 0  # of its prefix that were there already


_BROKEN = (CallError.INTERNAL, CallReason.INTERNAL)
_DRAINING = (CallError.UNAVAILABLE, CallReason.DRAINING)
_REPLACED = (CallError.CANCELLED, CallReason.CANCELLED_BY_OPERATOR)
_ENDS = {FinishCode.DRAINED: _DRAINING}
_IMPOSSIBLE = (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
_REFUSALS = {
    AddStatus.TOO_LONG: _IMPOSSIBLE,
    AddStatus.NEVER_FITS: _IMPOSSIBLE,
    AddStatus.QUEUE_FULL: (CallError.UNAVAILABLE, CallReason.QUEUE_FULL),
    AddStatus.DRAINING: _DRAINING,
}


class PinDesk:
    """Sets, removes and lists pins."""

    def __init__(self, scheduler: Scheduler, outputs: OutputQueue[LinkMessage]) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._pending: dict[SequenceId, _Pending] = {}
        self._next_id = 1  # session 0 is nobody's

    def obey(self, command: Pin, now: float) -> None:
        """Pins or unpins; answered at once, or when the prefix was computed."""
        self._drop_older(command, now)
        if not command.token_ids:
            self._scheduler.unpin(command.name, now)
            self._outputs.put(PinAnswer(command.ticket, ()))
            return
        expires = now + command.ttl_seconds if command.ttl_seconds else None
        pending = _Pending(command, expires)
        outcome = self._set(pending, now)
        if outcome.status is PinStatus.NOT_CACHED and outcome.needed_pages:
            self._compute(pending, now)
        else:
            self._answer(pending, outcome, now)

    def _drop_older(self, command: Pin, now: float) -> None:
        """What a name is to stand for is said by the last order, not by the one that is computed last."""
        order = (command.token_ids, command.salt)
        for sequence_id, pending in list(self._pending.items()):
            older = pending.command
            if older.name == command.name and (older.token_ids, older.salt) != order:
                del self._pending[sequence_id]
                self._scheduler.abort([sequence_id], AbortReason.OPERATOR, now)
                self._refuse(pending, *_REPLACED, "a later order of this name came")

    def list(self, command: ListPins, now: float) -> None:
        """All pins, by name."""
        pins = tuple(_shown(pin, now) for pin in self._scheduler.list_pins())
        self._outputs.put(PinAnswer(command.ticket, pins, is_list=True))

    def take(self, columns: OutputColumns, now: float) -> None:
        """What became of the requests made here."""
        for start in columns.starts:
            computed = self._pending.get(start.sequence_id)
            if computed is not None and start.prefix is not None:
                computed.hit_tokens = start.prefix.hit_tokens
        for end in columns.ends:
            pending = self._pending.pop(end.sequence_id, None)
            if pending is None:
                continue
            if end.code is FinishCode.MAX_TOKENS:
                self._answer(pending, self._set(pending, now), now)
            else:
                self._refuse(pending, *_ENDS.get(end.code, _BROKEN), f"its request ended: {end.code.name}")

    def _set(self, pending: _Pending, now: float) -> PinOutcome:
        command = pending.command
        return self._scheduler.pin(
            command.name,
            list(command.token_ids),
            command.salt,
            pending.expires,
            now,
            len(command.token_ids) - pending.hit_tokens if pending.num_computed else 0,
        )

    def _compute(self, pending: _Pending, now: float) -> None:
        sequence_id = SequenceId(self._next_id)
        self._next_id += 1
        spec = RequestSpec(
            sequence_id=sequence_id,
            prompt_token_ids=pending.command.token_ids,
            params=SamplingParams(max_tokens=1, stop_at_eos=False),
            cache_salt=pending.command.salt,
            request_id=f"pin:{pending.command.name}",
            source=PIN_SOURCE,
        )
        outcome = self._scheduler.add(spec, now)
        if outcome.status is AddStatus.ACCEPTED:
            pending.num_computed += 1
            self._pending[sequence_id] = pending
            return
        text = f"prefix: cannot be computed: {outcome.message or outcome.status.name}"
        self._refuse(pending, *_REFUSALS.get(outcome.status, _BROKEN), text)

    def _answer(self, pending: _Pending, outcome: PinOutcome, now: float) -> None:
        if outcome.pin is not None:
            self._outputs.put(PinAnswer(pending.command.ticket, (_shown(outcome.pin, now),)))
        elif outcome.status is PinStatus.LIMIT:
            text = (
                f"{outcome.needed_pages} pages needed, {outcome.pinned_pages} of at most"
                f" {outcome.max_pinned_pages} pinned; at most {MAX_PINS} pins"
            )
            about = {
                "needed_pages": str(outcome.needed_pages),
                "pinned_pages": str(outcome.pinned_pages),
                "max_pinned_pages": str(outcome.max_pinned_pages),
            }
            reason = CallReason.PIN_LIMIT
            self._outputs.put(
                CallFailure(pending.command.ticket, CallError.FAILED_PRECONDITION, reason, text, about)
            )
        elif not outcome.needed_pages:
            text = "prefix: has no whole page"
            self._refuse(pending, *_IMPOSSIBLE, text)
        elif pending.num_computed < MAX_COMPUTED:  # a flush took its pages while they were computed
            self._compute(pending, now)
        else:
            self._refuse(pending, *_BROKEN, "its pages were computed and are gone already")

    def _refuse(self, pending: _Pending, error: CallError, reason: CallReason, text: str) -> None:
        self._outputs.put(CallFailure(pending.command.ticket, error, reason, text))


def _shown(pin: KeptPin, now: float) -> PinnedPrefix:
    return PinnedPrefix(
        name=pin.name,
        salt=pin.salt,
        token_count=pin.prefix_tokens,
        pinned_tokens=pin.num_tokens,
        pinned_pages=len(pin.pages),
        computed_tokens=pin.computed_tokens,
        hit_tokens=pin.hit_tokens,
        seconds_left=None if pin.expires is None else max(0.0, pin.expires - now),
    )
