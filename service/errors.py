"""Every way to fail: its status, its reason and the sentence that the client reads.

Handlers raise Failure; the guard turns it into one grpc.Status with ErrorInfo, the other details and the
pushback trailer, since abort() replaces trailing metadata that was set before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvatlas.v1.errors_pb2 import ErrorReason

DOMAIN = "kvatlas.v1"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
MIN_PUSHBACK_MS, MAX_PUSHBACK_MS = 50, 5000
LAST_RETRIED_ATTEMPT = 2  # from the third attempt on a full queue says: do not come back

MAX_MESSAGE, MAX_VIOLATION_BYTES = 1000, 2800  # characters; bytes of paths and descriptions


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a request, by the client's own path."""

    path: str  # e.g. spec.sampling.temperature
    description: str


@dataclass
class Failure(Exception):
    """Ends a call with a status. `message` is for the client and holds nothing of ours."""

    status: grpc.StatusCode
    reason: str  # a name of kvatlas.v1.ErrorReason without its prefix
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: Sequence[Violation] = ()
    retry_ms: int | None = None  # RetryInfo, not negative
    pushback_ms: int | None = None  # trailer; -1: do not retry
    quota_subject: str | None = None  # QuotaFailure

    def __post_init__(self) -> None:
        super().__init__(f"{self.reason}: {self.message}")

    def to_status(self, request_id: str = "") -> grpc.Status:
        """The one status that carries everything."""
        details = [_packed(self._error_info(request_id))]
        if self.violations:
            details.append(_packed(self._bad_request()))
        if self.retry_ms is not None:
            delay = error_details_pb2.RetryInfo()
            delay.retry_delay.FromMilliseconds(self.retry_ms)
            details.append(_packed(delay))
        if self.quota_subject is not None:
            violation = error_details_pb2.QuotaFailure.Violation(
                subject=self.quota_subject, description=self.message
            )
            details.append(_packed(error_details_pb2.QuotaFailure(violations=[violation])))
        code = self.status.value[0]
        status = rpc_status.to_status(status_pb2.Status(code=code, message=self.message, details=details))
        if self.pushback_ms is None:
            return cast(grpc.Status, status)
        trailer = ((PUSHBACK_KEY, str(self.pushback_ms)),)
        return cast(grpc.Status, status._replace(trailing_metadata=status.trailing_metadata + trailer))

    def _error_info(self, request_id: str) -> error_details_pb2.ErrorInfo:
        metadata = dict(self.metadata)
        if request_id:
            metadata["request_id"] = request_id
        return error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=metadata)

    def _bad_request(self) -> error_details_pb2.BadRequest:
        fields = [
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.path, description=violation.description
            )
            for violation in self.violations
        ]
        return error_details_pb2.BadRequest(field_violations=fields)


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def reason_name(number: int) -> str:
    """Name of a number of kvatlas.v1.ErrorReason; INTERNAL for what this release does not know."""
    try:
        name = ErrorReason.Name(cast(ErrorReason, number))
    except ValueError:
        return "INTERNAL"
    return name.removeprefix("ERROR_REASON_") if number else "INTERNAL"


# INVALID_ARGUMENT


def invalid_fields(violations: Sequence[Violation]) -> Failure:
    """All that is wrong with a request, as far as it fits into the trailers that clients take (8 KiB)."""
    message = "; ".join(f"{violation.path}: {violation.description}" for violation in violations[:8])
    if len(violations) > 8:
        message += f"; and {len(violations) - 8} more"
    # What is not ASCII takes up to twelve characters there, and the client may have chosen it.
    message = message.encode("ascii", "backslashreplace").decode()
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 3] + "..."
    room, shown = MAX_VIOLATION_BYTES, []
    for violation in violations:
        room -= len(violation.path.encode()) + len(violation.description.encode()) + 8
        if room < 0:
            break
        shown.append(violation)
    return Failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message, violations=shown)


