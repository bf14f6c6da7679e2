"""The live audit: named invariants, checked while requests run, and what came of them.

The engine checks its own books and hands over an AuditRound; device rows are compared with the host's
here. A violation is a metric and a log line with the numbers of both sides, never a silent repair.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.log import log_event
from worker.readers.metric_table import CHECKS

logger = logging.getLogger("worker.audit")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant."""

    check: str  # one of CHECKS
    text: str  # with the numbers of both sides


@dataclass(frozen=True, slots=True)
class AuditRound:
    """One round: what was checked, what was wrong, how long the engine stood still for it."""

    checks: Sequence[str]
    findings: Sequence[Finding]
    seconds: float
    time_ns: int  # Unix


@dataclass(slots=True)
class AuditBook:
    """Results of all rounds, by check."""

    results: dict[tuple[str, ...], int] = field(
        default_factory=lambda: {(check, result): 0 for check in CHECKS for result in ("pass", "fail")}
    )
    last_success_ns: int = 0

    def record(self, audit: AuditRound) -> None:
        """Counts a round and logs what it found."""
        broken = {finding.check for finding in audit.findings}
        for check in audit.checks:
            self.results[check, "fail" if check in broken else "pass"] += 1
        for finding in audit.findings[:16]:
            log_event(logger, logging.ERROR, "audit_failed", check=finding.check, found=finding.text)
        if not broken:
            self.last_success_ns = audit.time_ns


class AuditFailed(Exception):
    """In debug mode a failed check ends the worker."""


def compare_rows(
    rows: Sequence[int], on_host: Sequence[Sequence[int]], on_device: Sequence[Sequence[int]]
) -> list[Finding]:
    """Slots by the books against slots on the device, row by row; the first difference of each row."""
    findings = []
    for row, host, device in zip(rows, on_host, on_device, strict=True):
        for position, (wanted, found) in enumerate(zip(host, device, strict=True)):
            if wanted != found:
                text = f"row {row}, position {position}: slot {wanted} by the books, {found} on the device"
                findings.append(Finding("device_table", text))
                break
    return findings


class AuditClock:
    """When the next round is due: not before the interval, and rounds cost a bounded share of time."""

    def __init__(self, interval_seconds: float, max_share: float) -> None:
        self._interval = interval_seconds
        self._max_share = max_share
        self._next = 0.0
        self.cost_seconds = 0.0  # of the last round

    def is_due(self, now: float) -> bool:
        """Whether a round may be run now."""
        return now >= self._next

    def done(self, now: float, seconds: float) -> None:
        """A round was run and took so long."""
        self.cost_seconds = seconds
        self._next = now + max(self._interval, seconds / self._max_share)
