"""Guard, telemetry, health, reflection, load and the ops port of a real service."""

import http.client
import logging
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc
from service import health_messages as health
from service.testing import Refusal, RunningService, loop_thread, running_service
from service.testing_worker import ScriptedWorker, WorkerScript

ROOT = Path(__file__).resolve().parents[2]
CALL_SECONDS = 120.0  # ends a call that hangs
NAMES = ("", "kvatlas.v1.GenerationService", "kvatlas.v1.CacheService")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("calls"), script=WorkerScript(step_ms=0)) as service:
        yield service


@pytest.fixture(scope="module")
def channel(running: RunningService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.address) as channel:
        yield channel


def generate(channel: grpc.Channel, text: str = "abc", **more: Any) -> pb.GenerateResponse:
    spec = pb.GenerationSpec(text=text, stop=pb.StopCriteria(max_tokens=3), **more)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    response: pb.GenerateResponse = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    return response


def health_call(channel: grpc.Channel, method: str, request: Any, response: str) -> Any:
    kind = channel.unary_stream if method == "Watch" else channel.unary_unary
    call = kind(
        f"/{health.SERVICE}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=getattr(health, response).FromString,
    )
    return call(request, timeout=CALL_SECONDS)


def check(channel: grpc.Channel, name: str) -> int:
    request = health.HealthCheckRequest(service=name)
    return int(health_call(channel, "Check", request, "HealthCheckResponse").status)


# Guard


def test_a_bug_is_an_internal_error_without_its_text_and_the_next_call_works(
    running: RunningService, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    """B102: only that request ends; the text is in the log under the request id."""
    prompts = running.service.backstage.prompts

    async def broken(spec: pb.GenerationSpec) -> list[int]:
        raise RuntimeError("secret text of a bug")

    prompts.ids_of = broken  # type: ignore[method-assign]
    try:
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.RpcError) as raised:
            generate(channel, request_id="unlucky")
    finally:
        del prompts.ids_of
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.message, refusal.reason) == ("INTERNAL", "internal error", "INTERNAL")
    assert refusal.metadata["request_id"] == "unlucky"
    assert "secret text of a bug" in caplog.text
    assert "unlucky" in caplog.text
    assert generate(channel).choices[0].text == "abc"


def test_an_inner_cancel_is_a_lost_worker_not_a_hang(running: RunningService, channel: grpc.Channel) -> None:
    """What the call waited for was cancelled, not the call (grpc/grpc#29248)."""
    import asyncio

    prompts = running.service.backstage.prompts

    async def cancelled(spec: pb.GenerationSpec) -> list[int]:
        raise asyncio.CancelledError

    prompts.ids_of = cancelled  # type: ignore[method-assign]
    try:
        with pytest.raises(grpc.RpcError) as raised:
            generate(channel)
    finally:
        del prompts.ids_of
    assert (Refusal.of(raised.value).code, Refusal.of(raised.value).reason) == ("UNAVAILABLE", "WORKER_LOST")


def test_one_request_whose_text_breaks_does_not_touch_the_others(
    running: RunningService, channel: grpc.Channel
) -> None:
    """B102 at the detokenizer: its call ends, its pages go back, the other stream goes on."""
    from service.text.detokenizer import Detokenizer

    class Broken(Detokenizer):
        def push(self, token_ids: Any) -> str:
            raise RuntimeError("no text")

    tokenizer = running.service.backstage.prompts.tokenizer
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    spec = pb.GenerationSpec(text="abcd", stop=pb.StopCriteria(max_tokens=400), labels={"fake.hold_at": "9"})
    other = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    next(other)
    tokenizer.detokenizer = lambda **_: Broken([])  # type: ignore[method-assign]
    try:
        with pytest.raises(grpc.RpcError) as raised:
            generate(channel, "xyz", labels={"fake.step_ms": "2"})
    finally:
        del tokenizer.detokenizer
    assert Refusal.of(raised.value).reason == "INTERNAL"
    running.worker.let_go()
    assert list(other)[-1].summary.usage.completion_tokens == 400


# Telemetry


def test_calls_are_counted_by_method_and_status(
    running: RunningService, channel: grpc.Channel, wait_until: Any
) -> None:
    labels = {
        "grpc_type": "unary",
        "grpc_service": "kvatlas.v1.GenerationService",
        "grpc_method": "Generate",
    }
    before = {
        code: running.value("grpc_server_handled_total", grpc_code=code, **labels)
        for code in ("OK", "INVALID_ARGUMENT")
    }
    started = running.value("grpc_server_started_total", **labels)
    generate(channel)
    with pytest.raises(grpc.RpcError):
        generate(channel, "")

    def handled(code: str) -> float:
        return running.value("grpc_server_handled_total", grpc_code=code, **labels) - before[code]

    wait_until(lambda: (handled("OK"), handled("INVALID_ARGUMENT")) == (1, 1), "both to be counted")
    assert running.value("grpc_server_started_total", **labels) == started + 2