def prompt_too_long(prompt_tokens: int, max_prompt_tokens: int, max_context_tokens: int) -> Failure:
    """More prompt than the context takes. Names the limits as they are, not what is left of them (B044)."""
    message = (
        f"the prompt has {prompt_tokens} tokens, at most {max_prompt_tokens} are taken"
        f" (the context holds {max_context_tokens} tokens of prompt and output)"
    )
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "PROMPT_TOO_LONG",
        message,
        {"prompt_tokens": str(prompt_tokens), "max_prompt_tokens": str(max_prompt_tokens)},
        [Violation("spec.prompt", message)],
    )


def exceeds_page_pool(needed_pages: int, total_pages: int, prompt_tokens: int, max_tokens: int) -> Failure:
    """More pages than there are, at any time."""
    message = (
        f"a prompt of {prompt_tokens} tokens with max_tokens {max_tokens} needs {needed_pages} pages,"
        f" the pool has {total_pages}"
    )
    metadata = {"needed_pages": str(needed_pages), "total_pages": str(total_pages)}
    return Failure(grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_PAGE_POOL", message, metadata)


def constraint_dead_end(why: str, completion_tokens: int, tokens_sent: int) -> Failure:
    """No token could follow what was put out: the request would end so again."""
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONSTRAINT_DEAD_END",
        f"after {completion_tokens} tokens nothing that the constraint allows could follow: {why}",
        {"tokens_sent": str(tokens_sent)},
    )


def malformed_message() -> Failure:
    """Bytes that are no such message."""
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_MESSAGE",
        "the request is not a valid message of this method",
    )


# NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION


def model_not_found(model: str, served: str) -> Failure:
    """Another model than the one that is served, which anybody may ask for."""
    what = f"no model {model[:128]!r} is served here, but {served!r}"
    return Failure(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", what)


def worker_not_found(what: str) -> Failure:
    """No worker of that id, or no such page on it."""
    return Failure(grpc.StatusCode.NOT_FOUND, "WORKER_NOT_FOUND", what)


def sequence_not_found(request_id: str) -> Failure:
    """No live sequence with that request id."""
    message = f"no live sequence has request id {request_id[:64]!r}"
    return Failure(grpc.StatusCode.NOT_FOUND, "SEQUENCE_NOT_FOUND", message)


def duplicate_request_id(request_id: str) -> Failure:
    """The id is in flight; that call goes on."""
    message = f"request id {request_id!r} is in flight already"
    return Failure(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", message)


def recording_not_found(recording_id: str) -> Failure:
    """No recording of that id is held, or not any more."""
    message = f"no recording {recording_id[:128]!r} is held"
    return Failure(grpc.StatusCode.NOT_FOUND, "RECORDING_NOT_FOUND", message)


def profile_not_found(file_name: str) -> Failure:
    """No profile of that name is held, or not any more."""
    message = f"no profile {file_name[:128]!r} is held"
    return Failure(grpc.StatusCode.NOT_FOUND, "PROFILE_NOT_FOUND", message)


def feature_disabled(feature: str) -> Failure:
    """Refused rather than ignored."""
    message = f"feature {feature!r} is off on this server"
    return Failure(grpc.StatusCode.FAILED_PRECONDITION, "FEATURE_DISABLED", message, {"feature": feature})


def worker_id_required(worker_ids: Sequence[str]) -> Failure:
    """Several workers, and the request names none."""
    message = "several workers: name one in worker_id"
    metadata = {"worker_ids": ",".join(worker_ids)}
    return Failure(grpc.StatusCode.FAILED_PRECONDITION, "WORKER_ID_REQUIRED", message, metadata)


# UNAUTHENTICATED, PERMISSION_DENIED


def bad_credentials() -> Failure:
    """No credential, or one that is nobody's: which of both is not told."""
    return Failure(grpc.StatusCode.UNAUTHENTICATED, "BAD_CREDENTIALS", "no valid credentials")


def missing_scope(scope: str) -> Failure:
    """The caller is known and may not do this."""
    message = f"needs the scope {scope}"
    return Failure(grpc.StatusCode.PERMISSION_DENIED, "MISSING_SCOPE", message, {"scope": scope})


# UNAVAILABLE, RESOURCE_EXHAUSTED


def queue_full(estimated_wait_ms: int, attempts_before: int) -> Failure:
    """No room in the queue: come back after the estimate; from the third attempt on, do not."""
    retry_ms = min(max(estimated_wait_ms, MIN_PUSHBACK_MS), MAX_PUSHBACK_MS)
    pushback = -1 if attempts_before >= LAST_RETRIED_ATTEMPT else retry_ms
    message = "the queue is full"
    return Failure(
        grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL", message, retry_ms=retry_ms, pushback_ms=pushback
    )


def quota_exceeded(principal: str, limit: str, value: int) -> Failure:
    """The caller has as many as that limit of the auth file allows; others are not touched."""
    what = "waiting" if limit == "max_queued_requests" else "active"
    return Failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED",
        f"{value} requests of this caller are {what} already",
        {"limit": limit, "value": str(value)},
        retry_ms=1000,
        quota_subject=f"principal:{principal}",
    )


def queue_timeout(queue_timeout_ms: int) -> Failure:
    """queue_timeout passed before admission."""
    message = f"not started within queue_timeout ({queue_timeout_ms} ms)"
    return Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", message, retry_ms=1000)


def watch_limit(max_watches: int) -> Failure:
    """Too many watch streams."""
    message = f"{max_watches} watch streams are open already"
    return Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCH_LIMIT", message, retry_ms=1000)


def slow_reader(tokens_sent: int) -> Failure:
    """The reader took nothing for too long after the end."""
    message = "the stream was not read in time after its end"
    return Failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", message, {"tokens_sent": str(tokens_sent)}
    )


