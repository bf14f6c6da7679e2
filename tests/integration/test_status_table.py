"""What each situation gets: status, reason, details, and that nothing is left behind.

What each answer of a worker becomes, with a scripted one that can give any of them; what a real one shows is
in test_status_of_*.py. Lost workers, drains and slow readers have files of their own.
"""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc
from service.request import AbortReason
from service.testing import Refusal, RunningService, running_service
from service.testing_worker import ScriptedWorker, WorkerScript
from tests.status_stack import FIVE_ATTEMPTS

ENDLESS = {"fake.step_ms": "250"}  # for two minutes
WAITING = {"fake.wait_ms": "600000"}
CALL_SECONDS = 120.0  # ends a call that hangs


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(
        tmp_path_factory.mktemp("status"), script=WorkerScript(max_context=512), max_watches=2
    ) as service:
        yield service


@pytest.fixture(scope="module")
def channel(running: RunningService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture
def idle_after(running: RunningService, wait_until: Any) -> Iterator[None]:
    """Pages and queue return to idle: nothing of the request is left on either side."""
    yield
    wait_until(lambda: running.is_idle, "idle service and worker")


def spec_of(text: str = "abc", **more: Any) -> pb.GenerationSpec:
    more.setdefault("stop", pb.StopCriteria(max_tokens=500))
    return pb.GenerationSpec(text=text, **more)


def refused(stub: Any, spec: pb.GenerationSpec, timeout: float | None = CALL_SECONDS) -> Refusal:
    """The status of a stream; the unary call must get the same one."""
    with pytest.raises(grpc.RpcError) as whole:
        stub.Generate(pb.GenerateRequest(spec=spec), timeout=timeout)
    with pytest.raises(grpc.RpcError) as streamed:
        list(stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=timeout))
    refusal, other = Refusal.of(streamed.value), Refusal.of(whole.value)
    assert (refusal.code, refusal.reason, refusal.paths) == (other.code, other.reason, other.paths)
    return refusal


@pytest.mark.usefixtures("idle_after")
@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (pb.GenerationSpec(), "spec.prompt"),
        (pb.GenerationSpec(text=""), "spec.text"),
        (pb.GenerationSpec(token_ids=pb.TokenSequence()), "spec.token_ids.ids"),
        (pb.GenerationSpec(token_ids=pb.TokenSequence(ids=[1, 512])), "spec.token_ids.ids"),
        (pb.GenerationSpec(chat=pb.ChatPrompt()), "spec.chat.messages"),
        (spec_of(request_id="not an id"), "spec.request_id"),
        (spec_of(sampling=pb.SamplingParams(temperature=float("nan"))), "spec.sampling.temperature"),
        (spec_of(sampling=pb.SamplingParams(top_p=0)), "spec.sampling.top_p"),
        (spec_of(sampling=pb.SamplingParams(n=17)), "spec.sampling.n"),
        (spec_of(output=pb.OutputOptions(format=77)), "spec.output.format"),
        (spec_of(stop=pb.StopCriteria(max_tokens=0)), "spec.stop.max_tokens"),
        (spec_of(stop=pb.StopCriteria(stop_strings=[""])), "spec.stop.stop_strings[0]"),
        (spec_of(scheduling=pb.SchedulingOptions(priority=101)), "spec.scheduling.priority"),
        (spec_of(cache=pb.CacheOptions(salt="s" * 65)), "spec.cache.salt"),
        (spec_of(labels={"k": "v" * 256}), "spec.labels[k]"),
    ],
)
def test_a_value_out_of_its_range_is_named_by_its_path(stub: Any, spec: pb.GenerationSpec, path: str) -> None:
    refusal = refused(stub, spec)
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert path in refusal.paths
    assert path in refusal.message
    assert refusal.metadata["request_id"]  # the server's own where the client gave none, or a bad one


def test_all_violations_come_in_one_answer(stub: Any) -> None:
    spec = spec_of(
        sampling=pb.SamplingParams(temperature=3, top_p=2), stop=pb.StopCriteria(max_tokens=1, min_tokens=2)
    )
    request = pb.StreamGenerateRequest(spec=spec, stream=pb.StreamOptions(min_tokens_per_message=65))
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.StreamGenerate(request, timeout=CALL_SECONDS))
    assert set(Refusal.of(raised.value).paths) == {
        "spec.sampling.temperature",
        "spec.sampling.top_p",
        "spec.stop.min_tokens",
        "stream.min_tokens_per_message",
    }


