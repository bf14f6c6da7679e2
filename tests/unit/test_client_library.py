"""The client library against a scripted server: order, errors, retries, deadlines, and calls left early."""

import asyncio
import gc
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from kvatlas.client import channel as client_channel
from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Incomplete,
    InvalidRequest,
    Refused,
    RequestError,
    ServerFailure,
    Unavailable,
    Violation,
    build_error,
)
from kvatlas.client.events import Delta, Finished, Started, Summary
from kvatlas.client.request import Message, Options, build_spec
from kvatlas.client.stream import gather
from kvatlas.client.sync import Client
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 10.0
FAILING = "connections to all backends failing; last error:"
TLS = "UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL:"


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true"
        threading.Event().wait(0.005)


class ScriptedServer(generation_pb2_grpc.GenerationServiceServicer):
    """Does what the prompt says. Counts what is running."""

    def __init__(self) -> None:
        self.running = 0
        self.attempts = 0
        self.deadlines: list[float] = []
        self.lock = threading.Lock()

    def StreamGenerate(self, request: pb.StreamGenerateRequest, context: grpc.ServicerContext):
        self._enter(context)
        script = request.spec.text
        if script == "busy twice" and self.attempts < 3:
            self._abort(context, grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL", pushback_ms=10)
        if script == "refuse":
            self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", retry_seconds=1.5)
        yield self._started()
        if script == "lost after start":
            self._abort(context, grpc.StatusCode.ABORTED, "WORKER_LOST", metadata={"tokens_sent": "0"})
        if script == "down after start":
            context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")
        count = 10**6 if script == "endless" else 3
        for number in range(count):
            if not context.is_active():
                return
            offset = number + 1 if script == "gap" and number else number
            yield pb.StreamGenerateResponse(
                delta=pb.TokenDelta(
                    text=f"t{number} ", token_offset=offset, token_count=1, token_ids=[number]
                )
            )
            if script == "endless":
                threading.Event().wait(0.005)
        yield pb.StreamGenerateResponse(
            choice_finished=pb.ChoiceFinished(
                finish_reason=pb.FINISH_REASON_STOP_STRING, stop_string="END", completion_tokens=3
            )
        )
        if script != "no summary":
            yield pb.StreamGenerateResponse(summary=pb.GenerationSummary(usage=self._usage()))

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._enter(context)
        while request.spec.text == "slow" and context.is_active():  # until its client has had enough
            threading.Event().wait(0.005)
        if request.spec.text == "bad":
            self._abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_FIELD",
                violations=[
                    ("spec.sampling.temperature", "must be in [0, 2]"),
                    ("spec.stop.max_tokens", "is 0"),
                ],
            )
        choice = pb.Choice(text="whole", finish_reason=pb.FINISH_REASON_EOS)
        return pb.GenerateResponse(request_id="r1", choices=[choice], usage=self._usage())

    def _enter(self, context: grpc.ServicerContext) -> None:
        with self.lock:
            self.running += 1
            self.attempts += 1
            self.deadlines.append(context.time_remaining())

        def leave() -> None:
            with self.lock:
                self.running -= 1

        if not context.add_callback(leave):
            leave()

    def _started(self) -> pb.StreamGenerateResponse:
        started = pb.GenerationStarted(request_id="r1", prompt_tokens=20, prefix=self._prefix(), seed=7)
        return pb.StreamGenerateResponse(started=started)

    def _prefix(self) -> pb.PrefixLookup:
        return pb.PrefixLookup(hit_tokens=16, unaligned_tokens=4)

    def _usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=20,
            completion_tokens=3,
            prefix=self._prefix(),
            kv=pb.KvBill(page_seconds=0.5, peak_pages=2),
        )

    def _abort(
        self,
        context: grpc.ServicerContext,
        code: grpc.StatusCode,
        reason: str,
        *,
        metadata: dict[str, str] | None = None,
        retry_seconds: float | None = None,
        pushback_ms: int | None = None,
        violations: list[tuple[str, str]] | None = None,
    ) -> None:
        status = status_pb2.Status(code=code.value[0], message="a sentence")
        info = error_details_pb2.ErrorInfo(
            reason=reason, domain="kvatlas.v1", metadata={"request_id": "r1"} | (metadata or {})
        )
        details: list[object] = [info]
        if retry_seconds is not None:
            delay = Duration()
            delay.FromNanoseconds(int(retry_seconds * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if violations:
            bad = error_details_pb2.BadRequest()
            for path, description in violations:
                bad.field_violations.add(field=path, description=description)
            details.append(bad)
        for detail in details:
            packed = Any()
            packed.Pack(detail)
            status.details.append(packed)
        trailer = [("grpc-status-details-bin", status.SerializeToString())]
        if pushback_ms is not None:
            trailer.append(("grpc-retry-pushback-ms", str(pushback_ms)))
        context.set_trailing_metadata(tuple(trailer))
        context.abort(code, "a sentence")


@pytest.fixture
def server() -> Iterator[tuple[ScriptedServer, str]]:
    scripted = ScriptedServer()
    running = grpc.server(futures.ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(scripted, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield scripted, f"127.0.0.1:{port}"
    running.stop(0).wait()


def test_a_stream_gives_typed_events_in_order(server: tuple[ScriptedServer, str]) -> None:
    with Client(server[1]) as client, client.stream("hello", output="both") as stream:
        events = list(stream)
    assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Finished, Summary]
    whole = gather(events)
    assert whole.text == "t0 t1 t2 "
    assert whole.choices[0].token_ids == (0, 1, 2)
    assert (whole.choices[0].finish_reason, whole.choices[0].stop_match) == ("stop_string", "END")
    assert whole.usage.prefix is not None
    assert whole.usage.prefix.hit_tokens == 16
    assert whole.usage.kv.page_seconds == 0.5


@pytest.mark.parametrize("way", ["with", "break", "close", "exception"])
def test_a_stream_left_early_is_cancelled_on_the_server(server: tuple[ScriptedServer, str], way: str) -> None:
    """B111: the server's count of running calls goes to 0 once the client's function has returned."""
    scripted, address = server

    def fail_inside(client: Client) -> None:
        with client.stream("endless") as stream:
            next(stream)
            raise ZeroDivisionError

    def read_one(client: Client) -> None:
        if way == "with":
            with client.stream("endless") as stream:
                next(stream)
        elif way == "break":
            for _ in client.stream("endless"):
                break
        elif way == "close":
            stream = client.stream("endless")
            next(stream)
            stream.close()
        else:
            with pytest.raises(ZeroDivisionError):
                fail_inside(client)

    with Client(address) as client:
        read_one(client)
        gc.collect()
        wait_until(lambda: scripted.running == 0)
        assert scripted.attempts == 1


@pytest.mark.parametrize("way", ["with", "drop", "cancel"])
def test_an_async_stream_left_early_is_cancelled_on_the_server(
    server: tuple[ScriptedServer, str], way: str
) -> None:
    """B111: an abandoned aio call is not collected by gRPC itself, so the client cancels it."""
    scripted, address = server

    async def read_one(client: AsyncClient) -> None:
        if way == "drop":
            async for _ in client.stream("endless"):
                break
            return
        async with client.stream("endless") as stream:
            await anext(stream)
            if way == "cancel":
                await asyncio.sleep(3600)

    async def main() -> None:
        async with AsyncClient(address) as client:
            task = asyncio.create_task(read_one(client))
            if way == "cancel":
                await asyncio.to_thread(wait_until, lambda: scripted.running == 1)
                task.cancel()
            await asyncio.wait([task])
            del task
            gc.collect()
            await asyncio.to_thread(wait_until, lambda: scripted.running == 0)

    asyncio.run(main())


def test_the_async_client_gives_the_same_answer(server: tuple[ScriptedServer, str]) -> None:
    async def main() -> None:
        async with AsyncClient(server[1]) as client:
            async with client.stream("hello") as stream:
                events = [event async for event in stream]
            assert gather(events).text == "t0 t1 t2 "
            assert (await client.generate("hello")).text == "whole"
            with pytest.raises(InvalidRequest):
                await client.generate("bad")

    asyncio.run(main())


def test_a_call_whose_async_client_is_closed_says_so_and_cancels_no_task(
    server: tuple[ScriptedServer, str],
) -> None:
    """gRPC raises CancelledError then: a task that nobody had cancelled ended as cancelled."""
    scripted, address = server

    async def main() -> None:
        client = AsyncClient(address)
        asking = asyncio.create_task(client.generate("slow"))
        async with asyncio.timeout(WAIT_SECONDS):
            while not scripted.running:
                await asyncio.sleep(0.001)
        await client.close()
        with pytest.raises(Cancelled, match="the client was closed"):
            await asking

    asyncio.run(main())


def test_an_error_carries_reason_metadata_and_violations(server: tuple[ScriptedServer, str]) -> None:
    with Client(server[1]) as client, pytest.raises(InvalidRequest) as caught:
        client.generate("bad")
    error = caught.value
    assert (error.code, error.reason, error.request_id) == ("INVALID_ARGUMENT", "INVALID_FIELD", "r1")
    assert [violation.field for violation in error.violations] == [
        "spec.sampling.temperature",
        "spec.stop.max_tokens",
    ]
    assert str(error) == (
        "INVALID_FIELD: a sentence (spec.sampling.temperature: must be in [0, 2]; spec.stop.max_tokens: is 0)"
    )


def test_an_error_says_once_what_is_wrong() -> None:
    whole = InvalidRequest("spec.n: is 0", violations=[Violation("spec.n", "is 0")])
    part = InvalidRequest(
        "too long", violations=[Violation("spec.prompt", "too long"), Violation("spec.n", "is 0")]
    )
    assert str(whole) == "UNKNOWN: spec.n: is 0"
    assert str(part) == "UNKNOWN: too long (spec.prompt; spec.n: is 0)"
    assert str(InvalidRequest("bad")) == "UNKNOWN: bad"


def test_an_address_without_a_port_is_told_which_port_that_means() -> None:
    failed = build_error("UNAVAILABLE", "errors resolving x", b"", "x")
    assert str(failed).startswith("UNAVAILABLE: no server answers at x, without a port 443 is meant (")
    assert "443" not in str(build_error("UNAVAILABLE", "errors resolving x", b"", "x:1"))


def test_an_error_carries_the_retry_delay(server: tuple[ScriptedServer, str]) -> None:
    with Client(server[1]) as client, pytest.raises(Refused) as caught:
        list(client.stream("refuse"))
    assert caught.value.retry_seconds == 1.5


def test_a_call_that_no_server_took_is_retried_by_the_service_config(
    server: tuple[ScriptedServer, str],
) -> None:
    scripted, address = server
    with Client(address) as client:
        assert gather(client.stream("busy twice")).text == "t0 t1 t2 "
    assert scripted.attempts == 3


@pytest.mark.parametrize(
    ("script", "kind"), [("lost after start", ServerFailure), ("down after start", Unavailable)]
)
def test_nothing_is_retried_after_started_where_resume_is_off_or_the_server_says_so(
    server: tuple[ScriptedServer, str], script: str, kind: type[Exception]
) -> None:
    scripted, address = server
    resume_seconds = 0.0 if script == "down after start" else 30.0
    with Client(address, resume_seconds=resume_seconds) as client:
        stream = client.stream(script)
        assert isinstance(next(stream), Started)
        with pytest.raises(kind):
            list(stream)
    assert scripted.attempts == 1


def test_every_call_has_a_deadline(server: tuple[ScriptedServer, str]) -> None:
    scripted, address = server
    with Client(address) as client:
        client.generate("hello")
        list(client.stream("hello"))
        list(client.stream("hello", timeout_seconds=5.0))
    # The wire rounds a deadline up by as much as a second.
    assert all(590 < deadline <= 602 for deadline in scripted.deadlines[:2])
    assert 0 < scripted.deadlines[2] <= 6


def test_a_deadline_that_passes_says_so(server: tuple[ScriptedServer, str]) -> None:
    with Client(server[1]) as client, pytest.raises(DeadlineExceeded):
        client.generate("slow", timeout_seconds=0.1)


def test_a_missing_token_and_a_missing_summary_are_errors(server: tuple[ScriptedServer, str]) -> None:
    scripted, address = server
    with Client(address) as client:
        with pytest.raises(Incomplete, match="number 1, number 2 came"):
            list(client.stream("gap"))
        with pytest.raises(Incomplete, match="without its summary"):
            list(client.stream("no summary"))
    wait_until(lambda: scripted.running == 0)


def test_no_server_is_told_with_its_address() -> None:
    address = "127.0.0.1:1"
    with Client(address, timeout_seconds=20.0) as client, pytest.raises(Unavailable, match=address):
        client.generate("hello")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (f"{FAILING} UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host", "no server answers at"),
        ("errors resolving x:1: Domain name not found", "no server answers at"),
        ("Socket closed", "no server answers at"),  # in the middle of a call
        (f"{FAILING} UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "the server hangs up, as one does that"),
        (
            f"{FAILING} {TLS} SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER",
            "the server speaks no TLS at",
        ),
        (
            f"{FAILING} {TLS} CERTIFICATE_VERIFY_FAILED: self signed",
            "the server's certificate is not trusted",
        ),
        (
            f"{FAILING} UNKNOWN: UNAUTHENTICATED: Hostname Verification Check failed.",
            "the server's certificate has another name at",
        ),
        (f"{FAILING} UNAVAILABLE: Failed parsing HTTP/2 (Expected SETTINGS", "it is no gRPC server"),
    ],
)
def test_why_a_server_cannot_be_reached_is_told_in_words(said: str, sentence: str) -> None:
    """What core says was seen with grpcio 1.85 against a TLS server, a plain one, and a web server."""
    error = build_error("UNAVAILABLE", said, b"", "host:1")
    assert isinstance(error, Unavailable)
    assert str(error).startswith(f"UNAVAILABLE: {sentence}")
    assert "host:1" in str(error)
    assert said in str(error)


def test_a_method_that_is_not_there_is_told_with_the_address_and_what_it_may_be() -> None:
    """`kvatlas admin --admin-address` with the public address was told "Method not found!"."""
    error = build_error("UNIMPLEMENTED", "Method not found!", b"", "host:1")
    assert isinstance(error, ServerFailure)
    assert str(error).startswith("UNIMPLEMENTED: no such method at host:1: AdminService has its own address")


def test_details_that_are_no_status_are_passed_over() -> None:
    error = build_error("CANCELLED", "gone", b"\xff\xfe not a message", "host:1")
    assert isinstance(error, Cancelled)
    assert (error.reason, str(error)) == ("", "CANCELLED: gone")


def test_a_foreign_error_info_gives_no_reason() -> None:
    packed = Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="OTHER", domain="example.com"))
    raw = status_pb2.Status(details=[packed]).SerializeToString()
    assert build_error("INTERNAL", "x", raw, "host:1").reason == ""