def test_each_call_leaves_one_line_with_its_id_and_status(
    running: RunningService, channel: grpc.Channel, caplog: pytest.LogCaptureFixture, wait_until: Any
) -> None:
    with caplog.at_level(logging.INFO, logger="service.access"):
        generate(channel, "abc", request_id="logged")
        check(channel, "")
        wait_until(lambda: "request=logged" in caplog.text, "the access line")
    lines = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    (line,) = lines
    assert "method=/kvatlas.v1.GenerationService/Generate" in line
    assert "code=OK" in line


def test_what_clients_send_makes_no_series(running: RunningService, channel: grpc.Channel) -> None:
    """Request ids, models and methods are no labels."""

    def count() -> int:
        metrics = running.service.backstage.metrics.registry.collect()
        return sum(len(metric.samples) for metric in metrics)

    def bother(number: int) -> None:
        spec = pb.GenerationSpec(text="a", request_id=f"id-{number}", model=f"model-{number}")
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
        unknown = channel.unary_unary(f"/some.Service/Method{number}")
        with pytest.raises(grpc.RpcError):
            unknown(b"", timeout=CALL_SECONDS)

    bother(-1)
    before = count()
    for number in range(100):
        bother(number)
    assert count() == before


# Health


def test_health_answers_for_each_name(channel: grpc.Channel) -> None:
    assert check(channel, "") == health.SERVING
    assert check(channel, "kvatlas.v1.GenerationService") == health.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        check(channel, "no.such.Service")
    assert Refusal.of(raised.value).code == "NOT_FOUND"


def test_health_list_has_all_names(channel: grpc.Channel) -> None:
    answer = health_call(channel, "List", health.HealthListRequest(), "HealthListResponse")
    assert set(answer.statuses) == set(NAMES)


def test_a_watch_of_an_unknown_name_says_so_and_stays_open(channel: grpc.Channel) -> None:
    watch = health_call(channel, "Watch", health.HealthCheckRequest(service="x"), "HealthCheckResponse")
    assert next(watch).status == health.SERVICE_UNKNOWN
    assert not watch.done()
    watch.cancel()


def test_health_follows_the_worker(tmp_path: Any, wait_until: Any) -> None:
    """Red within 3 s of a loss, green after the restart; the process itself stays green."""
    with running_service(tmp_path) as running, grpc.insecure_channel(running.address) as channel:
        request = health.HealthCheckRequest(service="kvatlas.v1.GenerationService")
        watch = health_call(channel, "Watch", request, "HealthCheckResponse")
        assert next(watch).status == health.SERVING
        running.worker.stop()
        assert next(watch).status == health.NOT_SERVING
        assert check(channel, "") == health.SERVING
        ready = urllib.request.Request(running.metrics_url + "/readyz")
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(ready, timeout=CALL_SECONDS)
        assert raised.value.code == 503
        raised.value.close()
        running.worker.start()
        assert next(watch).status == health.SERVING
        watch.cancel()


def test_a_loading_worker_is_not_served_from(tmp_path: Any, wait_until: Any) -> None:
    script = WorkerScript(state=server_pb2.SERVER_STATE_STARTING)
    with (
        running_service(tmp_path, script=script, ready=False) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        wait_until(lambda: running.service.backstage.pool.links[0].is_up, "the worker's welcome")
        assert check(channel, "kvatlas.v1.GenerationService") == health.NOT_SERVING
        info = server_pb2_grpc.ServerServiceStub(channel)
        state = info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS).state
        assert state == server_pb2.SERVER_STATE_STARTING
        script.state = server_pb2.SERVER_STATE_SERVING
        wait_until(
            lambda: check(channel, "kvatlas.v1.GenerationService") == health.SERVING, "the worker to be warm"
        )


