"""Spans of generations as a real OTLP collector gets them, what happens without one, and no text in any."""

import logging
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc
from service.config import ConfigError, ServiceConfig
from service.request import sampled_trace_id, trace_id_of
from service.testing import Refusal, RunningService, running_service
from service.testing_worker import WorkerScript
from service.tracing import MAX_QUEUED_SPANS, Tracing

ROOT = Path(__file__).resolve().parents[2]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SECRETS = ("horse battery staple", "STOP-HERE", "label-of-a-client", "salt-of-a-client")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector on a port of its own, which keeps what it gets."""

    def __init__(self) -> None:
        self.received: list[otlp.ExportTraceServiceRequest] = []
        self.gate = Event()  # while it is not set, exports are not answered
        self.gate.set()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> otlp.ExportTraceServiceResponse:
        self.gate.wait(600)
        self.received.append(request)
        return otlp.ExportTraceServiceResponse()

    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.received)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self.gate.set()
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def generate(
    running: RunningService, context: str = "", text: str = "abc", **more: Any
) -> pb.GenerateResponse:
    spec = {"text": text, "stop": pb.StopCriteria(max_tokens=3), **more}
    metadata = (("traceparent", context),) if context else ()
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(spec=pb.GenerationSpec(**spec))
        response: pb.GenerateResponse = stub.Generate(request, timeout=120, metadata=metadata)
        return response


def traced(tmp_path: Path, endpoint: str, **config: Any) -> Any:
    script = config.pop("script", WorkerScript(step_ms=2, wait_ms=20))
    return running_service(tmp_path, script=script, otlp_endpoint=endpoint, **config)


def attributes(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


def by_name(spans: list[Span]) -> dict[str, Span]:
    names = [span.name for span in spans]
    assert len(names) == len(set(names)), names
    return dict(zip(names, spans, strict=True))


def test_a_generation_is_a_span_with_queue_prefill_and_decode_below_the_clients(
    tmp_path: Path, collector: Collector, wait_until: Any
) -> None:
    with traced(tmp_path, collector.endpoint) as running:
        before = time.time_ns()
        response = generate(running, SAMPLED, text="abcdefghijklmnopqrstuvwxyz", request_id="traced-1")
        after = time.time_ns()
        wait_until(lambda: len(collector.spans()) >= 4, "the spans")
        handed_on = running.worker.adds[-1].traceparent
    spans = by_name(collector.spans())
    assert set(spans) == {"text_completion toy", "queue", "prefill", "decode"}
    root = spans["text_completion toy"]
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == PARENT
    assert root.kind == Span.SPAN_KIND_SERVER
    assert handed_on == f"00-{TRACE}-{root.span_id.hex()}-01", "the worker continues below our span"
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent_span_id == root.span_id
        assert spans[name].trace_id == root.trace_id
    queue, prefill, decode = spans["queue"], spans["prefill"], spans["decode"]
    times = [root.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano]
    times += [prefill.start_time_unix_nano, prefill.end_time_unix_nano, decode.start_time_unix_nano]
    times += [decode.end_time_unix_nano, root.end_time_unix_nano]
    assert times == sorted(times)
    assert before - 50e6 < times[0]
    assert times[-1] < after + 50e6
    assert queue.end_time_unix_nano - queue.start_time_unix_nano >= 15e6, "the worker's queue took 20 ms"
    said = attributes(root)
    usage = response.usage
    assert said["gen_ai.usage.input_tokens"] == usage.prompt_tokens == 26
    assert said["gen_ai.usage.output_tokens"] == usage.completion_tokens == 3
    assert said["gen_ai.usage.cache_read.input_tokens"] == usage.prefix.hit_tokens == 16
    assert said["gen_ai.response.id"] == "traced-1"
    assert said["gen_ai.response.finish_reasons"] == ["max_tokens"]
    assert said["kvatlas.outcome"] == "completed"
    assert said["kvatlas.worker"] == "worker-0"
    assert said["kvatlas.page_seconds"] == 1.5
    assert root.status.code == Status.STATUS_CODE_UNSET
    resource = {
        pair.key: pair.value.string_value
        for pair in collector.received[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "kvatlas-service"


def test_names_are_those_of_the_conventions(tmp_path: Path, collector: Collector, wait_until: Any) -> None:
    """A name that the conventions do not have would be found by nobody; our own begin with kvatlas."""
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    with traced(tmp_path, collector.endpoint) as running:
        generate(running)
        wait_until(lambda: len(collector.spans()) >= 4, "the spans")
    for span in collector.spans():
        for name in attributes(span):
            assert name in known or name.startswith("kvatlas.") or name == "error.type", name


def test_no_text_and_nothing_that_a_client_wrote_is_in_a_span(
    tmp_path: Path, collector: Collector, wait_until: Any
) -> None:
    prompt, stop, label, salt = SECRETS
    with traced(tmp_path, collector.endpoint) as running:
        for broken in ("0", "1"):
            labels = {"note": label} | ({"fake.fail_at": "2"} if broken == "1" else {})
            more = {"stop": pb.StopCriteria(max_tokens=30, stop_strings=[stop]), "labels": labels}
            try:
                generate(running, text=prompt, cache=pb.CacheOptions(salt=salt), **more)
            except grpc.RpcError:
                assert broken == "1"
        # How many spans a failed one has depends on whether its tokens came before the failure.
        wait_until(lambda: len(roots(collector)) == 2, "the spans")
    payload = b"".join(request.SerializeToString() for request in collector.received)
    assert b"text_completion" in payload
    for secret in SECRETS:
        assert secret.encode() not in payload, secret
    assert b"horse" not in payload


def roots(collector: Collector) -> list[Span]:
    """Of generations that have ended, each behind the spans below it."""
    return [span for span in collector.spans() if not span.parent_span_id]


def spans_by_error(collector: Collector) -> dict[str, list[set[str]]]:
    """Names of the spans below each failed generation that has ended, by its reason."""
    traces: dict[bytes, list[Span]] = {}
    for span in collector.spans():
        traces.setdefault(span.trace_id, []).append(span)
    found: dict[str, list[set[str]]] = {}
    for spans in traces.values():
        for root in (span for span in spans if not span.parent_span_id):
            assert root.status.code == Status.STATUS_CODE_ERROR
            found.setdefault(attributes(root)["error.type"], []).append(
                {span.name for span in spans} - {root.name}
            )
    return found


def test_a_failure_says_its_reason_and_how_far_it_came(
    tmp_path: Path, collector: Collector, wait_until: Any
) -> None:
    def refused(running: RunningService, labels: dict[str, str]) -> str:
        with pytest.raises(grpc.RpcError) as raised:
            generate(running, labels=labels)
        return str(Refusal.of(raised.value).reason)

    def have_ended(count: int) -> bool:
        return len(spans_by_error(collector).get("INTERNAL", [])) == count

    with traced(tmp_path, collector.endpoint) as running:
        assert refused(running, {"fake.status": "QUEUE_FULL"}) == "QUEUE_FULL"
        wait_until(lambda: spans_by_error(collector) == {"QUEUE_FULL": [{"queue"}]}, "the spans")
        failed: list[set[str]] = []
        # A token and the failure behind it may arrive together: then no token was seen, and none is told.
        while {"queue", "prefill", "decode"} not in failed:
            assert all(names == {"queue", "prefill"} for names in failed)
            assert len(failed) < 20
            assert refused(running, {"fake.fail_at": "1"}) == "INTERNAL"
            wait_until(partial(have_ended, len(failed) + 1), "the spans")
            failed = spans_by_error(collector)["INTERNAL"]


def test_another_worker_is_an_event_of_the_span(
    tmp_path: Path, collector: Collector, wait_until: Any
) -> None:
    script = WorkerScript(step_ms=2, drain_at=1)
    with traced(tmp_path, collector.endpoint, num_workers=2, script=script) as running:
        assert generate(running).usage.resumes == 1
        wait_until(lambda: len(collector.spans()) >= 4, "the spans")
    [root] = roots(collector)
    [event] = root.events
    assert event.name == "moved"
    assert {pair.key: pair.value.string_value for pair in event.attributes}["reason"] == "drain"
    assert root.start_time_unix_nano < event.time_unix_nano < root.end_time_unix_nano


def test_a_client_that_is_not_sampled_gets_no_span_and_no_exemplar(
    tmp_path: Path, collector: Collector, wait_until: Any
) -> None:
    with traced(tmp_path, collector.endpoint) as running:
        generate(running, UNSAMPLED)
        assert running.worker.adds[-1].traceparent.startswith(f"00-{TRACE}-")
        assert running.worker.adds[-1].traceparent.endswith("-00")
        generate(running)
        wait_until(lambda: collector.spans(), "the span of the second call")
    assert TRACE not in {span.trace_id.hex() for span in collector.spans()}


def test_the_log_and_the_exemplar_name_the_trace(
    tmp_path: Path, collector: Collector, wait_until: Any
) -> None:
    """The service's own process: its log goes through set_up, which a test's capture does not."""
    code = (
        "import logging, sys\n"
        "from service import log\n"
        "from service.__main__ import _log_context\n"
        "from service.request import Call, current_call\n"
        "log.set_up('info', _log_context)\n"
        "logging.getLogger('service').info('event=before')\n"
        f"current_call.set(Call('m', traceparent='{SAMPLED}'))\n"
        "logging.getLogger('service').info('event=within')\n"
        "current_call.set(Call('m', traceparent='trace=forged'))\n"
        "logging.getLogger('service').info('event=forged')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    before, within, forged = done.stderr.splitlines()
    assert within.endswith(f"event=within trace={TRACE}")
    assert "trace=" not in before
    assert "trace=" not in forged
    with traced(tmp_path, collector.endpoint) as running:
        generate(running)
        wait_until(lambda: len(collector.spans()) >= 4, "the spans")
        ours = roots(collector)[0].trace_id.hex()
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        request = urllib.request.Request(running.metrics_url + "/metrics", headers=accept)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert f'trace_id="{ours}"' in answer.read().decode()


def test_a_collector_that_is_gone_or_stuck_hurts_no_call_and_no_end(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture, free_port: Any
) -> None:
    """Calls go on, what is queued is bounded, the end waits two seconds at most."""
    collector.gate.clear()
    with caplog.at_level(logging.WARNING):
        for endpoint in (f"http://127.0.0.1:{free_port()}", collector.endpoint):
            folder = tmp_path / endpoint.rpartition(":")[2]
            folder.mkdir()
            with traced(folder, endpoint, script=WorkerScript(step_ms=0)) as running:
                for _ in range(5):
                    generate(running)  # the collector answers after its deadline
                ended = time.monotonic()
            assert time.monotonic() - ended < 60
    assert collector.spans() == []
    lines = [record for record in caplog.records if record.name == "service.tracing"]
    assert 2 <= len(lines) <= 6, "each endpoint is named, and not with every retry"


def test_the_queue_of_spans_is_bounded(collector: Collector) -> None:
    collector.gate.clear()
    tracing = Tracing(collector.endpoint, ratio=1.0, instance="test", version="0")
    try:
        for _ in range(MAX_QUEUED_SPANS + 2000):
            tracing._tracer.start_span("span").end()
        [processor] = tracing._provider._active_span_processor._span_processors
        queue = processor._batch_processor._queue  # type: ignore[attr-defined]
        assert len(queue) <= MAX_QUEUED_SPANS
    finally:
        collector.gate.set()
        tracing.close()


@pytest.mark.parametrize(
    ("context", "trace_id", "sampled"),
    [
        (SAMPLED, TRACE, TRACE),
        (UNSAMPLED, TRACE, ""),
        (f"ff-{TRACE}-{PARENT}-01", "", ""),
        (f"00-{'0' * 32}-{PARENT}-01", "", ""),
        (f"00-{TRACE}-{'0' * 16}-01", "", ""),
        (SAMPLED.upper(), "", ""),
        (SAMPLED + "\nevent=forged", "", ""),
        ("", "", ""),
    ],
)
def test_only_a_valid_context_has_a_trace_id(context: str, trace_id: str, sampled: str) -> None:
    assert trace_id_of(context) == trace_id
    assert sampled_trace_id(context) == sampled


def test_a_context_that_a_client_made_up_starts_a_trace_of_its_own(
    tmp_path: Path, collector: Collector, wait_until: Any
) -> None:
    with traced(tmp_path, collector.endpoint) as running:
        generate(running, "00-not-a-trace-01")
        wait_until(lambda: len(collector.spans()) >= 4, "the spans")
    assert all(len(span.trace_id) == 16 and any(span.trace_id) for span in collector.spans())


def test_without_an_endpoint_nothing_is_imported_and_nothing_is_made() -> None:
    code = (
        "import sys, service.server, service.__main__\n"
        "from service.config import from_args\n"
        "assert service.server._tracing(from_args([], {})) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_preemption_on_a_real_worker_is_an_event_of_the_span(
    start_server: Any, collector: Collector, wait_until: Any, hold: Any
) -> None:
    """Through all processes: a pool too small for what runs, and the wait of who lost its pages."""
    server = start_server(
        *("--runner", "fake", "--model", "random:tiny", "--num-pages", "12", *hold.settings),
        *("--set-service", f"otlp_endpoint={collector.endpoint}"),
    )
    stop = pb.StopCriteria(max_tokens=100, min_tokens=100)
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        requests = [
            pb.GenerateRequest(spec=pb.GenerationSpec(text=f"{number} abc", stop=stop)) for number in range(4)
        ]
        calls = [stub.Generate.future(request, timeout=120) for request in requests]
        info = server_pb2_grpc.ServerServiceStub(channel)

        def running() -> int:
            load = info.GetLoad(server_pb2.GetLoadRequest(), timeout=120).load
            return int(load.workers[0].running_sequences) + int(load.workers[0].waiting_requests)

        wait_until(lambda: running() == 4, "all four on the worker")
        hold.off()
        responses = [call.result() for call in calls]
    preempted = sum(response.usage.kv.preemptions for response in responses)
    assert preempted > 0
    wait_until(lambda: len(collector.spans()) >= 16, "the spans")
    ended = roots(collector)
    events = [event for root in ended for event in root.events]
    assert [event.name for event in events] == ["readmitted"] * preempted
    assert all(attributes(event)["waited_seconds"] > 0.0 for event in events)
    assert sum(attributes(root)["kvatlas.preemptions"] for root in ended) == preempted


def test_an_endpoint_without_the_extra_or_without_a_scheme_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="neither http:// nor https://"):
        ServiceConfig(otlp_endpoint="collector:4317")
    code = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "import service.server\n"
        "from service.config import ServiceConfig\n"
        "try:\n"
        "    service.server._tracing(ServiceConfig(otlp_endpoint='http://collector:4317'))\n"
        "except service.config.ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "otlp_endpoint: needs OpenTelemetry: pip install 'kvatlas[tracing]'", (
        done.stderr
    )