def test_the_shipped_service_config_is_the_one_in_use() -> None:
    shipped = json.loads((ROOT / "examples" / "service_config.json").read_text())
    assert shipped == client_channel.SERVICE_CONFIG


def test_what_is_left_out_of_a_request_stays_unset() -> None:
    spec = build_spec("hi", {})
    assert spec == pb.GenerationSpec(text="hi", cache=pb.CacheOptions(), stop=pb.StopCriteria())
    assert not spec.sampling.HasField("temperature")
    assert not spec.cache.HasField("read")


def test_options_reach_their_fields() -> None:
    spec = build_spec(
        [1, 2],
        {
            "temperature": 0.0,
            "logit_bias": {5: -1.0},
            "stop_strings": ["x"],
            "max_duration_seconds": 1.5,
            "output": "both",
            "cache_read": False,
            "cache_salt": "s",
            "labels": {"a": "b"},
        },
    )
    assert list(spec.token_ids.ids) == [1, 2]
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.logit_bias[5] == -1.0
    assert list(spec.stop.stop_strings) == ["x"]
    assert spec.stop.max_duration.ToMilliseconds() == 1500
    assert spec.output.format == pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    assert spec.cache.read is False
    assert spec.cache.salt == "s"
    assert spec.labels["a"] == "b"


