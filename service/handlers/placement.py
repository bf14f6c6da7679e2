"""Where the samples of one request are computed, and how they come to another worker when theirs is lost.

Owns each sample's link and sequence id, the attempts, and the time limit of those that have no worker. Knows
no stream, no text and no status: what ends a call is run.py's to say.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from service.fleet.codec import Beat, WorkerFacts
from service.fleet.link import WorkerLink
from service.fleet.resume import Attempts
from service.fleet.workers import WorkerPool
from service.handlers.account import RequestAccount
from service.handlers.choice import Choice
from service.mailbox import Inbox
from service.metrics import ServiceMetrics
from service.request import (
    AbortReason,
    FinishCode,
    LostReason,
    Request,
    Run,
    SequenceEnd,
    SequenceStart,
)

TIMER_SLACK_SECONDS = 0.001  # timers may ring a little before their time, and ring once
RETRY_SECONDS = 0.2  # until a worker that refused a resumed sequence is asked again

log = logging.getLogger("service.run")


class Placement:
    """The workers of one request's samples. Everything here is a decision without a wait."""

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
    ) -> None:
        self.worker_id = ""  # of the last run
        self.has_started = False  # some run has left a queue
        self.sent_at = 0.0  # monotonic clock
        self.resumes = 0
        self._request = request
        self._choices = choices
        self._inbox = inbox
        self._pool = pool
        self._metrics = metrics
        self._account = account
        self._loop = asyncio.get_running_loop()
        self._resume_seconds = resume_seconds
        self._attempts = Attempts()
        self._links: list[WorkerLink | None] = [None] * len(choices)  # who computes each sample
        self._ids = [0] * len(choices)  # sequence id of each sample there
        self._homeless: list[Choice] = []  # samples that wait for a worker
        self._home_deadline = 0.0
        self._retry_at = 0.0
        self._lost_reason = LostReason.CRASH
        self._moves: dict[int, _Move] = {}  # by sequence id of a resumed sample that has not started yet
        self._drained: set[tuple[str, int]] = set()  # lives of workers that handed samples over
        self._refusers: set[str] = set()  # addresses that took none of this attempt's runs
        self._timer: asyncio.TimerHandle | None = None
        self._stale_beats: list[Beat | None] = []  # from before it was in a queue

    # What is where

    @property
    def is_first_attempt(self) -> bool:
        """Whether no worker of this request was lost yet."""
        return self._attempts.count == 0

    @property
    def has_homeless(self) -> bool:
        """Whether some samples wait for a worker."""
        return bool(self._homeless)

    def knows(self, sequence_id: int) -> bool:
        """Whether it is the id of a present run; an older one was lost since."""
        return sequence_id in self._ids

    def facts_of(self, sequence_id: int) -> WorkerFacts | None:
        """What the worker of a present run says of itself; None: it has none any more."""
        link = self._links[self._ids.index(sequence_id)]
        return link.facts if link is not None else None

    def lost(self) -> list[Choice]:
        """Samples whose worker no longer has them, though their end has not come."""
        return [choice for choice in self._choices if self._is_lost(choice)]

    def without_worker(self) -> list[Choice]:
        """Samples that no worker computes now."""
        return [choice for choice in self._choices if self._links[choice.index] is None]

    def queued(self) -> None:
        """A worker has taken it into its queue: heartbeats up to now do not count it yet."""
        self._stale_beats = [link.beat for link in self._links if link is not None]

    def waiting_ahead(self) -> list[int]:
        """Requests that wait on each worker beside this one, where a heartbeat after `queued` says so."""
        beats = [link.beat for link in self._links if link is not None and link.beat is not None]
        new = [beat for beat in beats if not any(beat is stale for stale in self._stale_beats)]
        return [max(0, beat.waiting_requests - 1) for beat in new]

    def _is_lost(self, choice: Choice) -> bool:
        link = self._links[choice.index]
        if choice.box.end is not None or link is None:
            return False
        return not link.carries(self._ids[choice.index])

    # The first worker

    def send_first(self) -> bool:
        """All samples to one worker; False: nobody is there."""
        link = self._pool.pick(self._request)
        if link is None:
            return False
        self._send(link, list(self._choices))
        return True

    def send_to_other(self) -> bool:
        """The same to a worker that has not refused this request yet; False: there is none."""
        self._note_refusers(self._choices)
        link = self._pool.pick(self._request, self._refusers)
        if link is None or link.address in self._refusers:
            return False
        self._send(link, list(self._choices))
        return True

    def _note_refusers(self, choices: Sequence[Choice]) -> None:
        links = (self._links[choice.index] for choice in choices)
        self._refusers |= {link.address for link in links if link is not None}

    # From worker to worker

    def lose(self, choices: Sequence[Choice], reason: LostReason) -> bool:
        """These samples need another worker, within resume_seconds; False: they had enough of them."""
        return self._lose(choices, reason, is_new=True)

    def hand_over(self, choice: Choice) -> bool:
        """The same for a sample that its worker gave up in order to shut down.

        One loss is one attempt, however many samples it takes, and whenever each of them comes.
        """
        link = self._links[choice.index]
        assert link is not None, "a sample that was handed over was on a worker"
        life = (link.address, link.facts.epoch if link.facts is not None else 0)
        is_new = life not in self._drained
        self._drained.add(life)
        return self._lose([choice], LostReason.DRAIN, is_new=is_new)

    def _lose(self, choices: Sequence[Choice], reason: LostReason, *, is_new: bool) -> bool:
        if not choices:
            return True
        if not self._homeless:
            if is_new:
                num_tokens = sum(len(choice.box.tokens) for choice in self._choices)
                if not self._attempts.start_next(num_tokens):
                    log.warning("event=resume_limit request=%s", self._request.request_id)
                    return False
                self._refusers.clear()
            self._home_deadline = self._loop.time() + self._resume_seconds
        self._lost_reason = reason
        self._wait_for_home(choices)
        return True

    def refused(self) -> None:
        """A worker did not take a resumed run: others are asked, or the same one a little later."""
        choices = self.lost()
        self._note_refusers(choices)
        other = self._pool.pick(self._request, self._avoided)
        if other is None or other.address in self._refusers:
            self._refusers.clear()
            self._retry_at = self._loop.time() + RETRY_SECONDS
            self._loop.call_at(self._retry_at, self._inbox.wake)
        self._wait_for_home(choices)

    def _wait_for_home(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._links[choice.index] = None
            self._moves.pop(self._ids[choice.index], None)
        self._homeless += choices
        self._pool.watch(self._inbox.wake)
        if self._timer is None:
            self._timer = self._loop.call_at(self._home_deadline, self._inbox.wake)

    def find_home(self) -> bool:
        """Sends the samples that wait, if somebody takes them; False: it has taken too long."""
        now = self._loop.time() + TIMER_SLACK_SECONDS
        link = self._pool.pick(self._request, self._avoided) if now >= self._retry_at else None
        if link is None:
            return now < self._home_deadline
        homeless = self._homeless
        self.leave_homeless()
        self._send(link, homeless)
        return True

    @property
    def _avoided(self) -> set[str]:
        # A worker that drains may not have said so in a heartbeat yet.
        return {address for address, _ in self._drained} | self._refusers

    def leave_homeless(self) -> None:
        """Nothing waits for a worker any more."""
        self._homeless = []
        self._pool.unwatch(self._inbox.wake)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resumed(self, start: SequenceStart, now: float) -> None:
        """A run left its queue: counts it where it goes on with what another worker began."""
        move = self._moves.pop(start.sequence_id, None)
        if move is None:
            return
        self.resumes += 1
        self._metrics.resumes[move.reason].inc()
        self._metrics.resume_gap.observe(max(0.0, self._loop.time() - move.lost_at))
        facts = self.facts_of(start.sequence_id)
        # Not its prefix counts: those are of the prompt alone, and its output may be cached as well.
        hit = start.reused_pages * facts.page_size if facts is not None else 0
        self._metrics.resume_hit.inc(hit)
        self._metrics.resume_computed.inc(max(0, move.num_tokens - hit))
        self._account.happened("moved", now, reason=move.reason.value, worker=self.worker_id)

    # Sending

    def _send(self, link: WorkerLink, choices: list[Choice]) -> None:
        """All samples in one run while nothing has started; after that each goes on by itself."""
        log.debug("event=send request=%s worker=%s", self._request.request_id, link.worker_id)
        self.worker_id = link.worker_id
        self.sent_at = monotonic()
        groups = [[choice] for choice in choices] if self.has_started else [choices]
        for group in groups:
            run = self._run_of(group)
            for choice in group:
                self._links[choice.index] = link
                self._ids[choice.index] = run.sequence_id + choice.index - group[0].index
            if self.has_started:
                num_tokens = len(self._request.prompt_ids) + len(run.resume_ids)
                lost_at = self._home_deadline - self._resume_seconds
                self._moves[run.sequence_id] = _Move(self._lost_reason, lost_at, num_tokens)
            if not link.add(self._request, run, self._inbox, [choice.box for choice in group]):
                self._inbox.lost(LostReason.PARTITION)

    def _run_of(self, group: list[Choice]) -> Run:
        now, request = monotonic(), self._request
        first = group[0]
        wants_prompt_scores = first.index == 0 and self._inbox.prompt_scores is None
        return Run(
            sequence_id=self._pool.take_sequence_ids(len(group)),
            num_samples=len(group),
            first_choice=first.index,
            resume_ids=first.box.tokens,  # nothing yet where several samples go together
            attempt=self._attempts.count,
            timeout_ms=_left_ms(request.deadline, now),
            queue_timeout_ms=self._queue_timeout_ms(now),
            max_duration_ms=self._max_duration_ms(now),
            prompt_logprobs=request.output.prompt_logprobs if wants_prompt_scores else None,
        )

    def _queue_timeout_ms(self, now: float) -> int:
        """What is left of it; a sequence that goes on has left the queue once."""
        if self.has_started or not self._request.queue_timeout_ms:
            return 0
        return max(1, self._request.queue_timeout_ms - int(self._account.age(now) * 1000))

    def _max_duration_ms(self, now: float) -> int:
        limit, admitted_at = self._request.stops.max_duration_ms, self._account.admitted_at
        if not limit or admitted_at is None:
            return limit
        return max(1, limit - int((now - admitted_at) * 1000))

    # Stopping

    def abort(self, reason: AbortReason, *, forget: bool) -> None:
        """Stops every sample that is on a worker. Never waits; may be called twice."""
        by_link: dict[WorkerLink, list[int]] = {}
        for link, sequence_id in zip(self._links, self._ids, strict=True):
            if link is not None:
                by_link.setdefault(link, []).append(sequence_id)
        for link, sequence_ids in by_link.items():
            link.abort(sequence_ids, reason, forget=forget)

    def abort_one(self, choice: Choice, reason: AbortReason) -> None:
        """Stops one; its end still comes, from its worker or from here."""
        link = self._links[choice.index]
        if link is not None and link.carries(self._ids[choice.index]):
            link.abort([self._ids[choice.index]], reason, forget=False)
            return
        if choice in self._homeless:  # else it would be sent with the others as soon as there is a worker
            self._homeless.remove(choice)
        self.end_as_aborted([choice])

    def end_as_aborted(self, choices: Sequence[Choice]) -> None:
        """The end that no worker will send."""
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