@pytest.mark.usefixtures("idle_after")
def test_an_over_long_prompt_is_refused_with_both_numbers_and_never_cut(stub: Any) -> None:
    """H7, B044: the limit in the sentence is the real one, whatever max_tokens is."""
    refusal = refused(stub, spec_of("x" * 512, stop=pb.StopCriteria(max_tokens=300)))
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert refusal.metadata["prompt_tokens"] == "512"
    assert refusal.metadata["max_prompt_tokens"] == "511"
    assert refusal.paths == ("spec.prompt",)
    for number in ("512 tokens", "511"):
        assert number in refusal.message
    assert "300" not in refusal.message


def test_the_operator_may_allow_less_prompt_than_the_context(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        running_service(tmp_path_factory.mktemp("short"), max_prompt_tokens=10) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        few = pb.StopCriteria(max_tokens=1)
        stub.Generate(pb.GenerateRequest(spec=spec_of("x" * 10, stop=few)), timeout=CALL_SECONDS)
        refusal = refused(stub, spec_of("x" * 11, stop=few))
        assert (refusal.reason, refusal.metadata["max_prompt_tokens"]) == ("PROMPT_TOO_LONG", "10")
        info = server_pb2_grpc.ServerServiceStub(channel)
        limits = info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS).limits
        assert limits.max_prompt_tokens == 10


def test_max_tokens_over_the_context_is_cut_to_it_and_ends_as_context_length(stub: Any) -> None:
    """B044: a prompt of 8 with max_tokens far over the context is answered."""
    spec = spec_of("12345678", stop=pb.StopCriteria(max_tokens=100_000), labels={"fake.step_ms": "0"})
    response = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    assert response.choices[0].finish_reason == pb.FINISH_REASON_CONTEXT_LENGTH
    assert response.usage.completion_tokens == 512 - 8