def test_an_unknown_option_and_a_mixed_prompt_are_refused_here() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        build_spec("hi", {"temprature": 0.0})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ValueError, match="a prompt is"):
        build_spec([1, Message("user", "x")], {})  # type: ignore[list-item]
    with pytest.raises(ValueError, match="unknown chat role"):
        build_spec([Message("boss", "x")], {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -3},
        {"top_k": 2**32},
        {"seed": -1},
        {"n": -1},
        {"logprobs": -1},
        {"priority": 2**31},
        {"stop_token_ids": [5, -1]},
        {"logit_bias": {-1: 1.0}},
        {"max_duration_seconds": math.nan},
        {"queue_timeout_seconds": math.inf},
        {"max_duration_seconds": 1e30},
    ],
)
def test_a_value_that_no_request_can_carry_is_refused_with_its_name(options: Options) -> None:
    ((name, value),) = options.items()
    with pytest.raises(RequestError, match=f"^{name}: {re.escape(repr(value))} is out of range$"):
        build_spec("hi", options)


def test_token_ids_that_no_request_can_carry_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^prompt: token ids must be from 0 to 4294967295$"):
        build_spec([1, -1], {})


def test_an_empty_list_of_ids_is_sent_as_such() -> None:
    assert build_spec([], {}).WhichOneof("prompt") == "token_ids"
