"""What a worker's answers and ends mean for the client, and what became of a request. Pure; owns nothing."""

import logging

import grpc

from service import errors
from service.errors import Failure
from service.fleet.codec import WorkerFacts
from service.request import AddOutcome, AddStatus, Request, SequenceEnd

log = logging.getLogger("service.run")


def refusal_of(
    outcome: AddOutcome,
    request: Request,
    facts: WorkerFacts | None,
    *,
    received: float,
    attempts_before: int,
) -> Failure:
    """The status of a request that its first worker did not take; `received`: on its deadline's clock."""
    match outcome.status:
        case AddStatus.QUEUE_FULL:
            return errors.queue_full(outcome.estimated_wait_ms, attempts_before)
        case AddStatus.NEVER_FITS:
            sizes = len(request.prompt_ids), request.stops.max_tokens
            return errors.exceeds_page_pool(outcome.needed_pages, outcome.total_pages, *sizes)
        case AddStatus.TOO_LONG:
            context = facts.max_context_tokens if facts is not None else 0
            return errors.prompt_too_long(len(request.prompt_ids), max(0, context - 1), context)
        case AddStatus.TIMEOUT_TOO_SHORT if _queue_timeout_is_first(request, received):
            return errors.queue_timeout(request.queue_timeout_ms)
        case AddStatus.TIMEOUT_TOO_SHORT:
            return errors.deadline_too_short(outcome.estimated_wait_ms)
        case AddStatus.DRAINING:
            return errors.draining()
        case AddStatus.NOT_READY:
            return errors.not_ready()
        case AddStatus.FEATURE_DISABLED:
            return errors.feature_disabled(outcome.message)
    log.error("event=request_refused request=%s why=%r", request.request_id, outcome.message)
    return errors.internal()


def _queue_timeout_is_first(request: Request, received: float) -> bool:
    """Whether of its two limits it is the one that ends first, and so the one that cannot be kept."""
    if not request.queue_timeout_ms:
        return False
    return request.deadline is None or received + request.queue_timeout_ms / 1000 <= request.deadline


def failure_of(end: SequenceEnd, request: Request, tokens_sent: int) -> Failure:
    """The status of a request whose sequence failed; the worker's words are for the log."""
    reason = errors.reason_name(end.error_reason)
    if reason == "CONSTRAINT_DEAD_END":
        return errors.constraint_dead_end(end.message, end.completion_tokens, tokens_sent)
    log.error("event=sequence_failed request=%s reason=%s why=%r", request.request_id, reason, end.message)
    return errors.device_out_of_memory() if reason == "DEVICE_OUT_OF_MEMORY" else errors.internal()


def outcome_of(failure: Failure | None, *, was_admitted: bool, was_cancelled: bool) -> str:
    """Label of `requests_total`: what became of a request; rejected: never admitted."""
    if failure is None:
        return "cancelled" if was_cancelled else "completed"
    if failure.status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "deadline"
    if failure.status is grpc.StatusCode.CANCELLED:
        return "cancelled"
    return "failed" if was_admitted else "rejected"
