"""What the engine shows of itself: observations for the observer's thread, and the live audit.

Runs on the engine's thread, between steps, and costs it a bounded share of its time. Reads the books,
changes nothing.
"""

from collections.abc import Callable

from worker.channels import Handover
from worker.execution.runner import Runner
from worker.live_audit import LiveAudit
from worker.readers.audit import AuditFailed, AuditRound
from worker.readers.observation import Observation
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import Step
from worker.stats import StepStats

OBSERVE_SECONDS = 0.1
IDLE_OBSERVE_SECONDS = 1.0  # an idle worker still accrues idle time
KEPT_STEPS = 65_536  # for an observer that is late; a minute of 1 ms steps


class Watch:
    """Collects what happened, and hands it over when it is time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        observations: Handover[Observation],
        *,
        audit_interval: float,
        debug: bool,
        wake_observer: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._observations = observations
        self._debug = debug
        self._wake_observer = wake_observer
        self._clock = clock
        self._ring = scheduler.cache.events
        self.audit = LiveAudit(scheduler, runner, interval_seconds=audit_interval, clock=clock)
        self._rounds: list[AuditRound] = []  # not handed over yet
        self._steps: list[StepStats] = []
        self._bills: list[float] = []
        self._idle_seconds = 0.0
        self._next_time = 0.0
        self._full_at = self._ring.capacity // 4 + 1  # page event at which the observer must be told
        self.wants_snapshot = False  # the next observation carries everything
        self.has_news = True  # something happened since the last observation
        self.last_step_seconds = 0.0

    def stepped(self, step: Step, seconds: float, *, is_replayed: bool = False) -> None:
        """A step was committed; it may have been replayed from a CUDA graph."""
        self.last_step_seconds = seconds
        self.has_news = True
        num_prefill = step.num_tokens - step.num_decode if step.num_decode < len(step.rows) else 0
        self._steps.append(
            StepStats(step.number, seconds, len(step.rows), num_prefill, step.num_decode, is_replayed)
        )

    def idled(self, seconds: float) -> None:
        """There was nothing to run."""
        self._idle_seconds += seconds
        self.has_news = True

    def next_time(self, now: float) -> float:
        """When an idle engine should look again."""
        due = self._next_time if self.has_news else now + IDLE_OBSERVE_SECONDS
        audit = self.audit.next_time(now)
        return due if audit is None else min(due, audit)

    def look(self, now: float) -> None:
        """Audits and hands over what is due. Raises AuditFailed in debug mode."""
        if now < self._next_time and now < self.audit.due_time and self._ring.number < self._full_at:
            return  # as after nearly every step
        audit = self.audit.look(now)
        if audit is not None:
            self._take_round(audit)
        if now >= self._next_time and self.has_news:
            self.observe(now)
        elif self._ring.number >= self._full_at:
            self.observe(now)  # early: the ring must not run over what the observer has not read
            self._wake_observer()

    def observe(self, now: float) -> None:
        """Hands everything over."""
        changes, progress = self._scheduler.take_changes(), self._scheduler.progress()
        wants_snapshot, self.wants_snapshot = self.wants_snapshot, False
        counts = self._scheduler.counts()
        self._bills += changes.bills
        observation = Observation(
            revision=self._ring.number,
            time_us=max(0, int((now - self._scheduler.config.start_time) * 1e6)),
            changes=changes.views,
            growth=changes.growth,
            ended=changes.ended_ids,
            started=changes.started,
            ended_owners=changes.ended_owners,
            progress_owners=progress.owners,
            progress_tokens=progress.token_counts,
            counts=counts,
            rows_used=counts.running_sequences,
            idle_seconds=self._idle_seconds,
            steps=self._steps,
            bills=self._bills,
            audits=self._rounds,
            snapshot=self._scheduler.snapshot() if wants_snapshot else None,
        )
        if self._observations.put(observation):
            self._steps, self._bills, self._rounds = [], [], []
        else:
            self.wants_snapshot = True  # what happened to sequences is lost to the observer; counts are not
            del self._steps[:-KEPT_STEPS], self._bills[:-KEPT_STEPS], self._rounds[:-KEPT_STEPS]
        self.has_news = False
        self._full_at = observation.revision + self._ring.capacity // 4 + 1
        self._next_time = now + OBSERVE_SECONDS

    def _take_round(self, audit: AuditRound) -> None:
        self._rounds.append(audit)
        self.has_news = True
        if audit.findings and self._debug:
            raise AuditFailed("; ".join(f"{finding.check}: {finding.text}" for finding in audit.findings))