def draining(tokens_sent: int | None = None) -> Failure:
    """The process shuts down: another replica may take it. With tokens: it was ended by the grace."""
    metadata = {} if tokens_sent is None else {"tokens_sent": str(tokens_sent)}
    return Failure(
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
        "the server is draining",
        metadata,
        retry_ms=100,
        pushback_ms=100,
    )


def not_ready() -> Failure:
    """No worker is ready yet, or any more."""
    message = "the model is not ready"
    return Failure(grpc.StatusCode.UNAVAILABLE, "NOT_READY", message, retry_ms=1000, pushback_ms=1000)


# The rest


def cancelled_by_operator(why: str) -> Failure:
    """An operator ended it; `why` are his words."""
    message = f"ended by an operator: {why}" if why else "ended by an operator"
    return Failure(grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR", message)


def worker_lost(worker_id: str, tokens_sent: int, *, anything_sent: bool) -> Failure:
    """The worker is gone and nobody took over. A stream that has begun must not be started over."""
    metadata = {"worker_id": worker_id, "tokens_sent": str(tokens_sent)}
    status = grpc.StatusCode.ABORTED if anything_sent else grpc.StatusCode.UNAVAILABLE
    message = f"worker {worker_id} was lost and no other took over"
    return Failure(status, "WORKER_LOST", message, metadata, retry_ms=1000)


def worker_call_lost() -> Failure:
    """Something the call waited for was cancelled under it."""
    message = "what the call waited for went away"
    return Failure(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST", message, retry_ms=1000)


def deadline_too_short(estimated_wait_ms: int) -> Failure:
    """Refused at admission: the deadline cannot be met."""
    message = f"the deadline is shorter than the estimated wait of {estimated_wait_ms} ms"
    metadata = {"estimated_wait_ms": str(estimated_wait_ms)}
    return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_TOO_SHORT", message, metadata)


def deadline_passed() -> Failure:
    """A deadline passed that the server keeps for the client."""
    return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED", "the call's deadline passed")


def device_out_of_memory() -> Failure:
    """The device ran out of memory in spite of the pool."""
    return Failure(grpc.StatusCode.INTERNAL, "DEVICE_OUT_OF_MEMORY", "the device ran out of memory")


def internal() -> Failure:
    """A bug of ours; the log has it under the request id."""
    return Failure(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error")
