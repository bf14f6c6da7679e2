"""One request from submission to its end, across all the workers that it meets.

Owns the request's sequences on workers: where each of them is, what was asked of them, when they must be
started again. Everything here is a decision without a wait, but for the one place where the reader waits
for its inbox. Knows no protobuf and no stream.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from service import errors
from service.errors import Failure
from service.fleet.link import WorkerLink
from service.fleet.resume import Attempts
from service.fleet.workers import WorkerPool
from service.handlers.account import RequestAccount
from service.handlers.choice import Choice, Piece
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
    Run,
    SequenceEnd,
    SequenceStart,
)

TIMER_SLACK_SECONDS = 0.001  # timers may ring a little before their time, and ring once
RETRY_SECONDS = 0.2  # until a worker that refused a resumed sequence is asked again
_RETRYABLE = (AddStatus.QUEUE_FULL, AddStatus.NOT_READY, AddStatus.DRAINING)

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
        self.resumes = 0
        self.has_sent = False  # something of it has reached the client, so it must not be started over
        self.is_cancelled = False  # by CancelGeneration
        self.worker_id = ""
        self._pool = pool
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._resume_seconds = resume_seconds
        self._attempts_before = attempts_before
        self._attempts = Attempts()
        self._links: list[WorkerLink | None] = [None] * len(choices)  # who computes each sample
        self._ids = [0] * len(choices)  # sequence id of each sample there
        self._homeless: list[Choice] = []  # samples that wait for a worker
        self._home_deadline = 0.0
        self._retry_at = 0.0
        self._sent_at = 0.0  # monotonic clock
        self._lost_reason = LostReason.CRASH
        self._moves: dict[int, _Move] = {}  # by sequence id of a resumed sample that has not started yet
        self._drained: set[tuple[str, int]] = set()  # lives of workers that handed samples over
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Failure | None = None
        self._stop_reason = AbortReason.CLIENT
        self._is_closed = False

    # For the handler

    def submit(self) -> None:
        """Sends the request to a worker. Raises Failure when there is none."""
        link = self._pool.pick()
        if link is None:
            raise errors.not_ready()
        self._send(link, list(self.choices))

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
        if self._homeless:
            self._find_home()

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
        beats = [link.beat for link in self._links if link is not None and link.beat is not None]
        return min([outcome.queue_position, *(max(0, beat.waiting_requests - 1) for beat in beats)])

    # From outside: cancel and drain

    def cancel(self) -> None:
        """CancelGeneration: it ends normally, with what it has and its bill."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        self._abort(AbortReason.CANCELLED, forget=False)
        self._leave_homeless()
        self._end_as_aborted([choice for choice in self.choices if self._links[choice.index] is None])
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
        self._leave_homeless()
        self._abort(reason if self._failure is None else self._stop_reason, forget=True)
        for choice in self.choices:
            choice.close()

    # What workers say

    def _on_outcome(self, outcome: AddOutcome) -> None:
        if outcome.sequence_id not in self._ids:
            return  # of a run that was lost since
        if outcome.status == AddStatus.ACCEPTED:
            self.outcome = self.outcome or outcome
            return
        if self.is_cancelled:
            self._end_as_aborted([choice for choice in self.choices if self._is_lost(choice)])
            return
        if self._attempts.count == 0:
            raise refusal_of(outcome, self.request, self._pool.facts, self._attempts_before)
        if outcome.status not in _RETRYABLE:
            log.warning(
                "event=resume_refused request=%s status=%s why=%r",
                self.request.request_id,
                outcome.status.name,
                outcome.message,
            )
            raise self._worker_lost()
        self._retry_at = self._loop.time() + RETRY_SECONDS
        self._loop.call_at(self._retry_at, self.inbox.wake)
        self._wait_for_home([choice for choice in self.choices if self._is_lost(choice)])

    def _on_start(self, start: SequenceStart) -> None:
        if start.sequence_id not in self._ids:
            return
        now = monotonic()
        if (move := self._moves.pop(start.sequence_id, None)) is not None:
            self._count_resume(start, move)
            self.account.happened("moved", now, reason=move.reason.value, worker=self.worker_id)
        if start.resumed:
            self.account.happened("readmitted", now, waited_seconds=start.queue_us * 1e-6)
        if self.start is None:
            self.start = start
            # The start is told with the step that followed it, so the worker's own duration is nearer.
            admitted_at = min(now, self._sent_at + start.queue_us * 1e-6)
            self.account.admitted(admitted_at, len(self.request.prompt_ids), start)

    def _on_loss(self, reason: LostReason) -> None:
        lost = [choice for choice in self.choices if self._is_lost(choice)]
        over = [choice for choice in lost if choice.finish is not None or self.is_cancelled]
        self._end_as_aborted(over)  # its end would have brought the bill; nobody waits for it any more
        self._lose_home([choice for choice in lost if choice not in over], reason)

    def _on_end(self, choice: Choice, end: SequenceEnd) -> None:
        if end.bill is not None:
            self.bill = self.bill.plus(end.bill)
            choice.box.end = end = _without_bill(end)
        if choice.finish is not None:
            return
        match end.code:
            case FinishCode.DRAINED if not self.is_cancelled:
                choice.box.reopen()
                self._lose_home([choice], LostReason.DRAIN, is_new=self._is_first_of_drain(choice))
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
                raise failure_of(end, self.request)

    def _take(self, choice: Choice) -> Piece:
        piece = choice.take()
        if piece.finish is not None and choice.box.end is None:  # a stop string: the worker does not know
            self._abort_one(choice, AbortReason.STOP_STRING)
        return piece

    # Where samples run

    def _is_lost(self, choice: Choice) -> bool:
        link = self._links[choice.index]
        if choice.box.end is not None or link is None:
            return False
        return not link.carries(self._ids[choice.index])

    def _is_first_of_drain(self, choice: Choice) -> bool:
        """Whether this is the first sample that this life of its worker hands over."""
        link = self._links[choice.index]
        assert link is not None, "a sample that was handed over was on a worker"
        life = (link.address, link.facts.epoch if link.facts is not None else 0)
        is_first = life not in self._drained
        self._drained.add(life)
        return is_first

    def _lose_home(self, choices: Sequence[Choice], reason: LostReason, *, is_new: bool = True) -> None:
        """These samples need another worker, within resume_seconds. Raises Failure at the limit.

        One loss is one attempt, however many samples it takes: `is_new` tells the first of a drain.
        """
        if not choices:
            return
        if not self._homeless:
            if is_new and not self._attempts.start_next(self._num_tokens):
                log.warning("event=resume_limit request=%s", self.request.request_id)
                raise self._worker_lost()
            self._home_deadline = self._loop.time() + self._resume_seconds
        self._lost_reason = reason
        self._wait_for_home(choices)

    def _wait_for_home(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._links[choice.index] = None
            self._moves.pop(self._ids[choice.index], None)
        self._homeless += choices
        self._pool.watch(self.inbox.wake)
        if self._timer is None:
            self._timer = self._loop.call_at(self._home_deadline, self.inbox.wake)

    def _find_home(self) -> None:
        now = self._loop.time() + TIMER_SLACK_SECONDS
        avoid = {address for address, _ in self._drained}  # it may not have said so in a heartbeat yet
        link = self._pool.pick(avoid) if now >= self._retry_at else None
        if link is not None:
            homeless = self._homeless
            self._leave_homeless()
            self._send(link, homeless)
        elif now >= self._home_deadline:
            raise self._worker_lost()

    def _leave_homeless(self) -> None:
        self._homeless = []
        self._pool.unwatch(self.inbox.wake)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, link: WorkerLink, choices: list[Choice]) -> None:
        """All samples in one run while nothing has started; after that each goes on by itself."""
        log.debug("event=send request=%s worker=%s", self.request.request_id, link.worker_id)
        self.worker_id = link.worker_id
        self._sent_at = monotonic()
        groups = [[choice] for choice in choices] if self.start is not None else [choices]
        for group in groups:
            run = self._run_of(group)
            for choice in group:
                self._links[choice.index] = link
                self._ids[choice.index] = run.sequence_id + choice.index - group[0].index
            if self.start is not None:
                num_tokens = len(self.request.prompt_ids) + len(run.resume_ids)
                lost_at = self._home_deadline - self._resume_seconds
                self._moves[run.sequence_id] = _Move(self._lost_reason, lost_at, num_tokens)
            if not link.add(self.request, run, self.inbox, [choice.box for choice in group]):
                self.inbox.lost(LostReason.PARTITION)

    def _run_of(self, group: list[Choice]) -> Run:
        now, request = monotonic(), self.request
        first = group[0]
        wants_prompt_scores = first.index == 0 and self.inbox.prompt_scores is None
        return Run(
            sequence_id=self._pool.take_sequence_ids(len(group)),
            num_samples=len(group),
            first_choice=first.index,
            resume_ids=first.box.tokens if self.start is not None else (),
            attempt=self._attempts.count,
            timeout_ms=_left_ms(request.deadline, now),
            queue_timeout_ms=self._queue_timeout_ms(now),
            max_duration_ms=self._max_duration_ms(now),
            prompt_logprobs=request.output.prompt_logprobs if wants_prompt_scores else None,
        )

    def _queue_timeout_ms(self, now: float) -> int:
        """What is left of it; a sequence that goes on has left the queue once."""
        if self.start is not None or not self.request.queue_timeout_ms:
            return 0
        return max(1, self.request.queue_timeout_ms - int(self.account.age(now) * 1000))

    def _max_duration_ms(self, now: float) -> int:
        limit, admitted_at = self.request.stops.max_duration_ms, self.account.admitted_at
        if not limit or admitted_at is None:
            return limit
        return max(1, limit - int((now - admitted_at) * 1000))

    @property
    def _num_tokens(self) -> int:
        return sum(len(choice.box.tokens) for choice in self.choices)

    def _count_resume(self, start: SequenceStart, move: "_Move") -> None:
        self.resumes += 1
        self._metrics.resumes[move.reason].inc()
        self._metrics.resume_gap.observe(max(0.0, self._loop.time() - move.lost_at))
        hit = start.prefix.hit_tokens if start.prefix is not None else 0
        self._metrics.resume_hit.inc(hit)
        self._metrics.resume_computed.inc(max(0, move.num_tokens - hit))

    def _worker_lost(self) -> Failure:
        return errors.worker_lost(self.worker_id, self.tokens_sent, anything_sent=self.has_sent)

    # Stopping

    def _abort(self, reason: AbortReason, *, forget: bool) -> None:
        by_link: dict[WorkerLink, list[int]] = {}
        for link, sequence_id in zip(self._links, self._ids, strict=True):
            if link is not None:
                by_link.setdefault(link, []).append(sequence_id)
        for link, sequence_ids in by_link.items():
            link.abort(sequence_ids, reason, forget=forget)

    def _abort_one(self, choice: Choice, reason: AbortReason) -> None:
        link = self._links[choice.index]
        if link is not None and link.carries(self._ids[choice.index]):
            link.abort([self._ids[choice.index]], reason, forget=False)
        else:
            self._end_as_aborted([choice])

    def _end_as_aborted(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            choice.box.finish(SequenceEnd(self._ids[choice.index], FinishCode.ABORTED))


@dataclass(frozen=True, slots=True)
class _Move:
    """A sample on its way to another worker."""

    reason: LostReason
    lost_at: float  # loop's clock
    num_tokens: int  # prompt and output that it takes along


def _left_ms(deadline: float | None, now: float) -> int:
    return 0 if deadline is None else max(1, int((deadline - now) * 1000))


def _without_bill(end: SequenceEnd) -> SequenceEnd:
    return SequenceEnd(end.sequence_id, end.code, end.completion_tokens, None, end.error_reason, end.message)
