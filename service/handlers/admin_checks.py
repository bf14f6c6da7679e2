"""All violations of AdminService's requests by their paths; ranges are the comments of the protos."""

import re
from typing import Any

from kvatlas.v1 import generation_pb2, server_pb2
from service import errors
from service.handlers import validate
from service.handlers.validate import Violations, seconds

MAX_RECORDING_SECONDS = 3600.0
MAX_RECORDING_BYTES = 1 << 30
MIN_RECORDING_BYTES = 64 << 10
MAX_NOTE = MAX_REASON = 256
MAX_GRACE_SECONDS = MAX_LEVEL_SECONDS = 86_400.0
MAX_TTL_SECONDS = 10 * 365 * 86_400.0
MAX_CANCELLED = 256
MAX_STEPS = 1000
MAX_NAME = 128
MAX_PINS_LISTED = 1000
_PIN_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_TENANT = re.compile(r"[\w.-]{0,64}", re.ASCII)


def check_recording(request: server_pb2.StartRecordingRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    lookback = seconds(request.lookback)
    if not 0 <= lookback <= MAX_RECORDING_SECONDS:
        found.add("lookback", f"{lookback:g} s is not in [0, {MAX_RECORDING_SECONDS:g}] s")
    if request.HasField("max_duration"):
        longest = seconds(request.max_duration)
        if not 0.1 <= longest <= MAX_RECORDING_SECONDS:
            found.add("max_duration", f"{longest:g} s is not in [0.1, {MAX_RECORDING_SECONDS:g}] s")
    if request.max_bytes and not MIN_RECORDING_BYTES <= request.max_bytes <= MAX_RECORDING_BYTES:
        text = f"{request.max_bytes} is not in [{MIN_RECORDING_BYTES}, {MAX_RECORDING_BYTES}]"
        found.add("max_bytes", text)
    if len(request.note) > MAX_NOTE:
        found.add("note", f"{len(request.note)} characters, at most {MAX_NOTE}")
    _refuse(found)


def check_drain(request: server_pb2.StartDrainRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    _duration(found, request, "grace", MAX_GRACE_SECONDS, may_be_zero=True)
    _refuse(found)


def check_flush(request: server_pb2.FlushPrefixCacheRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    _tenant_and_salt(found, request)
    _refuse(found)


def check_pin(request: server_pb2.SetPinnedPrefixRequest, vocab_size: int) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    if not _PIN_NAME.fullmatch(request.name):
        found.add("name", "must be 1 to 64 characters of [A-Za-z0-9_.:-]")
    if not request.remove:
        validate.prompt(found, request, "prefix", vocab_size)
        _tenant_and_salt(found, request)
        _duration(found, request, "ttl", MAX_TTL_SECONDS)
    _refuse(found)


def check_list(request: server_pb2.ListPinnedPrefixesRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    if request.max_results > MAX_PINS_LISTED:
        found.add("max_results", f"{request.max_results} is more than {MAX_PINS_LISTED}")
    _refuse(found)


def check_cancel(request: server_pb2.CancelRequestsRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    if not (request.request_ids or request.principal or request.labels):
        found.add("request_ids", "one of request_ids, principal, labels must be set")
    if len(request.request_ids) > MAX_CANCELLED:
        found.add("request_ids", f"{len(request.request_ids)} ids are more than {MAX_CANCELLED}")
    for index, request_id in enumerate(request.request_ids[:MAX_CANCELLED]):
        if not validate.REQUEST_ID.fullmatch(request_id):
            found.add(f"request_ids[{index}]", "must be 1 to 64 characters of [A-Za-z0-9_.:-]")
    if len(request.reason) > MAX_REASON:
        found.add("reason", f"{len(request.reason)} characters, at most {MAX_REASON}")
    if len(request.principal) > MAX_NAME:
        found.add("principal", f"{len(request.principal)} characters, at most {MAX_NAME}")
    if len(request.labels) > validate.MAX_LABELS:
        found.add("labels", f"{len(request.labels)} are more than {validate.MAX_LABELS}")
    _refuse(found)


def check_level(request: server_pb2.SetLogLevelRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    found.known("level", request.level, server_pb2.LogLevel, may_be_unset=False)
    if len(request.logger) > MAX_NAME:
        found.add("logger", f"{len(request.logger)} characters, at most {MAX_NAME}")
    _duration(found, request, "duration", MAX_LEVEL_SECONDS)
    _refuse(found)


def check_profile(request: server_pb2.CaptureProfileRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    if not 1 <= request.steps <= MAX_STEPS:
        found.add("steps", f"{request.steps} is not in [1, {MAX_STEPS}]")
    _refuse(found)


def spec_of_pin(request: server_pb2.SetPinnedPrefixRequest) -> generation_pb2.GenerationSpec:
    """Its prefix as a prompt: tokenized as those of requests are, a chat without the assistant header."""
    spec = generation_pb2.GenerationSpec(model=request.model)
    match request.WhichOneof("prefix"):
        case "text":
            spec.text = request.text
        case "token_ids":
            spec.token_ids.CopyFrom(request.token_ids)
        case "chat":
            spec.chat.CopyFrom(request.chat)
            spec.chat.add_generation_prompt = False
    return spec


def _tenant_and_salt(found: Violations, request: Any) -> None:
    if not _TENANT.fullmatch(request.tenant):
        found.add("tenant", "must be up to 64 letters, digits, '.', '_', '-'")
    if len(request.salt.encode()) > validate.MAX_SALT_BYTES:
        found.add("salt", f"longer than {validate.MAX_SALT_BYTES} bytes")


def _duration(found: Violations, request: Any, name: str, high: float, *, may_be_zero: bool = False) -> None:
    if not request.HasField(name):
        return
    value = seconds(getattr(request, name))
    if not 0 <= value <= high or (value == 0 and not may_be_zero):
        found.add(name, f"{value:g} s is not in {'[' if may_be_zero else '('}0, {high:g}] s")


def _refuse(found: Violations) -> None:
    if found.found:
        raise errors.invalid_fields(found.found)