# Reflection


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_the_services_and_describes_them(channel: grpc.Channel, version: str) -> None:
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvatlas.v1.GenerationService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Symbol"),
    ]
    listed, generation, healthy, unknown = call(iter(requests), timeout=CALL_SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        "kvatlas.v1.GenerationService",
        "kvatlas.v1.CacheService",
        "kvatlas.v1.ServerService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert generation.file_descriptor_response.file_descriptor_proto
    assert healthy.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


# ServerService


def test_server_info_tells_the_limits_that_are_checked(channel: grpc.Channel) -> None:
    info = server_pb2_grpc.ServerServiceStub(channel).GetServerInfo(
        server_pb2.GetServerInfoRequest(), timeout=5
    )
    limits = info.limits
    assert (limits.max_context_tokens, limits.max_prompt_tokens, limits.max_samples) == (4096, 4095, 16)
    assert (limits.max_request_bytes, limits.max_logprobs, limits.max_watches) == (4 * 1024 * 1024, 20, 64)
    assert (limits.default_deadline.seconds, limits.max_deadline.seconds) == (600, 3600)
    assert (limits.max_queued_requests, limits.max_running_sequences) == (512, 64)
    assert list(info.features) == ["prefix_cache"]
    assert info.instance_id == "service-under-test"
    assert info.state == server_pb2.SERVER_STATE_SERVING


def test_models_are_listed_and_found_by_id(channel: grpc.Channel) -> None:
    stub = server_pb2_grpc.ServerServiceStub(channel)
    (model,) = stub.ListModels(server_pb2.ListModelsRequest(), timeout=CALL_SECONDS).models
    assert (model.model_id, model.defaults.temperature) == ("toy", 1.0)
    for model_id in ("", "toy"):
        assert (
            stub.GetModel(server_pb2.GetModelRequest(model_id=model_id), timeout=CALL_SECONDS).model == model
        )
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetModel(server_pb2.GetModelRequest(model_id="other"), timeout=CALL_SECONDS)
    assert Refusal.of(raised.value).reason == "MODEL_NOT_FOUND"
    with pytest.raises(grpc.RpcError) as raised:
        stub.ListModels(server_pb2.ListModelsRequest(cursor="x"), timeout=CALL_SECONDS)
    assert Refusal.of(raised.value).paths == ("cursor",)


def test_load_counts_what_runs_and_what_waits(
    running: RunningService, channel: grpc.Channel, wait_until: Any
) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    info = server_pb2_grpc.ServerServiceStub(channel)

    def call(**labels: str) -> Any:
        spec = pb.GenerationSpec(text="abcd", stop=pb.StopCriteria(max_tokens=4000))
        spec.labels.update({f"fake.{name}": value for name, value in labels.items()})
        return stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)

    runs, waits = call(hold_at="5"), call(wait_ms="600000")
    next(runs)

    def load() -> server_pb2.Load:
        found: server_pb2.Load = info.GetLoad(server_pb2.GetLoadRequest(), timeout=CALL_SECONDS).load
        return found

    wait_until(lambda: (load().active_requests, load().waiting_requests) == (2, 1), "both to be counted")
    wait_until(lambda: load().workers[0].running_sequences == 1, "the worker's heartbeat")
    assert load().workers[0].waiting_requests == 1
    wait_until(lambda: load().age.ToMilliseconds() < 2000, "news of the worker")
    runs.cancel()
    waits.cancel()
    wait_until(lambda: load().active_requests == 0, "an idle service")


def test_load_is_pushed_at_the_interval_asked_for(channel: grpc.Channel) -> None:
    stub = server_pb2_grpc.ServerServiceStub(channel)
    request = server_pb2.WatchLoadRequest()
    request.interval.FromMilliseconds(100)
    watch = stub.WatchLoad(request, timeout=CALL_SECONDS)
    assert all(next(watch).HasField("load") for _ in range(4))
    watch.cancel()
    request.interval.FromMilliseconds(99)
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.WatchLoad(request, timeout=CALL_SECONDS))
    assert Refusal.of(raised.value).paths == ("interval",)


# The ops port


def test_a_worker_that_came_back_at_another_address_is_told_once(tmp_path: Path, wait_until: Any) -> None:
    """It was told twice under its one name, lost and serving; `kvatlas top` showed the lost one."""
    addresses = tuple(f"ipc://{tmp_path}/engine-{name}" for name in ("0", "new"))
    with (
        running_service(tmp_path, workers=addresses) as service,
        grpc.insecure_channel(service.address) as own,
    ):
        stub: Any = server_pb2_grpc.ServerServiceStub(own)
        service.workers[0].stop()
        moved = ScriptedWorker(addresses[1], "worker-0", WorkerScript()).start()

        def states() -> list[int]:
            load = stub.GetLoad(server_pb2.GetLoadRequest(), timeout=CALL_SECONDS).load
            return [worker.state for worker in load.workers]

        wait_until(lambda: states() == [server_pb2.SERVER_STATE_SERVING], "the worker, once")
        info = stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS)
        assert [worker.worker_id for worker in info.workers] == ["worker-0"]
        moved.stop()


