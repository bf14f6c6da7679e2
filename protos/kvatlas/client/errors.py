"""Everything that a call can raise, told apart by what the caller can do about it.

    KvatlasError
    ├── InvalidRequest      the request is wrong: a retry cannot help (violations say where)
    ├── NotFound            no such model, sequence, page or worker
    ├── PermissionDenied    credentials missing, or not enough
    ├── Refused             a quota, a queue timeout, a limit: try again after `retry_seconds`
    ├── Unavailable         no server, or one that drains or starts: another may take it
    ├── DeadlineExceeded    the call's deadline passed
    ├── Cancelled           ended by this client, or by an operator
    ├── ServerFailure       the server failed on it; its log has the request id
    └── Incomplete          the stream broke its own rules: tokens are missing, or the summary is

RequestError, a ValueError, is for what no request can carry: nothing was sent.

`reason` is a `Reason`, one for each of errors.proto. Owns the reading of google.rpc details. Judges by
ErrorInfo first: a proxy may change a status on its way, the reason it leaves alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "kvatlas.v1"
DETAILS_KEY = "grpc-status-details-bin"
MAX_SHOWN = 300  # characters of a foreign message

_NO_ANSWER = (  # in what gRPC's core says of a connection: what it means
    (r"unhealthy", "the server is not ready at"),
    (r"WRONG_VERSION_NUMBER", "the server speaks no TLS at"),
    (r"CERTIFICATE_VERIFY_FAILED", "the server's certificate is not trusted at"),
    (r"Hostname Verification Check failed", "the server's certificate has another name at"),
    (r"last error: .*Socket closed", "the server hangs up, as one does that wants TLS, at"),
    (r"Failed parsing HTTP/2", "it is no gRPC server that answers at"),
)


class Reason(StrEnum):
    """Every machine-readable reason of errors.proto, without its prefix. A text, so `==` works with both."""

    INVALID_FIELD = "INVALID_FIELD"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    EXCEEDS_PAGE_POOL = "EXCEEDS_PAGE_POOL"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    QUEUE_FULL = "QUEUE_FULL"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    SLOW_READER = "SLOW_READER"
    DRAINING = "DRAINING"
    NOT_READY = "NOT_READY"
    WORKER_LOST = "WORKER_LOST"
    DEVICE_OUT_OF_MEMORY = "DEVICE_OUT_OF_MEMORY"
    FEATURE_DISABLED = "FEATURE_DISABLED"
    BAD_CREDENTIALS = "BAD_CREDENTIALS"
    MISSING_SCOPE = "MISSING_SCOPE"
    DEADLINE_TOO_SHORT = "DEADLINE_TOO_SHORT"
    INTERNAL = "INTERNAL"
    SEQUENCE_NOT_FOUND = "SEQUENCE_NOT_FOUND"
    CANCELLED_BY_OPERATOR = "CANCELLED_BY_OPERATOR"
    WORKER_NOT_FOUND = "WORKER_NOT_FOUND"
    WORKER_ID_REQUIRED = "WORKER_ID_REQUIRED"
    PIN_LIMIT = "PIN_LIMIT"
    RECORDING_NOT_FOUND = "RECORDING_NOT_FOUND"
    RECORDING_RUNNING = "RECORDING_RUNNING"
    WATCH_LIMIT = "WATCH_LIMIT"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    RECORDING_FAILED = "RECORDING_FAILED"
    PROFILE_RUNNING = "PROFILE_RUNNING"
    PROFILE_NOT_FOUND = "PROFILE_NOT_FOUND"
    CONSTRAINT_DEAD_END = "CONSTRAINT_DEAD_END"


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault of a request, by the path that the client wrote."""

    field: str
    description: str


class RequestError(ValueError):
    """A prompt or a value that no request can carry; the text names the option. Nothing was sent."""


class KvatlasError(Exception):
    """A call failed. Prints as one line: reason, then the server's sentence.

    `code` is the gRPC status name, `reason` a Reason ("" from a server or proxy that sent none, a plain
    text where the server is newer than this library), `metadata` what belongs to the reason,
    `retry_seconds` the server's hint.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_seconds: float | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_seconds = retry_seconds
        self.violations = tuple(violations)

    def __str__(self) -> str:
        line = f"{self.reason or self.code}: {self.message}"
        faults = [f"{v.field}: {v.description}" for v in self.violations]
        if "; ".join(faults) in line:
            return line
        new = [
            v.field if v.description in line else fault
            for v, fault in zip(self.violations, faults, strict=True)
        ]
        return f"{line} ({'; '.join(new)})"

    @property
    def request_id(self) -> str:
        """Under which the server's log has the call; "" if it gave none."""
        return self.metadata.get("request_id", "")


class InvalidRequest(KvatlasError):
    """The request is wrong as it stands."""


class NotFound(KvatlasError):
    """What the request names is not there."""


class PermissionDenied(KvatlasError):
    """Credentials are missing, bad, or not enough."""


class Refused(KvatlasError):
    """A limit was reached: later it may work."""


class Unavailable(KvatlasError):
    """No server took the call."""


