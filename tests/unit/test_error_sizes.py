"""How much of a client's own text an error sends back: no more than 8 KiB of trailers, as clients take."""

import base64
from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2, status_pb2

from service import errors
from service.errors import Failure, Violation

TRAILERS = 8 * 1024
SMILE = "\N{SLIGHTLY SMILING FACE}"  # 4 bytes, 12 in a status's message
LONG = SMILE * 20_000


def details_of(failure: Failure) -> status_pb2.Status:
    metadata = dict(failure.to_status("r" * 64).trailing_metadata)
    return status_pb2.Status.FromString(metadata["grpc-status-details-bin"])


def trailer_bytes(failure: Failure) -> int:
    """What a status takes on the wire: its message percent-encoded, its details in base64."""
    status = failure.to_status("r" * 64)
    size = len(quote(status.details, safe=" "))
    for key, value in status.trailing_metadata:
        size += len(key) + len(base64.b64encode(value) if isinstance(value, bytes) else value)
    return size


@pytest.mark.parametrize(
    "failure",
    [
        errors.model_not_found(LONG, "served"),
        errors.recording_not_found(LONG),
        errors.profile_not_found(LONG),
        errors.sequence_not_found(LONG),
        errors.cancelled_by_operator(SMILE * 256),
        errors.invalid_fields([Violation("spec.regex", LONG)]),
        errors.invalid_fields([Violation(f"planes[{number}]", SMILE * 60) for number in range(64)]),
        errors.invalid_fields([Violation(SMILE * 300, "x" * 300)] * 8),
    ],
    ids=lambda failure: failure.reason,
)
def test_what_a_client_sent_comes_back_as_far_as_the_trailers_hold_it(failure: Failure) -> None:
    assert trailer_bytes(failure) < TRAILERS


def test_as_many_violations_are_told_as_there_is_room_for_and_the_message_says_what_is_missing() -> None:
    failure = errors.invalid_fields([Violation(f"a[{number}]", "é" * 96) for number in range(64)])
    (_, packed) = details_of(failure).details
    bad = error_details_pb2.BadRequest()
    packed.Unpack(bad)
    assert len(bad.field_violations) == 2800 // (4 + 2 * 96 + 8)
    assert failure.message.isascii()
    assert len(failure.message) == 1000
    assert failure.message.startswith("a[0]: \\xe9\\xe9")
    assert failure.message.endswith("...")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("max_active_requests", "4 requests of this caller are active already"),
        ("max_queued_requests", "4 requests of this caller are waiting already"),
    ],
)
def test_a_quota_says_whose_and_which_and_when_to_come_back(limit: str, words: str) -> None:
    failure = errors.quota_exceeded("alice", limit, 4)
    assert failure.message == words
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    quota = error_details_pb2.QuotaFailure()
    for packed, message in zip(details_of(failure).details, (info, retry, quota), strict=True):
        assert packed.Unpack(message)
    assert dict(info.metadata) == {"limit": limit, "value": "4", "request_id": "r" * 64}
    assert retry.retry_delay.ToMilliseconds() == 1000
    assert [(each.subject, each.description) for each in quota.violations] == [("principal:alice", words)]


def test_an_operators_words_reach_who_was_ended() -> None:
    assert errors.cancelled_by_operator("too many").message == "ended by an operator: too many"
    assert errors.cancelled_by_operator("").message == "ended by an operator"
