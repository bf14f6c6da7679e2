"""What the live audit found: results by check, the newest findings, and when the next round is due.

The engine checks its own books and hands over an AuditRound; parts of rows are compared with the
device's here. A violation is a metric, a log line with the values of both sides and an entry for who
asks, never a silent repair.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from worker.log import log_event
from worker.readers.metric_table import CHECKS

KEPT_FINDINGS = 100
LOGGED_FINDINGS = 16  # of one round

logger = logging.getLogger("worker.audit")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant, with both sides; no text and no token ids."""

    check: str  # one of CHECKS
    subject: str
    expected: str
    found: str
    page: int | None = None  # that it is about, if it is one
    row: int | None = None
    revision: tuple[int, int] = (0, 0)  # page event and step at which it was found
    time_ns: int = 0  # Unix

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.subject}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class AuditRound:
    """One round: what was checked, what was wrong, how long the engine stood still for it."""

    checks: Sequence[str]
    findings: Sequence[Finding]  # at most KEPT_FINDINGS
    num_findings: int
    broken: frozenset[str]  # checks that did not hold
    seconds: float
    time_ns: int  # Unix
    num_sweeps: int = 0  # how often every page had been looked at


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a check of everything found."""

    findings: Sequence[Finding]  # at most KEPT_FINDINGS
    num_findings: int
    num_pages: int
    num_rows: int
    num_rounds: int
    seconds: float  # in which the engine stood still
    first_revision: tuple[int, int]  # page event and step at the first piece
    last_revision: tuple[int, int]


@dataclass(slots=True)
class CheckResults:
    """One check since the start."""

    passes: int = 0
    fails: int = 0
    last_run_ns: int = 0  # Unix; 0: never
    last_pass_ns: int = 0


@dataclass(slots=True)
class AuditBook:
    """Results of all rounds, by check, and the newest findings."""

    results: dict[str, CheckResults] = field(
        default_factory=lambda: {check: CheckResults() for check in CHECKS}
    )
    findings: deque[Finding] = field(default_factory=lambda: deque(maxlen=KEPT_FINDINGS))  # oldest first
    num_findings: int = 0
    num_sweeps: int = 0
    last_success_ns: int = 0
    last_seconds: float = 0.0

    def record(self, audit: AuditRound) -> None:
        """Counts a round and logs what it found."""
        for check in audit.checks:
            result = self.results[check]
            result.last_run_ns = audit.time_ns
            if check in audit.broken:
                result.fails += 1
            else:
                result.passes += 1
                result.last_pass_ns = audit.time_ns
        self.findings.extend(audit.findings)
        self.num_findings += audit.num_findings
        self.num_sweeps, self.last_seconds = audit.num_sweeps, audit.seconds
        if not audit.broken:
            self.last_success_ns = audit.time_ns
        self._log(audit)

    @staticmethod
    def _log(audit: AuditRound) -> None:
        for finding in audit.findings[:LOGGED_FINDINGS]:
            log_event(
                logger,
                logging.ERROR,
                "audit_failed",
                check=finding.check,
                subject=finding.subject,
                expected=finding.expected,
                found=finding.found,
                event_number=finding.revision[0],
                step=finding.revision[1],
            )

    def counts(self) -> dict[tuple[str, ...], int]:
        """Rounds by (check, result)."""
        counts: dict[tuple[str, ...], int] = {}
        for check, result in self.results.items():
            counts[check, "pass"], counts[check, "fail"] = result.passes, result.fails
        return counts


class AuditFailed(Exception):
    """In debug mode a failed check ends the worker."""


class Span(Protocol):
    """A part of a row, by the books."""

    @property
    def row(self) -> int:
        """The row."""
        ...

    @property
    def first(self) -> int:
        """Position of its first slot."""
        ...

    @property
    def slots(self) -> Sequence[int]:
        """What the device has to have there."""
        ...


def compare_spans(
    spans: Sequence[Span], on_device: Sequence[Sequence[int]], revision: tuple[int, int], time_ns: int
) -> list[Finding]:
    """Slots by the books against slots on the device; how many differ in each span, and the first of them."""
    findings = []
    for span, device in zip(spans, on_device, strict=True):
        if list(span.slots) == device:  # nearly always
            continue
        differing = [
            at for at, (wanted, found) in enumerate(zip(span.slots, device, strict=True)) if wanted != found
        ]
        if differing:
            first = differing[0]
            subject = (
                f"row {span.row}, position {span.first + first}, the first of {len(differing)} that differ"
            )
            wanted, found = f"slot {span.slots[first]} by the books", f"slot {device[first]} on the device"
            findings.append(
                Finding("device_table", subject, wanted, found, None, span.row, revision, time_ns)
            )
    return findings


class AuditClock:
    """When the next round is due: not before the interval, and rounds cost a bounded share of time."""

    def __init__(self, interval_seconds: float, max_share: float) -> None:
        self._interval = interval_seconds
        self._max_share = max_share
        self.next_time = 0.0  # when a round may be run again

    def is_due(self, now: float) -> bool:
        """Whether a round may be run now."""
        return now >= self.next_time

    def done(self, now: float, seconds: float) -> None:
        """A round was run and took so long."""
        self.next_time = now + max(self._interval, seconds / self._max_share)