class DeadlineExceeded(KvatlasError):
    """The deadline passed, or could not have been met."""


class Cancelled(KvatlasError):
    """Somebody ended the call."""


class ServerFailure(KvatlasError):
    """The server failed, or lost what it had begun."""


class Incomplete(KvatlasError):
    """A stream ended, or went on, against its own rules."""


_BY_CODE: Mapping[str, type[KvatlasError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "FAILED_PRECONDITION": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": NotFound,
    "UNAUTHENTICATED": PermissionDenied,
    "PERMISSION_DENIED": PermissionDenied,
    "RESOURCE_EXHAUSTED": Refused,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
}


_BY_REASON: Mapping[str, type[KvatlasError]] = {
    Reason.INVALID_FIELD: InvalidRequest,
    Reason.PROMPT_TOO_LONG: InvalidRequest,
    Reason.EXCEEDS_PAGE_POOL: InvalidRequest,
    Reason.MALFORMED_MESSAGE: InvalidRequest,
    Reason.MODEL_NOT_FOUND: NotFound,
    Reason.DUPLICATE_REQUEST_ID: InvalidRequest,
    Reason.QUEUE_FULL: Unavailable,
    Reason.QUOTA_EXCEEDED: Refused,
    Reason.QUEUE_TIMEOUT: Refused,
    Reason.SLOW_READER: Refused,
    Reason.DRAINING: Unavailable,
    Reason.NOT_READY: Unavailable,
    # WORKER_LOST: by its status, which says whether anything had been sent
    Reason.DEVICE_OUT_OF_MEMORY: ServerFailure,
    Reason.FEATURE_DISABLED: InvalidRequest,
    Reason.BAD_CREDENTIALS: PermissionDenied,
    Reason.MISSING_SCOPE: PermissionDenied,
    Reason.DEADLINE_TOO_SHORT: DeadlineExceeded,
    Reason.INTERNAL: ServerFailure,
    Reason.SEQUENCE_NOT_FOUND: NotFound,
    Reason.CANCELLED_BY_OPERATOR: Cancelled,
    Reason.WORKER_NOT_FOUND: NotFound,
    Reason.WORKER_ID_REQUIRED: InvalidRequest,
    Reason.PIN_LIMIT: InvalidRequest,
    Reason.RECORDING_NOT_FOUND: NotFound,
    Reason.RECORDING_RUNNING: InvalidRequest,
    Reason.WATCH_LIMIT: Refused,
    Reason.DEADLINE_PASSED: DeadlineExceeded,
    Reason.RECORDING_FAILED: InvalidRequest,
    Reason.PROFILE_RUNNING: InvalidRequest,
    Reason.PROFILE_NOT_FOUND: NotFound,
    Reason.CONSTRAINT_DEAD_END: InvalidRequest,
}


def from_rpc_error(error: grpc.RpcError, address: str) -> KvatlasError:
    """Our error for one of grpc's, sync or aio. `address` is named where no server answered."""
    code = error.code().name if hasattr(error, "code") else "UNKNOWN"
    text = (error.details() if hasattr(error, "details") else None) or "no message"
    trailer: Mapping[str, Any] = {}
    if hasattr(error, "trailing_metadata"):
        trailer = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]  # pairs
    raw = trailer.get(DETAILS_KEY, b"")
    return build_error(code, text, raw if isinstance(raw, bytes) else b"", address)


def build_error(code: str, text: str, raw_details: bytes, address: str) -> KvatlasError:
    """From a status in parts; `raw_details` is the google.rpc.Status of the trailer, or empty."""
    details = _parse_details(raw_details)
    if not details.reason and code == "UNAVAILABLE":
        meanings = (meaning for pattern, meaning in _NO_ANSWER if re.search(pattern, text))
        what = next(meanings, "no server answers at")
        port = "" if ":" in address else ", without a port 443 is meant"
        text = f"{what} {address}{port} ({text[:MAX_SHOWN]})"
    if not details.reason and code == "UNIMPLEMENTED":
        text = f"no such method at {address}: AdminService has its own address, old servers lack what is new"
    kind = _BY_REASON.get(details.reason) or _BY_CODE.get(code, ServerFailure)
    known = details.reason in Reason.__members__
    return kind(
        text,
        code=code,
        reason=Reason(details.reason) if known else details.reason,
        metadata=details.metadata,
        retry_seconds=details.retry_seconds,
        violations=details.violations,
    )


@dataclass(slots=True)
class _Details:
    """What the trailer held."""

    reason: str
    metadata: dict[str, str]
    retry_seconds: float | None
    violations: list[Violation]


def _parse_details(raw: bytes) -> _Details:
    """Unknown details and a trailer that is no Status are passed over: the status itself still counts."""
    found = _Details("", {}, None, [])
    try:
        status = status_pb2.Status.FromString(raw)
    except Exception:  # protobuf's DecodeError: a proxy may have put anything there
        return found
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    quota = error_details_pb2.QuotaFailure()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            found.reason, found.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            found.retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad):
            found.violations += [Violation(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(quota):
            found.violations += [Violation(v.subject, v.description) for v in quota.violations]
    return found
