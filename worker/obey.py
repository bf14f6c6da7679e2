"""What the engine does with a command: the scheduler's verbs, and answers for those who asked.

Runs on the engine's thread between two steps. Owns nothing but the way from a command to its answer.
"""

import logging
from collections.abc import Callable

from worker.channels import OutputQueue
from worker.description import PoolDescription
from worker.execution.runner import Runner
from worker.live_audit import LiveAudit
from worker.log import log_event, trace_id_of
from worker.messages import (
    Abort,
    AddAnswer,
    AddRequest,
    CallError,
    CallFailure,
    CallReason,
    CheckAnswer,
    CheckIntegrity,
    DropSource,
    EndProfile,
    EngineCommand,
    Flush,
    FlushAnswer,
    LinkMessage,
    ListPins,
    Pin,
    Profile,
    ReadRows,
    Ticket,
)
from worker.pinning import PIN_SOURCE, PinDesk
from worker.profiling import StepProfiler
from worker.readers.audit import SweepReport
from worker.row_desk import RowDesk
from worker.scheduling.output import OutputColumns
from worker.scheduling.request import AddOutcome, AddStatus
from worker.scheduling.scheduler import Scheduler

logger = logging.getLogger("worker.engine")


class Obedience:
    """Carries out commands, one at a time. A request or a call that breaks is refused alone."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        outputs: OutputQueue[LinkMessage],
        pool: PoolDescription,
        audit: LiveAudit,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._audit = audit
        self._outputs = outputs
        self._rows = RowDesk(scheduler, runner, outputs, pool, clock)
        self._pins = PinDesk(scheduler, outputs)
        self._profiler = StepProfiler()
        self._check: CheckIntegrity | None = None  # that waits for a check of everything

    @property
    def next_time(self) -> float | None:
        """When something is due that no command tells."""
        times = [time for time in (self._profiler.next_time, self._rows.next_time) if time is not None]
        return min(times, default=None)

    def take_own(self, by_source: dict[str, OutputColumns], now: float) -> None:
        """After each turn: takes out what concerns requests that no service made."""
        self._profiler.look(self._scheduler.step_number, now)
        try:
            self._rows.look()
        except Exception:
            logger.exception("event=command_failed")
        columns = by_source.pop(PIN_SOURCE, None)
        if columns is not None:
            try:
                self._pins.take(columns, now)
            except Exception:  # its caller hears of it when his time is up
                logger.exception("event=command_failed")

    def close(self) -> None:
        """The engine ends: calls that are not answered yet are told."""
        self._rows.close()
        check, self._check = self._check, None
        for command in (check, self._profiler.close()):
            if command is not None:
                text = "the worker ends"
                failure = CallFailure(command.ticket, CallError.UNAVAILABLE, CallReason.DRAINING, text)
                self._outputs.put(failure)

    def obey(self, command: EngineCommand, now: float) -> None:
        """Does it and puts its answer out."""
        match command:
            case AddRequest():
                self._add(command, now)
            case Abort():
                self._scheduler.abort(command.sequence_ids, command.reason, now)
            case DropSource():
                ended = self._scheduler.drop_source(command.source, now)
                if ended:
                    log_event(logger, logging.INFO, "sequences_dropped", service=command.source, count=ended)
            case ReadRows():
                self._rows.obey(command)
            case Flush():
                self._guarded(command.ticket, lambda: self._flush(command, now))
            case Pin():
                self._guarded(command.ticket, lambda: self._pins.obey(command, now))
            case ListPins():
                self._guarded(command.ticket, lambda: self._pins.list(command, now))
            case CheckIntegrity():
                self._guarded(command.ticket, lambda: self._check_integrity(command))
            case Profile():
                self._profiler.begin(command, self._scheduler.step_number)
            case EndProfile():
                self._profiler.end(command)

    def _add(self, command: AddRequest, now: float) -> None:
        spec = command.spec
        try:
            if any(self._scheduler.is_live(spec.sequence_id + sample) for sample in range(spec.sample_count)):
                outcome = AddOutcome(AddStatus.INVALID, message="sequence_id is in use")
            else:
                outcome = self._scheduler.add(spec, now)
        except Exception:
            # Refusing one request is better than ending all; the audit tells whether the books suffered.
            trace_id = trace_id_of(spec.traceparent)
            logger.exception("event=add_failed request=%s trace=%s", spec.request_id, trace_id)
            outcome = AddOutcome(AddStatus.INVALID, message="internal error")
        answer = AddAnswer(spec.source, spec.sequence_id, spec.sample_count, outcome)
        self._outputs.put(answer, wakes=False)  # the engine does, at a moment that suits its launch

    def _guarded(self, ticket: Ticket, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            logger.exception("event=command_failed")
            failure = CallFailure(ticket, CallError.INTERNAL, CallReason.INTERNAL, type(error).__name__)
            self._outputs.put(failure)

    def _check_integrity(self, command: CheckIntegrity) -> None:
        if self._audit.is_sweeping:
            text = "a check of everything is under way"
            failure = CallFailure(
                command.ticket, CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text
            )
            self._outputs.put(failure)
            return
        self._audit.sweep(lambda report: self._answer_check(command, report))
        self._check = command

    def _answer_check(self, command: CheckIntegrity, report: SweepReport) -> None:
        self._check = None
        self._outputs.put(CheckAnswer(command.ticket, report))

    def _flush(self, command: Flush, now: float) -> None:
        outcome = self._scheduler.flush(
            now, _matcher(command.tenant, command.salt), command.include_active, command.include_pinned
        )
        self._outputs.put(FlushAnswer(command.ticket, outcome.num_freed, outcome.num_unindexed))


def _matcher(tenant: str, salt: bytes | None) -> Callable[[bytes], bool] | None:
    """Which page keys a flush means: a key is the tenant, a zero byte, and the salt."""
    if not tenant and salt is None:
        return None

    def matches(key: bytes) -> bool:
        of_tenant, _, of_salt = key.partition(b"\0")
        return (not tenant or of_tenant == tenant.encode()) and (salt is None or of_salt == salt)

    return matches