@pytest.mark.usefixtures("idle_after")
@pytest.mark.parametrize(
    ("labels", "code", "reason", "keys"),
    [
        (
            {"fake.status": "NEVER_FITS"},
            "INVALID_ARGUMENT",
            "EXCEEDS_PAGE_POOL",
            ("needed_pages", "total_pages"),
        ),
        ({"fake.status": "TOO_LONG"}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG", ("max_prompt_tokens",)),
        ({"fake.status": "QUEUE_FULL"}, "UNAVAILABLE", "QUEUE_FULL", ()),
        (
            {"fake.status": "TIMEOUT_TOO_SHORT", "fake.estimated_wait_ms": "9000"},
            "DEADLINE_EXCEEDED",
            "DEADLINE_TOO_SHORT",
            ("estimated_wait_ms",),
        ),
        ({"fake.status": "DRAINING"}, "UNAVAILABLE", "DRAINING", ()),
        ({"fake.status": "NOT_READY"}, "UNAVAILABLE", "NOT_READY", ()),
        (
            {"fake.status": "FEATURE_DISABLED", "fake.message": "f"},
            "FAILED_PRECONDITION",
            "FEATURE_DISABLED",
            ("feature",),
        ),
        ({"fake.status": "INVALID"}, "INTERNAL", "INTERNAL", ()),
        ({"fake.fail_at": "0"}, "INTERNAL", "INTERNAL", ()),
        ({"fake.fail_at": "3"}, "INTERNAL", "INTERNAL", ()),
        ({"fake.fail_at": "3", "fake.error_reason": "14"}, "INTERNAL", "DEVICE_OUT_OF_MEMORY", ()),
        ({"fake.code_at_2": "7"}, "DEADLINE_EXCEEDED", "DEADLINE_PASSED", ()),
        ({"fake.code_at_1": "8"}, "RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT", ()),
    ],
)
def test_what_the_worker_answers_becomes_a_status(
    stub: Any, labels: dict[str, str], code: str, reason: str, keys: tuple[str, ...]
) -> None:
    refusal = refused(stub, spec_of(labels=labels))
    assert (refusal.code, refusal.reason) == (code, reason)
    assert set(keys) <= set(refusal.metadata)
    assert refusal.metadata["request_id"]
    assert "scripted" not in refusal.message  # the worker's own words are for the log


@pytest.mark.parametrize(("wait_ms", "pushback"), [("0", 50), ("700", 700), ("60000", 5000)])
def test_a_full_queue_says_when_to_come_back(stub: Any, wait_ms: str, pushback: int) -> None:
    labels = {"fake.status": "QUEUE_FULL", "fake.estimated_wait_ms": wait_ms}
    refusal = refused(stub, spec_of(labels=labels))
    assert refusal.pushback == str(pushback)
    assert refusal.retry_ms == pushback


def test_draining_and_not_ready_say_when_to_come_back(stub: Any) -> None:
    drained = refused(stub, spec_of(labels={"fake.status": "DRAINING"}))
    assert (drained.retry_ms, drained.pushback) == (100, "100")
    starting = refused(stub, spec_of(labels={"fake.status": "NOT_READY"}))
    assert (starting.retry_ms, starting.pushback) == (1000, "1000")


def test_the_third_attempt_at_a_full_queue_is_the_last(running: RunningService) -> None:
    config = {
        "methodConfig": [
            {"name": [{"service": "kvatlas.v1.GenerationService"}], "retryPolicy": FIVE_ATTEMPTS}
        ]
    }
    options = [("grpc.service_config", json.dumps(config)), ("grpc.enable_retries", 1)]
    running.worker.adds.clear()
    with grpc.insecure_channel(running.address, options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Generate(
                pb.GenerateRequest(spec=spec_of(labels={"fake.status": "QUEUE_FULL"})), timeout=CALL_SECONDS
            )
    assert Refusal.of(raised.value).pushback == "-1"
    assert len(running.worker.adds) == 3


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("Generate", "unary_unary"),
        ("StreamGenerate", "unary_stream"),
        ("CancelGeneration", "unary_unary"),
        ("Tokenize", "unary_unary"),
    ],
)
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x05\x0a\x03\xff\xfe\xfd"], ids=["garbage", "utf8"])
def test_bytes_that_are_no_message_are_malformed(
    channel: grpc.Channel, stub: Any, method: str, request_type: str, data: bytes
) -> None:
    if method == "CancelGeneration" and data[0] == 0x0A:
        data = b"\x0a\x03\xff\xfe\xfd"
    if method == "Tokenize" and data[0] == 0x0A:
        data = b"\x12\x03\xff\xfe\xfd"
    raw = getattr(channel, request_type)(
        f"/kvatlas.v1.GenerationService/{method}", request_serializer=lambda b: b, response_deserializer=bytes
    )
    call = (
        raw(data, timeout=CALL_SECONDS)
        if request_type == "unary_stream"
        else iter(lambda: raw(data, timeout=CALL_SECONDS), 0)
    )
    with pytest.raises(grpc.RpcError) as raised:
        next(call)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
    assert "Error" not in refusal.message  # no text of Python's


def test_messages_over_the_limit_are_refused_and_other_streams_live_on(stub: Any) -> None:
    other = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec_of(labels=ENDLESS)), timeout=CALL_SECONDS)
    next(other)
    for spec in (
        spec_of("x" * 5_000_000),
        pb.GenerationSpec(token_ids=pb.TokenSequence(ids=[300] * 2_100_000)),
    ):
        refusal = refused(stub, spec)
        assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "")
    assert next(other).delta.token_count >= 1
    other.cancel()


def test_text_over_two_mebibytes_is_an_invalid_field(stub: Any) -> None:
    assert refused(stub, spec_of("x" * (2 * 1024 * 1024 + 1))).paths == ("spec.text",)


