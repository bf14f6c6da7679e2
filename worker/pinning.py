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
from worker.scheduling.pins import Pin as KeptPin
from worker.scheduling.pins import PinOutcome, PinStatus
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler

PIN_SOURCE = "#pins"
"""Source of the requests made here; no service can have it: an instance id stands before its '#'."""


@dataclass(frozen=True, slots=True)
class _Pending:
    command: Pin
    expires: float | None


class PinDesk:
    """Sets, removes and lists pins."""

    def __init__(self, scheduler: Scheduler, outputs: OutputQueue[LinkMessage]) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._pending: dict[SequenceId, _Pending] = {}
        self._next_id = 1  # session 0 is nobody's

    def obey(self, command: Pin, now: float) -> None:
        """Pins or unpins; answered at once, or when the prefix was computed."""
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
            self._answer(pending, outcome, 0, now)

    def list(self, command: ListPins, now: float) -> None:
        """All pins, by name."""
        pins = tuple(_shown(pin, pin.num_tokens, 0, now) for pin in self._scheduler.list_pins())
        self._outputs.put(PinAnswer(command.ticket, pins, is_list=True))

    def take(self, columns: OutputColumns, now: float) -> None:
        """What became of the requests made here."""
        for end in columns.ends:
            pending = self._pending.pop(end.sequence_id, None)
            if pending is None:
                continue
            if end.code is not FinishCode.MAX_TOKENS:
                self._refuse(
                    pending, CallError.INTERNAL, CallReason.INTERNAL, f"its request ended: {end.code.name}"
                )
                continue
            self._answer(pending, self._set(pending, now), len(pending.command.token_ids), now)

    def _set(self, pending: _Pending, now: float) -> PinOutcome:
        command = pending.command
        return self._scheduler.pin(command.name, list(command.token_ids), command.salt, pending.expires, now)

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
            self._pending[sequence_id] = pending
            return
        text = f"the prefix cannot be computed: {outcome.status.name} {outcome.message}"
        self._refuse(pending, CallError.UNAVAILABLE, CallReason.NONE, text)

    def _answer(self, pending: _Pending, outcome: PinOutcome, computed: int, now: float) -> None:
        command = pending.command
        if outcome.pin is not None:
            shown = _shown(outcome.pin, len(command.token_ids), computed, now)
            self._outputs.put(PinAnswer(command.ticket, (shown,)))
        elif outcome.status is PinStatus.LIMIT:
            text = (
                f"{outcome.needed_pages} pages needed, {outcome.pinned_pages} of at most"
                f" {outcome.max_pinned_pages} pinned"
            )
            self._refuse(pending, CallError.FAILED_PRECONDITION, CallReason.PIN_LIMIT, text)
        else:
            text = (
                "the prefix has no whole page" if not outcome.needed_pages else "its pages are gone already"
            )
            self._refuse(pending, CallError.FAILED_PRECONDITION, CallReason.NONE, text)

    def _refuse(self, pending: _Pending, error: CallError, reason: CallReason, text: str) -> None:
        self._outputs.put(CallFailure(pending.command.ticket, error, reason, text))


def _shown(pin: KeptPin, token_count: int, computed: int, now: float) -> PinnedPrefix:
    left = None if pin.expires is None else max(0.0, pin.expires - now)
    return PinnedPrefix(pin.name, pin.salt, token_count, pin.num_tokens, len(pin.pages), computed, left)
