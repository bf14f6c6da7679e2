"""What both interceptors make of one call: its deadline, its status, what is counted, its line in the log."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2_grpc
from prometheus_client import CollectorRegistry

from kvatlas.v1 import cache_pb2_grpc, generation_pb2_grpc, server_pb2_grpc
from service import errors, field_count
from service.guard import Guard
from service.metrics import ServiceMetrics
from service.request import Call, current_call
from service.telemetry import Telemetry

SERVICE = "/kvatlas.v1.GenerationService/"
DEFAULT, LONGEST = 600.0, 3600.0

Behaviour = Callable[[Any, Any], Any]
SERVICERS: tuple[Callable[[Any, Any], None], ...] = (
    generation_pb2_grpc.add_GenerationServiceServicer_to_server,
    cache_pb2_grpc.add_CacheServiceServicer_to_server,
    server_pb2_grpc.add_ServerServiceServicer_to_server,
    server_pb2_grpc.add_AdminServiceServicer_to_server,
    channelz_pb2_grpc.add_ChannelzServicer_to_server,
)


class _Context:
    """A call's context whose end is kept."""

    def __init__(self, left: float | None = None, **metadata: str) -> None:
        self.status: grpc.Status | None = None
        self.aborted: tuple[Any, str] | None = None
        self._left = left
        self._metadata = tuple((key.replace("_", "-"), value) for key, value in metadata.items())
        self._code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return self._left

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        self._code = status.code
        raise grpc.aio.AbortError

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.aborted = (code, details)
        self._code = grpc.StatusCode.UNKNOWN  # as a proxy of another release may have it
        raise grpc.aio.AbortError


class Stage:
    """Both interceptors around one handler."""

    def __init__(self) -> None:
        self.metrics = ServiceMetrics(CollectorRegistry(), version="0", commit="")
        self.telemetry = Telemetry(self.metrics)
        self.guard = Guard(default_deadline=DEFAULT, max_deadline=LONGEST)

    async def call(
        self,
        behaviour: Behaviour,
        context: _Context,
        method: str = SERVICE + "Generate",
        *,
        parse: Callable[[bytes], Any] = bytes,
        data: bytes = b"",
    ) -> Any:
        """Its answer; None where it was aborted."""
        inner = self.guard.wrap(method, grpc.unary_unary_rpc_method_handler(behaviour, parse))
        outer = self.telemetry.wrap(method, inner)
        try:
            return await outer.unary_unary(outer.request_deserializer(data), context)
        except grpc.aio.AbortError:
            return None

    def counted(self, name: str) -> dict[str, float]:
        """Calls by status name, of those that were counted."""
        samples = next(iter(getattr(self.metrics, name).collect())).samples
        return {
            each.labels.get("grpc_code", ""): each.value
            for each in samples
            if each.value and each.name.endswith("_total")
        }


async def seen(left: float | None, method: str) -> Call:
    """The record of a call whose client left so many seconds."""
    found: list[Call] = []

    async def look(request: Any, context: Any) -> None:
        found.append(current_call.get())

    await Stage().call(look, _Context(left), method)
    return found[0]


@pytest.mark.parametrize(
    ("method", "left", "kept", "is_ours"),
    [
        (SERVICE + "Generate", None, DEFAULT, True),
        ("/kvatlas.v1.CacheService/WatchPageMap", None, LONGEST, True),
        ("/kvatlas.v1.ServerService/WatchLoad", None, LONGEST, True),
        (SERVICE + "Generate", 5.0, 5.0, False),
        (SERVICE + "Generate", LONGEST, LONGEST, False),
        (SERVICE + "Generate", LONGEST + 1, LONGEST, True),
        ("/kvatlas.v1.ServerService/WatchLoad", 5.0, 5.0, False),
    ],
)
def test_a_call_has_its_clients_deadline_or_ours_counted_from_its_receipt(
    method: str, left: float | None, kept: float, is_ours: bool
) -> None:
    call = asyncio.run(seen(left, method))
    assert call.deadline == call.received + kept
    assert call.deadline_is_ours == is_ours


@pytest.mark.parametrize("is_known", [True, False])
def test_a_message_is_parsed_once_its_caller_is_known_and_not_before(is_known: bool) -> None:
    """Map entries without end held up every stream for a second and more, whoever had sent them."""
    done: list[str] = []

    def check(call: Call, context: Any) -> None:
        done.append("checked")
        if not is_known:
            raise errors.bad_credentials()

    def parse(data: bytes) -> bytes:
        done.append("parsed")
        return data.upper()

    async def answer(request: bytes, context: Any) -> None:
        done.append(request.decode())

    stage = Stage()
    stage.guard = Guard(default_deadline=DEFAULT, max_deadline=LONGEST, checks=(check,))
    context = _Context()
    asyncio.run(stage.call(answer, context, parse=parse, data=b"words"))
    assert done == (["checked", "parsed", "WORDS"] if is_known else ["checked"])
    assert stage.counted("calls_handled") == {"OK" if is_known else "UNAUTHENTICATED": 1}