def test_metadata_over_its_limit_is_refused_by_the_core(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        stub.Generate(pb.GenerateRequest(spec=spec_of()), timeout=20, metadata=(("x-big", "m" * 20_000),))
    assert Refusal.of(raised.value).code == "RESOURCE_EXHAUSTED"


def test_a_method_that_does_not_exist_is_unimplemented(
    channel: grpc.Channel, running: RunningService
) -> None:
    before = running.value(
        "grpc_server_started_total", grpc_type="unary", grpc_service="other", grpc_method="other"
    )
    for method in ("/kvatlas.v1.GenerationService/Nothing", "/no.Such/Thing"):
        raw = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as raised:
            raw(b"", timeout=CALL_SECONDS)
        assert Refusal.of(raised.value).code == "UNIMPLEMENTED"
    after = running.value(
        "grpc_server_started_total", grpc_type="unary", grpc_service="other", grpc_method="other"
    )
    assert after == before + 2


def test_another_model_is_not_found(stub: Any) -> None:
    refusal = refused(stub, spec_of(model="gpt-5"))
    assert (refusal.code, refusal.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert refusal.message == "no model 'gpt-5' is served here, but 'toy'"
    assert refused(stub, spec_of(model="toy", labels={"fake.status": "QUEUE_FULL"})).reason == "QUEUE_FULL"
    with pytest.raises(grpc.RpcError) as raised:
        stub.Tokenize(pb.TokenizeRequest(text="a", model="gpt-5"), timeout=CALL_SECONDS)
    assert Refusal.of(raised.value).reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize(
    ("more", "feature"),
    [
        ({"json_schema": "{}"}, "constraints"),
        ({"regex": "a+"}, "constraints"),
        ({"grammar": "root ::= 'a'"}, "constraints"),
        ({"choices": pb.ChoiceConstraint(choices=["a", "b"])}, "constraints"),
        ({"adapter": "lora-1"}, "adapters"),
    ],
)
def test_what_is_not_supported_is_refused_not_ignored(stub: Any, more: dict[str, Any], feature: str) -> None:
    """H8."""
    refusal = refused(stub, spec_of(**more))
    assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "FEATURE_DISABLED")
    assert refusal.metadata["feature"] == feature


def test_tools_are_refused_not_ignored(stub: Any) -> None:
    """H8."""
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")], tools_json=['{"name": "f"}']
    )
    refusal = refused(stub, pb.GenerationSpec(chat=chat))
    assert (refusal.reason, refusal.metadata["feature"]) == ("FEATURE_DISABLED", "tools")


@pytest.mark.usefixtures("idle_after")
def test_an_id_in_flight_is_refused_and_the_first_call_goes_on(stub: Any) -> None:
    spec = spec_of(request_id="twice", labels=ENDLESS)
    first = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    next(first)
    refusal = refused(stub, spec)
    assert (refusal.code, refusal.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
    assert refusal.metadata["request_id"] == "twice"
    assert next(first).delta.token_count >= 1
    first.cancel()


@pytest.mark.usefixtures("idle_after")
@pytest.mark.parametrize("labels", [WAITING, ENDLESS], ids=["queue", "decode"])
def test_a_deadline_that_passes_ends_the_call_and_stops_the_worker(
    stub: Any, running: RunningService, wait_until: Any, labels: dict[str, str]
) -> None:
    """Whose clock is ahead is not known: the client's word of it may come first, as a cancel."""

    def ended() -> float:
        outcomes = ("deadline", "cancelled")
        return sum(running.value("kvatlas_requests_total", outcome=outcome) for outcome in outcomes)

    running.worker.aborts.clear()
    before, seconds = ended(), 0.3
    while not running.worker.aborts:  # on a busy machine it may pass on its way to the worker
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec_of(labels=labels)), timeout=seconds))
        assert Refusal.of(raised.value).code == "DEADLINE_EXCEEDED"
        wait_until(lambda: running.is_idle, "the end of the call")
        seconds *= 2
    wait_until(lambda: ended() > before, "the outcome")
    assert [reason in (AbortReason.DEADLINE, AbortReason.CLIENT) for _, reason in running.worker.aborts] == [
        True
    ]


