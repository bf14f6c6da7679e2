"""Every failure is one status that carries its reason, its details and its trailer."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvatlas.v1.errors_pb2 import ErrorReason
from service import errors
from service.errors import Failure, Violation
from service.fleet.codec import CommandReply
from service.fleet.command_desk import CommandFailed
from service.handlers.asking import failure_of
from service.handlers.verdicts import outcome_of, refusal_of
from service.request import AddOutcome, AddStatus, Output, Request, Sampling, Stops

FAILURES = [
    errors.invalid_fields([Violation("spec.text", "must not be empty")]),
    errors.prompt_too_long(9, 7, 8),
    errors.exceeds_page_pool(40, 32, 10, 600),
    errors.malformed_message(),
    errors.model_not_found("x", "y"),
    errors.worker_not_found("no worker x"),
    errors.sequence_not_found("x"),
    errors.duplicate_request_id("x"),
    errors.feature_disabled("tools"),
    errors.worker_id_required(["a", "b"]),
    errors.queue_full(0, 0),
    errors.queue_timeout(5),
    errors.watch_limit(64),
    errors.slow_reader(3),
    errors.draining(),
    errors.draining(7),
    errors.not_ready(),
    errors.worker_lost("w", 3, anything_sent=True),
    errors.worker_call_lost(),
    errors.deadline_too_short(9),
    errors.deadline_passed(),
    errors.device_out_of_memory(),
    errors.internal(),
]

RETRYABLE = ("QUEUE_FULL", "QUEUE_TIMEOUT", "WATCH_LIMIT", "DRAINING", "NOT_READY", "WORKER_LOST")


def taken_apart(failure: Failure) -> tuple[grpc.Status, list[str], error_details_pb2.ErrorInfo]:
    status = failure.to_status("my-id")
    trailers = dict(status.trailing_metadata)
    details = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
    info = error_details_pb2.ErrorInfo()
    assert details[0].Unpack(info)
    return status, [detail.TypeName().rpartition(".")[2] for detail in details], info


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.reason)
def test_every_failure_has_a_reason_of_the_contract_the_domain_and_the_request(failure: Failure) -> None:
    status, kinds, info = taken_apart(failure)
    assert info.domain == "kvatlas.v1"
    assert ErrorReason.Value(f"ERROR_REASON_{info.reason}") > 0
    assert info.metadata["request_id"] == "my-id"
    assert status.details == failure.message
    assert status.code is failure.status
    needs_retry = failure.reason in (
        "QUEUE_FULL",
        "QUEUE_TIMEOUT",
        "WATCH_LIMIT",
        "DRAINING",
        "NOT_READY",
        "WORKER_LOST",
    )
    assert ("RetryInfo" in kinds) == needs_retry
    assert ("BadRequest" in kinds) == (failure.reason in ("INVALID_FIELD", "PROMPT_TOO_LONG"))


def test_details_and_pushback_are_in_the_same_status() -> None:
    """abort() replaces trailing metadata, so the trailer must not come from anywhere else."""
    status, _, _ = taken_apart(errors.queue_full(250, 0))
    assert dict(status.trailing_metadata)["grpc-retry-pushback-ms"] == "250"


@pytest.mark.parametrize(("attempts", "pushback"), [(0, "300"), (1, "300"), (2, "-1"), (3, "-1")])
def test_a_full_queue_sends_the_third_attempt_away(attempts: int, pushback: str) -> None:
    status = errors.queue_full(300, attempts).to_status("")
    assert dict(status.trailing_metadata)["grpc-retry-pushback-ms"] == pushback


def test_many_violations_are_all_in_the_details_and_the_first_in_the_message() -> None:
    violations = [Violation(f"field{number}", "bad") for number in range(20)]
    failure = errors.invalid_fields(violations)
    bad = error_details_pb2.BadRequest()
    trailers = dict(failure.to_status("").trailing_metadata)
    for detail in status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details:
        detail.Unpack(bad)
    assert len(bad.field_violations) == 20
    assert failure.message.endswith("and 12 more")


def test_a_lost_worker_is_aborted_only_if_something_was_sent() -> None:
    assert errors.worker_lost("w", 0, anything_sent=False).status is grpc.StatusCode.UNAVAILABLE
    assert errors.worker_lost("w", 0, anything_sent=True).status is grpc.StatusCode.ABORTED


def test_unknown_reason_numbers_are_internal() -> None:
    assert errors.reason_name(14) == "DEVICE_OUT_OF_MEMORY"
    assert errors.reason_name(0) == errors.reason_name(9999) == "INTERNAL"


def test_the_over_long_prompt_is_told_the_real_limits() -> None:
    """B044: L, the prompt's length and the limit, never what is left after max_tokens."""
    message = errors.prompt_too_long(2100, 2047, 2048).message
    assert all(number in message for number in ("2100", "2047", "2048"))