class _Collector:
    """A server as far as servicers are added to it."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        for add in SERVICERS:
            add(_Anything(), self)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same once more, for servers of older releases."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class _Anything:
    """A servicer of any service."""

    def __getattr__(self, name: str) -> Any:
        return None


HANDLERS = _Collector().handlers


@pytest.mark.parametrize("method", HANDLERS)
def test_a_message_of_too_many_fields_is_not_parsed_by_any_method(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_count, "MAX_FIELDS", 8)
    monkeypatch.setattr(field_count, "UNCOUNTED_BYTES", 0)
    done: list[Any] = []

    async def answer(request: Any, context: Any) -> None:
        done.append(request)

    stage, context = Stage(), _Context()
    parse, unknown = HANDLERS[method].request_deserializer, b"\xf8\x7f\x00"
    asyncio.run(stage.call(answer, context, method, parse=parse, data=unknown * 8))
    assert len(done) == 1, "eight are let through"
    asyncio.run(stage.call(answer, context, method, parse=parse, data=unknown * 9))
    assert len(done) == 1
    assert context.status is not None
    assert (context.status.code, "more than 8 fields" in context.status.details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        True,
    )


def test_a_failure_is_counted_and_logged_as_the_status_that_the_client_gets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()

    async def refuse(request: Any, context: Any) -> None:
        current_call.get().request_id = "r1"
        current_call.get().principal = "alice"
        current_call.get().received -= 5.0
        raise errors.not_ready()

    context = _Context(grpc_previous_rpc_attempts="2")
    with caplog.at_level(logging.INFO):
        asyncio.run(stage.call(refuse, context))
    assert context.status is not None
    assert context.status.code is grpc.StatusCode.UNAVAILABLE
    assert stage.counted("calls_handled") == {"UNAVAILABLE": 1}
    times = next(iter(stage.metrics.call_seconds.collect())).samples
    assert next(each.value for each in times if each.name.endswith("_sum") and each.value) >= 5.0
    (line,) = (each.getMessage() for each in caplog.records if "event=call" in each.getMessage())
    assert "code=UNAVAILABLE request=r1 principal=alice" in line
    assert line.endswith("attempt=3")


def test_a_bug_is_internal_to_the_client_and_in_the_log_with_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()

    async def break_down(request: Any, context: Any) -> None:
        current_call.get().request_id = "r1"
        raise TimeoutError("secret")  # not our timer's

    context = _Context()
    asyncio.run(stage.call(break_down, context))
    assert context.status is not None
    assert (context.status.code, context.status.details) == (grpc.StatusCode.INTERNAL, "internal error")
    (record,) = (each for each in caplog.records if "event=bug" in each.getMessage())
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"event=bug method={SERVICE}Generate request=r1"
    assert record.exc_info is not None
    assert stage.counted("calls_handled") == {"INTERNAL": 1}


def test_a_method_without_a_handler_of_ours_is_unimplemented_wherever_that_is_said() -> None:
    stage = Stage()

    async def generated(request: Any, context: Any) -> None:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        raise NotImplementedError

    context = _Context()
    asyncio.run(stage.call(generated, context))
    assert context.aborted == (grpc.StatusCode.UNIMPLEMENTED, "this server does not have the method")
    assert stage.counted("calls_handled") == {"UNIMPLEMENTED": 1}


def test_an_unknown_method_is_a_call_too() -> None:
    stage = Stage()
    assert stage.telemetry.unknown_method() is None
    assert stage.counted("calls_started") == {"": 1}
    assert stage.counted("calls_handled") == {"UNIMPLEMENTED": 1}


@pytest.mark.parametrize("attempts", ["", "x", "-1", "1000000"])
def test_attempts_that_are_no_small_number_are_a_first_one(
    attempts: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(request: Any, context: Any) -> str:
        return "ok"

    context = _Context(grpc_previous_rpc_attempts=attempts)
    with caplog.at_level(logging.INFO):
        assert asyncio.run(Stage().call(answer, context)) == "ok"
    (line,) = (each.getMessage() for each in caplog.records if "event=call" in each.getMessage())
    assert line.endswith("attempt=1")


def test_what_is_polled_is_quiet_until_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    polled = "/kvatlas.v1.ServerService/GetLoad"

    async def answer(request: Any, context: Any) -> str:
        return "ok"

    async def refuse(request: Any, context: Any) -> None:
        raise errors.not_ready()

    with caplog.at_level(logging.INFO):
        for method in (polled, "/grpc.health.v1.Health/Check"):
            asyncio.run(Stage().call(answer, _Context(), method))
        assert "event=call" not in caplog.text
        asyncio.run(Stage().call(refuse, _Context(), polled))
    assert caplog.text.count("event=call") == 1


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (grpc.unary_unary_rpc_method_handler, "unary"),
        (grpc.unary_stream_rpc_method_handler, "server_stream"),
        (grpc.stream_unary_rpc_method_handler, "client_stream"),
        (grpc.stream_stream_rpc_method_handler, "bidi_stream"),
    ],
)
def test_a_method_is_counted_under_its_kind(make: Any, kind: str) -> None:
    stage = Stage()

    async def nothing(request: Any, context: Any) -> None: ...

    stage.telemetry.wrap("/s.S/M", make(nothing))
    samples = next(iter(stage.metrics.calls_started.collect())).samples
    kinds = [each.labels["grpc_type"] for each in samples if each.labels["grpc_method"] == "M"]
    assert kinds == [kind]