def test_calls_without_a_deadline_get_one_and_long_ones_are_cut(
    tmp_path_factory: pytest.TempPathFactory, wait_until: Any
) -> None:
    folder = tmp_path_factory.mktemp("deadline")
    with running_service(folder, default_deadline=0.5, max_deadline=1.0) as running:
        with grpc.insecure_channel(running.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for timeout, kept in ((None, 0.5), (CALL_SECONDS, 1.0)):
                before = len(running.worker.adds)
                refusal = refused(stub, spec_of(labels=WAITING), timeout)
                assert (refusal.code, refusal.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_PASSED")
                assert all(add.timeout_ms <= kept * 1000 + 5 for add in running.worker.adds[before:])
        wait_until(lambda: running.is_idle, "idle service and worker")
        assert running.worker.adds, "at least one of the four reached the worker in time"
        assert {reason for _, reason in running.worker.aborts} == {AbortReason.DEADLINE}


def test_one_watch_too_many_is_refused(
    channel: grpc.Channel, running: RunningService, wait_until: Any
) -> None:
    stub = server_pb2_grpc.ServerServiceStub(channel)
    watches = [stub.WatchLoad(server_pb2.WatchLoadRequest(), timeout=CALL_SECONDS) for _ in range(2)]
    for watch in watches:
        next(watch)
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.WatchLoad(server_pb2.WatchLoadRequest(), timeout=CALL_SECONDS))
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason, refusal.retry_ms) == ("RESOURCE_EXHAUSTED", "WATCH_LIMIT", 1000)
    for watch in watches:
        watch.cancel()
    wait_until(lambda: running.service.backstage.watches.active == 0, "the end of the watches")


def test_without_a_worker_nothing_is_ready(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        running_service(tmp_path_factory.mktemp("none"), num_workers=0, ready=False) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        refusal = refused(stub, spec_of())
    assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "NOT_READY")
    assert (refusal.retry_ms, refusal.pushback) == (1000, "1000")


@pytest.mark.parametrize(
    "script",
    [WorkerScript(tokenizer_sha256="0" * 64), WorkerScript(vocab_size=256)],
    ids=["tokenizer", "vocabulary"],
)
def test_a_worker_with_another_tokenizer_is_not_used(
    tmp_path_factory: pytest.TempPathFactory, wait_until: Any, script: WorkerScript
) -> None:
    with running_service(tmp_path_factory.mktemp("other"), script=script, ready=False) as running:
        wait_until(lambda: running.service.backstage.pool.links[0].is_up, "the worker's welcome")
        with grpc.insecure_channel(running.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert refused(stub, spec_of()).reason == "NOT_READY"
        assert not running.worker.adds


def test_calls_over_the_cap_of_the_process_are_refused(
    tmp_path_factory: pytest.TempPathFactory, wait_until: Any
) -> None:
    with (
        running_service(tmp_path_factory.mktemp("cap"), max_calls=1) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        first = stub.StreamGenerate(
            pb.StreamGenerateRequest(spec=spec_of(labels=ENDLESS)), timeout=CALL_SECONDS
        )
        next(first)
        assert refused(stub, spec_of()).reason == "QUEUE_FULL"
        first.cancel()
        wait_until(lambda: running.is_idle, "idle service and worker")
        stub.Generate(
            pb.GenerateRequest(spec=spec_of(stop=pb.StopCriteria(max_tokens=1))), timeout=CALL_SECONDS
        )


def test_max_duration_ends_normally(stub: Any) -> None:
    labels = {"fake.code_at_4": "5"}
    response = stub.Generate(pb.GenerateRequest(spec=spec_of(labels=labels)), timeout=CALL_SECONDS)
    assert response.choices[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT


def test_a_stuck_worker_is_not_used_and_comes_back_by_itself(
    tmp_path_factory: pytest.TempPathFactory, wait_until: Any
) -> None:
    script = WorkerScript()
    with (
        running_service(tmp_path_factory.mktemp("stuck"), script=script, stall_seconds=1.0) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        first = stub.StreamGenerate(
            pb.StreamGenerateRequest(spec=spec_of(labels=ENDLESS)), timeout=CALL_SECONDS
        )
        next(first)
        script.last_step_age = 5.0
        pool = running.service.backstage.pool
        wait_until(lambda: not pool.usable, "the worker to be taken for stuck")
        assert refused(stub, spec_of()).reason == "NOT_READY"
        script.last_step_age = 0.0
        wait_until(lambda: pool.usable, "the worker to be usable again")
        first.cancel()


def test_a_worker_may_come_after_the_service(
    tmp_path_factory: pytest.TempPathFactory, wait_until: Any
) -> None:
    folder = tmp_path_factory.mktemp("late")
    late = ScriptedWorker(f"ipc://{folder}/late")
    with running_service(folder, num_workers=0, ready=False, workers=(late.address,)) as running:
        late.start()
        try:
            wait_until(lambda: running.service.backstage.pool.usable, "the late worker")
        finally:
            late.stop()