@pytest.mark.parametrize(
    ("queue_timeout_ms", "deadline", "reason"),
    [
        (3, None, "QUEUE_TIMEOUT"),  # it passed on the way, whatever the worker knows of its queue
        (0, 107.0, "DEADLINE_TOO_SHORT"),
        (5_000, 107.0, "QUEUE_TIMEOUT"),
        (5_000, 101.0, "DEADLINE_TOO_SHORT"),
    ],
)
@pytest.mark.parametrize("estimated_wait_ms", [0, 9_000])
def test_a_refusal_names_the_limit_that_ends_first(
    queue_timeout_ms: int, deadline: float | None, reason: str, estimated_wait_ms: int
) -> None:
    request = Request(
        "id",
        [1],
        Sampling(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 0),
        Stops(4),
        Output(),
        queue_timeout_ms=queue_timeout_ms,
        deadline=deadline,
    )
    outcome = AddOutcome(7, AddStatus.TIMEOUT_TOO_SHORT, estimated_wait_ms=estimated_wait_ms)
    refusal = refusal_of(outcome, request, None, received=100.0, attempts_before=0)
    assert refusal.reason == reason


@pytest.mark.parametrize(
    ("message", "paths"),
    [
        ("page_sizes: 7 is no multiple of 8 tokens", ["page_sizes"]),
        ("pool_slots, page_sizes: 300 combinations, at most 256", ["pool_slots", "page_sizes"]),
        ("prefix: cannot be computed: TOO_LONG", ["prefix"]),
        ("no field is named: none", []),
    ],
)
def test_what_a_worker_refuses_names_its_fields_as_what_the_service_refuses(
    message: str, paths: list[str]
) -> None:
    reply = CommandReply(code=3, error_reason=ErrorReason.ERROR_REASON_INVALID_FIELD, message=message)
    failure = failure_of(CommandFailed(reply))
    _, kinds, _ = taken_apart(failure)
    assert failure.message == message
    assert [violation.path for violation in failure.violations] == paths
    assert ("BadRequest" in kinds) == bool(paths)


def of_status(status: grpc.StatusCode) -> Failure:
    return Failure(status, "", "")


@pytest.mark.parametrize(
    ("failure", "was_admitted", "was_cancelled", "outcome"),
    [
        (None, True, False, "completed"),
        (None, True, True, "cancelled"),
        (of_status(grpc.StatusCode.DEADLINE_EXCEEDED), True, False, "deadline"),
        (of_status(grpc.StatusCode.DEADLINE_EXCEEDED), False, False, "deadline"),
        (of_status(grpc.StatusCode.CANCELLED), False, False, "cancelled"),
        (of_status(grpc.StatusCode.INTERNAL), True, False, "failed"),
        (of_status(grpc.StatusCode.INTERNAL), True, True, "failed"),
        (of_status(grpc.StatusCode.UNAVAILABLE), False, False, "rejected"),
    ],
)
def test_what_became_of_a_request_is_one_label(
    failure: Failure | None, was_admitted: bool, was_cancelled: bool, outcome: str
) -> None:
    assert outcome_of(failure, was_admitted=was_admitted, was_cancelled=was_cancelled) == outcome