def test_metrics_are_served_in_both_formats(running: RunningService) -> None:
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        request = urllib.request.Request(running.metrics_url + "/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            body = answer.read().decode()
            assert answer.headers["Content-Type"].startswith(accept.partition(";")[0])
        assert 'kvatlas_requests_total{outcome="completed"}' in body
        assert body.endswith("# EOF\n") == ("openmetrics" in accept)
    with urllib.request.urlopen(running.metrics_url + "/metrics", timeout=CALL_SECONDS) as answer:
        families = {family.name for family in text_string_to_metric_families(answer.read().decode())}
    assert {"kvatlas_page_mirror_age_seconds", "kvatlas_page_watchers", "grpc_server_started"} <= families


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 200), ("/etc/passwd", 404)])
def test_probes_are_answered(running: RunningService, path: str, status: int) -> None:
    host, port = running.metrics_url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=CALL_SECONDS)
    connection.request("GET", path)
    assert connection.getresponse().status == status
    connection.close()


def test_the_first_token_of_a_traced_call_is_an_exemplar(
    running: RunningService, channel: grpc.Channel
) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = pb.GenerateRequest(spec=pb.GenerationSpec(text="abc", stop=pb.StopCriteria(max_tokens=2)))
    trace = "0af7651916cd43dd8448eb211c80319c"
    for traceparent in (f"00-{trace}-b7ad6b7169203331-01", "no trace at all"):
        stub.Generate(request, timeout=20, metadata=(("traceparent", traceparent),))
        assert running.worker.adds[-1].traceparent == traceparent
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    with urllib.request.urlopen(
        urllib.request.Request(running.metrics_url + "/metrics", headers=accept), timeout=5
    ) as answer:
        body = answer.read().decode()
    assert f'trace_id="{trace}"' in body


def test_two_services_in_one_process_have_series_of_their_own(tmp_path: Any, running: RunningService) -> None:
    """B112: nothing is registered twice."""
    before = running.value("kvatlas_requests_total", outcome="completed")
    with running_service(tmp_path) as other, grpc.insecure_channel(other.address) as channel:
        generate(channel)
        assert other.value("kvatlas_requests_total", outcome="completed") == 1
    assert running.value("kvatlas_requests_total", outcome="completed") == before


def test_nothing_is_left_of_a_thousand_cancelled_streams(running: RunningService, wait_until: Any) -> None:
    """No growth in tasks, handlers or sequences."""
    import asyncio

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    thread = loop_thread()
    wait_until(lambda: running.is_idle, "idle service and worker")
    before = thread.run(tasks())
    spec = pb.GenerationSpec(
        text="abcd", stop=pb.StopCriteria(max_tokens=4000), labels={"fake.step_ms": "30"}
    )
    with grpc.insecure_channel(running.address) as own:
        stub = generation_pb2_grpc.GenerationServiceStub(own)
        for _ in range(100):
            calls = [
                stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
                for _ in range(10)
            ]
            for call in calls:
                call.cancel()
    wait_until(lambda: running.is_idle, "idle service and worker")
    wait_until(lambda: thread.run(tasks()) <= before + 1, "no task left over")


def test_the_service_needs_no_torch_and_starts_no_process_by_fork() -> None:
    """B109: nothing is forked after grpc was used. M-32: text and clients know nothing of the device."""
    unwanted = ("torch", "multiprocessing.pool", "worker", "kernels")
    code = f"import sys, service.__main__; print([name for name in {unwanted} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=CALL_SECONDS
    )
    assert output.stdout.strip() == "[]"


def test_what_is_asked_again_and_again_leaves_a_line_only_when_it_fails(
    running: RunningService, channel: grpc.Channel, caplog: pytest.LogCaptureFixture, wait_until: Any
) -> None:
    server: Any = server_pb2_grpc.ServerServiceStub(channel)
    with caplog.at_level(logging.INFO, logger="service.access"):
        server.GetLoad(server_pb2.GetLoadRequest(), timeout=20)
        server.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=20)
        raw = channel.unary_unary(
            "/kvatlas.v1.ServerService/GetLoad", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.RpcError):
            raw(b"\xff", timeout=20)
        wait_until(lambda: "code=INVALID_ARGUMENT" in caplog.text, "the failure's line")
    lines = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    assert len(lines) == 1, lines
