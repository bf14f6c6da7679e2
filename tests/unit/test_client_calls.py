"""What each call of the clients asks of the server, to the last field, and what it makes of the answer."""

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvatlas.client import calls, watch
from kvatlas.client.admin import Admin
from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import Refused, RequestError, build_error
from kvatlas.client.events import Tokens
from kvatlas.client.recordings import Recorder
from kvatlas.client.request import Message, build_stream
from kvatlas.client.sync import Client
from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2


class Listening(grpc.GenericRpcHandler):
    """Answers every method with the next of `answers`, and keeps what was asked, as bytes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.answers: list[Any] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.asked.append((details.method.removeprefix("/kvatlas.v1."), request))
            return bytes(self.answers.pop(0).SerializeToString())

        is_ours = details.method.startswith("/kvatlas.v1.")  # of the health service there is nothing here
        return grpc.unary_unary_rpc_method_handler(answer) if is_ours else None


@pytest.fixture
def listening() -> Iterator[tuple[Listening, str]]:
    handler = Listening()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(None).wait()


TURNS = (Message("system", "be brief"), Message("tool", "42", name="sum", tool_call_id="t1"))
CHAT = generation_pb2.ChatPrompt(
    messages=[
        generation_pb2.ChatMessage(role=generation_pb2.CHAT_ROLE_SYSTEM, content="be brief"),
        generation_pb2.ChatMessage(
            role=generation_pb2.CHAT_ROLE_TOOL, content="42", name="sum", tool_call_id="t1"
        ),
    ]
)
TOKENS = generation_pb2.TokenizeResponse(
    token_ids=[5, 6], start_offsets=[0, 3], rendered_text="a b c", page_count=2, cached_tokens=1
)
MODEL = server_pb2.Model(model_id="m")
LOAD = server_pb2.Load(active_requests=3)


def tokens_of(answer: generation_pb2.TokenizeResponse) -> Tokens:
    return Tokens((5, 6), (0, 3), "a b c", page_count=2, cached_tokens=1)


CALLS: list[tuple[Callable[[Any], Any], str, Any, Any, Callable[[Any], Any]]] = [
    (
        lambda client: client.cancel(["r1", "r2"]),
        "GenerationService/CancelGeneration",
        generation_pb2.CancelGenerationRequest(request_ids=["r1", "r2"]),
        generation_pb2.CancelGenerationResponse(),
        lambda answer: answer,
    ),
    (
        lambda client: client.tokenize("text", include_offsets=True),
        "GenerationService/Tokenize",
        generation_pb2.TokenizeRequest(text="text", include_offsets=True),
        TOKENS,
        tokens_of,
    ),
    (
        lambda client: client.tokenize(TURNS),
        "GenerationService/Tokenize",
        generation_pb2.TokenizeRequest(chat=CHAT),
        TOKENS,
        tokens_of,
    ),
    (
        lambda client: client.detokenize([7, 8]),
        "GenerationService/Detokenize",
        generation_pb2.DetokenizeRequest(token_ids=[7, 8], skip_special_tokens=True),
        generation_pb2.DetokenizeResponse(text="seven"),
        lambda answer: "seven",
    ),
    (
        lambda client: client.detokenize([7], skip_special_tokens=False),
        "GenerationService/Detokenize",
        generation_pb2.DetokenizeRequest(token_ids=[7], skip_special_tokens=False),
        generation_pb2.DetokenizeResponse(text="s"),
        lambda answer: "s",
    ),
    (
        lambda client: client.server_info(),
        "ServerService/GetServerInfo",
        server_pb2.GetServerInfoRequest(),
        server_pb2.GetServerInfoResponse(),
        lambda answer: answer,
    ),
    (
        lambda client: client.models(),
        "ServerService/ListModels",
        server_pb2.ListModelsRequest(),
        server_pb2.ListModelsResponse(models=[MODEL]),
        lambda answer: [MODEL],
    ),
    (
        lambda client: client.load(),
        "ServerService/GetLoad",
        server_pb2.GetLoadRequest(),
        server_pb2.GetLoadResponse(load=LOAD),
        lambda answer: LOAD,
    ),
    (
        lambda client: client.page_pool("w1"),
        "CacheService/GetPagePool",
        cache_pb2.GetPagePoolRequest(worker_id="w1"),
        cache_pb2.GetPagePoolResponse(),
        lambda answer: answer,
    ),
    (
        lambda client: client.page(3, worker_id="w1", event_limit=5),
        "CacheService/GetPage",
        cache_pb2.GetPageRequest(worker_id="w1", page_id=3, event_limit=5),
        cache_pb2.GetPageResponse(),
        lambda answer: answer,
    ),
    (
        lambda client: client.sequences("w1", max_results=7),
        "CacheService/ListSequences",
        cache_pb2.ListSequencesRequest(worker_id="w1", max_results=7),
        cache_pb2.ListSequencesResponse(),
        lambda answer: answer,
    ),
    (
        lambda client: client.check_integrity("w1"),
        "CacheService/RunIntegrityCheck",
        cache_pb2.RunIntegrityCheckRequest(worker_id="w1"),
        cache_pb2.RunIntegrityCheckResponse(),
        lambda answer: answer,
    ),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_each_call_asks_for_what_it_says(listening: tuple[Listening, str], is_async: bool) -> None:
    handler, address = listening

    async def ask(call: Callable[[Any], Any]) -> Any:
        async with AsyncClient(address) as client:
            return await call(client)

    for call, method, request, answer, read in CALLS:
        handler.answers.append(answer)
        if is_async:
            got = asyncio.run(ask(call))
        else:
            with Client(address) as client:
                got = call(client)
        assert handler.asked.pop() == (method, request.SerializeToString())
        assert got == read(answer)


PIN = server_pb2.PinnedPrefix(name="p", token_count=8)
ORDERS: list[tuple[Callable[[Admin], Any], str, Any, Any, Callable[[Any], Any]]] = [
    (
        lambda admin: admin.start_drain(1.5),
        "StartDrain",
        server_pb2.StartDrainRequest(grace={"seconds": 1, "nanos": 500_000_000}),
        server_pb2.StartDrainResponse(running_requests=4),
        lambda answer: 4,
    ),
    (
        lambda admin: admin.start_drain(),
        "StartDrain",
        server_pb2.StartDrainRequest(),
        server_pb2.StartDrainResponse(),
        lambda answer: 0,
    ),
    (
        lambda admin: admin.stop_drain(),
        "StopDrain",
        server_pb2.StopDrainRequest(),
        server_pb2.StopDrainResponse(),
        lambda answer: None,
    ),
    (
        lambda admin: admin.flush_prefix_cache("w", tenant="t", salt="", include_active=True),
        "FlushPrefixCache",
        server_pb2.FlushPrefixCacheRequest(worker_id="w", tenant="t", salt="", include_active=True),
        server_pb2.FlushPrefixCacheResponse(freed_pages=3),
        lambda answer: answer,
    ),
    (
        lambda admin: admin.flush_prefix_cache(include_pinned=True),
        "FlushPrefixCache",
        server_pb2.FlushPrefixCacheRequest(include_pinned=True),  # without a salt: of all
        server_pb2.FlushPrefixCacheResponse(),
        lambda answer: answer,
    ),
    (
        lambda admin: admin.pin_prefix(
            "p", "text", worker_id="w", model="m", tenant="t", salt="s", ttl_seconds=2
        ),
        "SetPinnedPrefix",
        server_pb2.SetPinnedPrefixRequest(
            name="p", text="text", worker_id="w", model="m", tenant="t", salt="s", ttl={"seconds": 2}
        ),
        server_pb2.SetPinnedPrefixResponse(pins=[PIN]),
        lambda answer: [PIN],
    ),
    (
        lambda admin: admin.pin_prefix("p", TURNS),
        "SetPinnedPrefix",
        server_pb2.SetPinnedPrefixRequest(name="p", chat=CHAT),
        server_pb2.SetPinnedPrefixResponse(),
        lambda answer: [],
    ),
    (
        lambda admin: admin.pin_prefix("p", [1, 2]),
        "SetPinnedPrefix",
        server_pb2.SetPinnedPrefixRequest(name="p", token_ids={"ids": [1, 2]}),
        server_pb2.SetPinnedPrefixResponse(),
        lambda answer: [],
    ),
    (
        lambda admin: admin.unpin_prefix("p", worker_id="w"),
        "SetPinnedPrefix",
        server_pb2.SetPinnedPrefixRequest(name="p", worker_id="w", remove=True),
        server_pb2.SetPinnedPrefixResponse(),
        lambda answer: None,
    ),
    (
        lambda admin: admin.cancel_requests(["r"], principal="alice", labels={"a": "b"}, reason="why"),
        "CancelRequests",
        server_pb2.CancelRequestsRequest(
            request_ids=["r"], principal="alice", labels={"a": "b"}, reason="why"
        ),
        server_pb2.CancelRequestsResponse(cancelled_ids=["r"]),
        lambda answer: ["r"],
    ),
    (
        lambda admin: admin.set_log_level("debug", logger="worker.link", worker_id="w", seconds=3),
        "SetLogLevel",
        server_pb2.SetLogLevelRequest(
            level=server_pb2.LOG_LEVEL_DEBUG, logger="worker.link", worker_id="w", duration={"seconds": 3}
        ),
        server_pb2.SetLogLevelResponse(),
        lambda answer: None,
    ),
    (
        lambda admin: admin.capture_profile(7, worker_id="w"),
        "CaptureProfile",
        server_pb2.CaptureProfileRequest(steps=7, worker_id="w"),
        server_pb2.CaptureProfileResponse(),
        lambda answer: answer,
    ),
]


def test_each_order_of_an_operator_asks_for_what_it_says(listening: tuple[Listening, str]) -> None:
    handler, address = listening
    with Admin(address) as admin:
        for order, method, request, answer, read in ORDERS:
            handler.answers.append(answer)
            got = order(admin)
            assert handler.asked.pop() == (f"AdminService/{method}", request.SerializeToString())
            assert got == read(answer)


def test_pins_are_asked_for_until_no_page_of_them_is_left(listening: tuple[Listening, str]) -> None:
    handler, address = listening
    for cursor in ("c1", "c2", ""):
        handler.answers.append(server_pb2.ListPinnedPrefixesResponse(pins=[PIN], next_cursor=cursor))
    with Admin(address) as admin:
        assert admin.pinned_prefixes("w") == [PIN] * 3
    asked = [server_pb2.ListPinnedPrefixesRequest.FromString(data) for _, data in handler.asked]
    assert [(request.worker_id, request.cursor) for request in asked] == [("w", ""), ("w", "c1"), ("w", "c2")]


def test_each_order_to_a_recorder_asks_for_what_it_says(listening: tuple[Listening, str]) -> None:
    handler, address = listening
    info = server_pb2.RecordingInfo(recording_id="r1")
    handler.answers += [
        server_pb2.StartRecordingResponse(recording=info),
        server_pb2.StopRecordingResponse(recording=info),
        server_pb2.ListRecordingsResponse(recordings=[info]),
    ]
    with Recorder(address) as recorder:
        shape = {"max_bytes": 9, "include_token_ids": True, "note": "n", "rotate": True}
        assert recorder.start("w", lookback_seconds=0.5, max_seconds=2, **shape) == info
        assert recorder.stop("r1", worker_id="w") == info
        assert recorder.list("w") == [info]
    start = server_pb2.StartRecordingRequest(
        worker_id="w", lookback={"nanos": 500_000_000}, max_duration={"seconds": 2}, **shape
    )
    stop = server_pb2.StopRecordingRequest(worker_id="w", recording_id="r1")
    assert [data for _, data in handler.asked] == [
        request.SerializeToString()
        for request in (start, stop, server_pb2.ListRecordingsRequest(worker_id="w"))
    ]


def test_a_role_that_does_not_exist_is_refused_before_it_is_asked(listening: tuple[Listening, str]) -> None:
    handler, address = listening
    with Client(address) as client:
        for role in ("judge", "unspecified"):
            with pytest.raises(RequestError, match=f"unknown chat role '{role}'"):
                client.tokenize([Message(role, "x")])  # type: ignore[arg-type]
    assert handler.asked == []


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: build_stream("hi", {}, False, -1), "min_tokens_per_message"),
        (lambda: build_stream("hi", {}, False, 1, math.inf), "max_hold_seconds"),
        (lambda: calls.detokenize([1, -1], True), "token_ids"),
        (lambda: calls.page("", -1, 20), "page_id"),
        (lambda: calls.page("", 1, 2**32), "event_limit"),
        (lambda: calls.sequences("", -1), "max_results"),
        (lambda: watch.watch_load(math.inf, 0.0), "seconds"),
        (lambda: watch.watch_pages("", math.nan, (), 0.0).request(), "seconds"),
        (lambda: Recorder("localhost:1").start(lookback_seconds=math.inf), "seconds"),
        (lambda: Recorder("localhost:1").start(max_bytes=-1), "max_bytes"),
    ],
)
def test_a_number_that_no_request_can_carry_is_refused_with_its_name(
    make: Callable[[], object], name: str
) -> None:
    with pytest.raises(RequestError, match=f"^{name}: .* is out of range$"):
        make()


def test_all_details_of_a_refusal_are_read_whoever_put_them_there() -> None:
    details = [
        error_details_pb2.QuotaFailure(
            violations=[error_details_pb2.QuotaFailure.Violation(subject="one", description="too many")]
        ),
        *(
            error_details_pb2.BadRequest(
                field_violations=[error_details_pb2.BadRequest.FieldViolation(field=each, description="bad")]
            )
            for each in "ab"
        ),
        error_details_pb2.ErrorInfo(reason="QUOTA_EXCEEDED", domain="kvatlas.v1"),
        error_details_pb2.ErrorInfo(reason="OTHER", domain="of.a.proxy"),
    ]
    status = status_pb2.Status()
    for each in details:
        status.details.add().Pack(each)
    error = build_error("UNKNOWN", "no", status.SerializeToString(), "here:1")
    assert isinstance(error, Refused)
    assert error.reason == "QUOTA_EXCEEDED"
    assert [(v.field, v.description) for v in error.violations] == [
        ("one", "too many"),
        ("a", "bad"),
        ("b", "bad"),
    ]
