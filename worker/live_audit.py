"""The live audit of the engine: rounds while requests run, and sweeps over everything when asked for.

Runs on the engine's thread, between steps, and costs it a bounded share of its time. A round checks the
books and asks the device for a part of its page table; the copy is compared when it has arrived, so the
engine never waits for the device. Reads, changes nothing.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worker.execution.runner import RowsRead, Runner
from worker.pages.violation import Violation
from worker.readers.audit import KEPT_FINDINGS, AuditClock, AuditRound, Finding, SweepReport, compare_spans
from worker.readers.metric_table import CHECKS
from worker.scheduling.audit import Auditor, RowSpan
from worker.scheduling.scheduler import Scheduler

AUDIT_SHARE = 0.002  # of the engine's time at most
ROUND_PAGES = 256  # looked at one by one in one round, about 2 us each; the next round goes on behind them
ROUND_ROWS = 4  # compared with the device in one round
SPAN_SLOTS = 512  # of each of them
SWEEP_SHARE = 0.2  # of the engine's time while somebody waits for a sweep
SWEEP_PAGES = 2048
SWEEP_ROWS = 16
READ_SECONDS = 5.0  # after which a copy is given up: the device stands still, which others report
POLL_SECONDS = 0.002  # between two looks of an idle engine at a copy on its way

*_IN_BOOKS, _ON_DEVICE = CHECKS

logger = logging.getLogger("worker.audit")


@dataclass(slots=True)
class _Round:
    """A round whose copy from the device is on its way."""

    spans: list[RowSpan]
    read: RowsRead | None  # None: no row is in use
    findings: list[Finding]
    seconds: float  # in which the engine stood still so far
    began: float
    revision: tuple[int, int]
    sweep: "_Sweep | None"
    checks: set[str] = field(default_factory=set)  # that came to an answer, or broke


@dataclass(slots=True)
class _Sweep:
    """A check of everything, piece by piece."""

    auditor: Auditor
    done: Callable[[SweepReport], None]
    first_revision: tuple[int, int]
    findings: list[Finding]
    num_findings: int = 0
    num_rows: int = 0
    num_rounds: int = 0
    seconds: float = 0.0
    next_time: float = 0.0


class LiveAudit:
    """Runs what is due when it is looked at; one round or piece at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        interval_seconds: float,
        clock: Callable[[], float],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._now_ns = now_ns
        self._due = AuditClock(interval_seconds, AUDIT_SHARE)
        self._round: _Round | None = None
        self._sweep: _Sweep | None = None

    @property
    def is_sweeping(self) -> bool:
        """Whether a check of everything is under way."""
        return self._sweep is not None

    def sweep(self, done: Callable[[SweepReport], None]) -> None:
        """Begins a check of everything; `done` is called at its end, on this thread. One at a time."""
        assert self._sweep is None, "two sweeps at once"
        self._sweep = _Sweep(self._scheduler.one_audit(), done, self._revision(), [])

    @property
    def due_time(self) -> float:
        """Before it there is nothing to look at; 0: a round or a sweep is under way."""
        return self._due.next_time if self._round is None and self._sweep is None else 0.0

    def next_time(self, now: float) -> float | None:
        """When an idle engine should look again; None: nothing is under way."""
        if self._round is not None:
            return now + POLL_SECONDS
        return None if self._sweep is None else self._sweep.next_time

    def look(self, now: float) -> AuditRound | None:
        """Does what is due; a round that came to its end, if one did."""
        if self._round is None:
            if self._sweep is not None and now >= self._sweep.next_time:
                self._begin(now, self._sweep)
            elif self._sweep is None and self._due.is_due(now):
                self._begin(now, None)
        return None if self._round is None else self._finish(now, self._round)

    def _revision(self) -> tuple[int, int]:
        events = self._scheduler.cache.events
        return events.number, events.step

    def _begin(self, now: float, sweep: _Sweep | None) -> None:
        began = self._clock()
        source: Scheduler | Auditor = self._scheduler
        num_pages, num_rows = ROUND_PAGES, ROUND_ROWS
        if sweep is not None:
            source, num_pages, num_rows = sweep.auditor, SWEEP_PAGES, SWEEP_ROWS
        revision, found_ns = self._revision(), self._now_ns()
        this = self._round = _Round([], None, [], 0.0, now, revision, sweep)
        with _surviving("state_sum", this, found_ns):
            this.findings = [_finding(found, revision, found_ns) for found in source.check(num_pages)]
            this.checks.update(_IN_BOOKS)
        with _surviving(_ON_DEVICE, this, found_ns):
            this.spans = source.row_spans(num_rows, SPAN_SLOTS)
            this.read = self._runner.begin_read(this.spans) if this.spans else None
        this.seconds = self._clock() - began

    def _finish(self, now: float, this: _Round) -> AuditRound | None:
        began, is_compared = self._clock(), False
        if this.read is not None:
            with _surviving(_ON_DEVICE, this, self._now_ns()):
                is_compared = this.read.is_ready()
                if is_compared:
                    on_device = this.read.result()
                    this.findings += compare_spans(this.spans, on_device, this.revision, self._now_ns())
                    this.checks.add(_ON_DEVICE)
            if this.read is not None and not is_compared and now - this.began < READ_SECONDS:
                return None
        self._round = None
        this.seconds += self._clock() - began
        if this.sweep is None:
            self._due.done(now, this.seconds)
        else:
            rows = sum(span.first == 0 for span in this.spans) if is_compared else 0
            self._add_to(this.sweep, this, now, rows)
        return AuditRound(
            checks=[check for check in CHECKS if check in this.checks],
            findings=this.findings[:KEPT_FINDINGS],
            num_findings=len(this.findings),
            broken=frozenset(finding.check for finding in this.findings),
            seconds=this.seconds,
            time_ns=self._now_ns(),
            num_sweeps=self._scheduler.num_audit_sweeps,
        )

    def _add_to(self, sweep: _Sweep, this: _Round, now: float, num_rows: int) -> None:
        sweep.num_rounds += 1
        sweep.num_rows += num_rows
        sweep.num_findings += len(this.findings)
        sweep.findings = (sweep.findings + this.findings)[:KEPT_FINDINGS]
        sweep.seconds += this.seconds
        sweep.next_time = now + this.seconds / SWEEP_SHARE
        if not sweep.auditor.is_done:
            return
        self._sweep = None
        report = SweepReport(
            findings=sweep.findings,
            num_findings=sweep.num_findings,
            num_pages=self._scheduler.config.cache.num_pages,
            num_rows=sweep.num_rows,
            num_rounds=sweep.num_rounds,
            seconds=sweep.seconds,
            first_revision=sweep.first_revision,
            last_revision=this.revision,
        )
        sweep.done(report)


@contextmanager
def _surviving(check: str, this: _Round, time_ns: int) -> Iterator[None]:
    """Books that are broken, or a device, may break the check itself: that is a finding, not the end."""
    try:
        yield
    except Exception as error:
        logger.exception("event=audit_broke check=%s", check)
        this.read = None
        this.checks.add(check)
        subject, found = "the check itself", f"{type(error).__name__}: {error}"[:200]
        this.findings.append(Finding(check, subject, "an answer", found, None, None, this.revision, time_ns))


def _finding(found: Violation, revision: tuple[int, int], time_ns: int) -> Finding:
    return Finding(
        check=found.check,
        subject=found.subject,
        expected=str(found.expected)[:200],
        found=str(found.actual)[:200],
        page=found.page,
        row=found.row,
        revision=revision,
        time_ns=time_ns,
    )
