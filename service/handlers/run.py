"""One request from submission to its end, across all the workers that it meets.

Owns what became of the request: admission, ends, the bill, the status that ends its call. Where its samples
are computed is in placement.py. Everything here is a decision without a wait, but for the one place where the
reader waits for its inbox. Knows no protobuf and no stream.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic

from service import errors
from service.errors import Failure
from service.fleet.workers import WorkerPool
from service.handlers.account import RequestAccount
from service.handlers.choice import Choice, Piece
from service.handlers.placement import Placement
from service.handlers.verdicts import failure_of, refusal_of
from service.mailbox import Inbox
from service.metrics import ServiceMetrics
from service.request import (
    AbortReason,
    AddOutcome,
    AddStatus,
    FinishCode,
    KvBill,
    LostReason,
    PrefixCounts,
    Request,
    SequenceEnd,
    SequenceStart,
)

_RETRYABLE = (
    *(AddStatus.QUEUE_FULL, AddStatus.NOT_READY, AddStatus.DRAINING),
    *(AddStatus.NEVER_FITS, AddStatus.TOO_LONG),  # another may be larger, or have less pinned
)

log = logging.getLogger("service.run")


class GenerationRun:
    """A request that was let in. `close` ends it, whatever has become of it."""

    def __init__(
        self,
        request: Request,
        choices: Sequence[Choice],
        inbox: Inbox,
        *,
        pool: WorkerPool,
        metrics: ServiceMetrics,
        account: RequestAccount,
        resume_seconds: float,
        attempts_before: int,
    ) -> None:
        self.request = request
        self.choices = choices
        self.inbox = inbox
        self.account = account
        self.start: SequenceStart | None = None
        self.outcome: AddOutcome | None = None  # the first worker's answer
        self.bill = KvBill()
        self.has_sent = False  # something of it has reached the client, so it must not be started over
        self.is_cancelled = False  # by CancelGeneration
        self._placement = Placement(
            request,
            choices,
            inbox,
            pool=pool,
            metrics=metrics,
            account=account,
            resume_seconds=resume_seconds,
        )
        self._loop = asyncio.get_running_loop()
        self._attempts_before = attempts_before
        self._failure: Failure | None = None
        self._stop_reason = AbortReason.CLIENT
        self._is_closed = False

    # For the handler

    def submit(self) -> None:
        """Sends the request to a worker. Raises Failure when there is none."""
        if not self._placement.send_first():
            raise errors.not_ready()

    @property
    def worker_id(self) -> str:
        """Who computes it, or did last."""
        return self._placement.worker_id

    @property
    def resumes(self) -> int:
        """Samples that went on with another worker, or with the next life of theirs."""
        return self._placement.resumes

    @property
    def is_homeless(self) -> bool:
        """Whether some samples wait for a worker to go on with them."""
        return self._placement.has_homeless

    @property
    def is_admitted(self) -> bool:
        """Whether it has left the queue, or will never: a cancel in the queue is a normal end."""
        return self.start is not None or all(choice.box.end is not None for choice in self.choices)

    async def wait(self, seconds: float | None = None) -> None:
        """Returns when something has happened since the last wait, or after `seconds`."""
        if seconds is None:
            await self.inbox.wait()
            return
        timer = self._loop.call_later(seconds, self.inbox.wake)
        try:
            await self.inbox.wait()
        finally:
            timer.cancel()

    def settle(self) -> None:
        """Deals with what workers said, text aside. Raises Failure for what ends the call."""
        if self._failure is not None:
            raise self._failure
        inbox = self.inbox
        while inbox.outcomes:
            self._on_outcome(inbox.outcomes.pop(0))
        while inbox.starts:
            self._on_start(inbox.starts.pop(0))
        if inbox.loss is not None:
            reason, inbox.loss = inbox.loss, None
            self._on_loss(reason)
        for choice in self.choices:
            if choice.box.end is not None:
                self._on_end(choice, choice.box.end)
        if self._placement.has_homeless and not self._placement.find_home():
            raise self._worker_lost()

    def take(self) -> list[Piece] | None:
        """What there is to send now, maybe nothing; None: all is over, the bill too. Raises Failure."""
        self.settle()
        pieces = []
        for choice in self.choices:
            if choice.finish is None and choice.box.is_ready:
                pieces.append(self._take(choice))
        return pieces if pieces or not self._is_over else None

    @property
    def _is_over(self) -> bool:
        """Whether every sample has ended here and on its worker."""
        return all(choice.finish is not None and choice.box.end is not None for choice in self.choices)

    @property
    def tokens_sent(self) -> int:
        """Tokens that have left for the client."""
        return sum(choice.num_tokens for choice in self.choices) if self.has_sent else 0

    @property
    def prefix(self) -> PrefixCounts | None:
        """What the prefix cache had at first admission."""
        return self.start.prefix if self.start is not None else None

    def queue_position(self, outcome: AddOutcome) -> int:
        """Requests ahead: as many as there were at most, and no more than wait on the worker now."""
        return min([outcome.queue_position, *self._placement.waiting_ahead()])

    # From outside: cancel and drain

    def cancel(self) -> None:
        """CancelGeneration: it ends normally, with what it has and its bill."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        self._placement.abort(AbortReason.CANCELLED, forget=False)
        self._placement.leave_homeless()
        self._placement.end_as_aborted(self._placement.without_worker())
        self.inbox.wake()

    def fail(self, failure: Failure, reason: AbortReason) -> None:
        """Ends the call with a status at the next turn of its handler."""
        if self._failure is None:
            self._failure, self._stop_reason = failure, reason
            self.inbox.wake()

    def close(self, reason: AbortReason) -> None:
        """Stops what still runs on workers and drops all state. Never waits; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._placement.leave_homeless()
        self._placement.abort(reason if self._failure is None else self._stop_reason, forget=True)
        for choice in self.choices:
            choice.close()

    # What workers say

    def _on_outcome(self, outcome: AddOutcome) -> None:
        placement = self._placement
        if not placement.knows(outcome.sequence_id):
            return  # of a run that was lost since
        if outcome.status == AddStatus.ACCEPTED:
            self.outcome = self.outcome or outcome
            placement.queued()
        elif not self._end_what_is_over(placement.lost()):
            return  # nobody waits for what it was to compute
        elif placement.is_first_attempt:
            if outcome.status not in _RETRYABLE or not placement.send_to_other():
                raise refusal_of(
                    outcome,
                    self.request,
                    placement.facts_of(outcome.sequence_id),
                    received=self.account.received,
                    attempts_before=self._attempts_before,
                )
        elif outcome.status in _RETRYABLE:
            placement.refused()
        else:
            log.warning(
                "event=resume_refused request=%s status=%s why=%r",
                self.request.request_id,
                outcome.status.name,
                outcome.message,
            )
            raise self._worker_lost()

    def _on_start(self, start: SequenceStart) -> None:
        if not self._placement.knows(start.sequence_id):
            return
        now = monotonic()
        self._placement.resumed(start, now)
        if start.resumed:
            self.account.happened("readmitted", now, waited_seconds=start.queue_us * 1e-6)
        if self.start is None:
            self.start = start
            self._placement.has_started = True
            # The start is told with the step that followed it, so the worker's own duration is nearer.
            admitted_at = min(now, self._placement.sent_at + start.queue_us * 1e-6)
            self.account.admitted(admitted_at, len(self.request.prompt_ids), start)

    def _on_loss(self, reason: LostReason) -> None:
        if not self._placement.lose(self._end_what_is_over(self._placement.lost()), reason):
            raise self._worker_lost()

    def _end_what_is_over(self, lost: Sequence[Choice]) -> list[Choice]:
        """Those of them that need another worker."""
        over = [choice for choice in lost if choice.finish is not None or self.is_cancelled]
        # Their ends would have brought the bill; nobody waits for them any more.
        self._placement.end_as_aborted(over)
        return [choice for choice in lost if choice not in over]

    def _on_end(self, choice: Choice, end: SequenceEnd) -> None:
        if end.bill is not None:
            self.bill = self.bill.plus(end.bill)
            choice.box.end = end = _without_bill(end)
        if choice.finish is not None:
            return
        match end.code:
            case FinishCode.DRAINED if not self.is_cancelled:
                choice.box.reopen()
                if not self._placement.hand_over(choice):
                    raise self._worker_lost()
            case FinishCode.DRAINED:
                choice.box.end = SequenceEnd(end.sequence_id, FinishCode.ABORTED)
            case FinishCode.ABORTED if not self.is_cancelled:
                log.error("event=unasked_abort request=%s", self.request.request_id)
                raise errors.internal()
            case FinishCode.TIMED_OUT:
                raise errors.deadline_passed()
            case FinishCode.QUEUE_TIMEOUT:
                raise errors.queue_timeout(self.request.queue_timeout_ms)
            case FinishCode.FAILED:
                raise failure_of(end, self.request, self.tokens_sent)

    def _take(self, choice: Choice) -> Piece:
        piece = choice.take()
        if piece.finish is not None and choice.box.end is None:  # a stop string: the worker does not know
            self._placement.abort_one(choice, AbortReason.STOP_STRING)
        return piece

    def _worker_lost(self) -> Failure:
        return errors.worker_lost(self.worker_id, self.tokens_sent, anything_sent=self.has_sent)


def _without_bill(end: SequenceEnd) -> SequenceEnd:
    return SequenceEnd(end.sequence_id, end.code, end.completion_tokens, None, end.error_reason, end.message)
