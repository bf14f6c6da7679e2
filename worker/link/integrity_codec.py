"""What the live audit found → messages of the API."""

from collections.abc import Iterable

from kvatlas.v1 import cache_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.link.status_codec import duration, revision, timestamp
from worker.messages import CheckAnswer
from worker.readers.audit import AuditBook, Finding
from worker.readers.metric_table import CHECKS
from worker.stats import PoolTotals

_NUMBERS: dict[str, int] = {check: number for number, check in enumerate(CHECKS, start=1)}
"""Numbers of IntegrityCheck; the enum has the order of the table."""


def violations(findings: Iterable[Finding], epoch: int) -> list[cache_pb2.IntegrityViolation]:
    """Findings in the order in which they come."""
    return [_violation(finding, epoch) for finding in findings]


def _violation(finding: Finding, epoch: int) -> cache_pb2.IntegrityViolation:
    number, step = finding.revision
    return cache_pb2.IntegrityViolation(
        check=_NUMBERS[finding.check],  # type: ignore[arg-type]  # the numbers are the enum's
        subject=finding.subject,
        expected=finding.expected,
        found=finding.found,
        page_id=finding.page,
        row=finding.row,
        revision=cache_pb2.Revision(epoch=epoch, number=number, step=step),
        find_time=timestamp(finding.time_ns),
    )


def integrity_reply(
    command_id: int, book: AuditBook, *, epoch: int, pool: PoolTotals
) -> worker_pb2.CommandReply:
    """Results so far, the newest findings first."""
    answer = cache_pb2.GetIntegrityResponse(
        violations=violations(reversed(book.findings), epoch),
        violations_total=book.num_findings,
        last_round_time=duration(book.last_seconds),
        sweep_count=book.num_sweeps,
        revision=revision(epoch, pool),
    )
    if book.last_success_ns:
        answer.last_success_time.CopyFrom(timestamp(book.last_success_ns))
    for check, result in book.results.items():
        stats = answer.checks.add(pass_count=result.passes, fail_count=result.fails)
        stats.check = _NUMBERS[check]  # type: ignore[assignment]
        if result.last_run_ns:
            stats.last_run_time.CopyFrom(timestamp(result.last_run_ns))
        if result.last_pass_ns:
            stats.last_pass_time.CopyFrom(timestamp(result.last_pass_ns))
    return worker_pb2.CommandReply(command_id=command_id, integrity=answer)


def check_reply(answer: CheckAnswer, epoch: int) -> worker_pb2.CommandReply:
    """What a check of everything found."""
    report = answer.report
    (first, first_step), (last, last_step) = report.first_revision, report.last_revision
    message = cache_pb2.RunIntegrityCheckResponse(
        violations=violations(report.findings, epoch),
        violations_total=report.num_findings,
        checked_pages=report.num_pages,
        checked_rows=report.num_rows,
        round_count=report.num_rounds,
        engine_time=duration(report.seconds),
        first_revision=cache_pb2.Revision(epoch=epoch, number=first, step=first_step),
        last_revision=cache_pb2.Revision(epoch=epoch, number=last, step=last_step),
    )
    return worker_pb2.CommandReply(command_id=answer.ticket.command_id, check_integrity=message)
