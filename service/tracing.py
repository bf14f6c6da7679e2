"""Traces: a span for each generation with its queue, prefill and decode, sent by OTLP over gRPC.

Owns the exporter, its bounded queue and its thread; whatever becomes of the collector, calls go on. Imported
only where an endpoint is set: a process without one needs neither OpenTelemetry nor time for it. What is in
a span is decided in handlers/spans.py.
Source: W3C Trace Context, level 1; OpenTelemetry's semantic conventions for GenAI, in development.
"""

import logging
import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.handlers.spans import Ending
from service.request import Call

MAX_QUEUED_SPANS = 2048  # about 500 requests; what comes while it is full pushes the oldest out
MAX_BATCH_SPANS = 512
EXPORT_PAUSE_SECONDS = 1.0
EXPORT_SECONDS = 5.0  # for one batch, its retries included
CLOSE_SECONDS = 2.0  # for what is queued at the end

log = logging.getLogger("service.tracing")


class Tracing:
    """Makes and sends the spans of one service process."""

    def __init__(self, endpoint: str, *, ratio: float, instance: str, version: str) -> None:
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_SECONDS
        )
        self._exporter = _ReportingExporter(exporter, endpoint)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource(
                {
                    "service.name": "kvatlas-service",
                    "service.version": version,
                    "service.instance.id": instance,
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=EXPORT_PAUSE_SECONDS * 1000,
                max_export_batch_size=MAX_BATCH_SPANS,
                export_timeout_millis=EXPORT_SECONDS * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("kvatlas.service", version)
        self._context = TraceContextTextMapPropagator()

    def begin(self, call: Call) -> "GenerationTrace | None":
        """Opens the span of a call, below the client's own if its metadata has a valid context.

        The call's context becomes that of the span, so that what follows stands below it. Never raises.
        """
        carrier = {"traceparent": call.traceparent, "tracestate": call.tracestate}
        try:
            parent = self._context.extract(carrier, context=Context())
            span = self._tracer.start_span(
                "generation", parent, kind=trace.SpanKind.SERVER, start_time=call.receive_time_ns
            )
        except Exception:  # a library's or an exporter's failure: a call goes on without a trace
            log.exception("event=trace_failed")
            return None
        opened = GenerationTrace(self._tracer, span, call)
        call.traceparent = opened.traceparent
        return opened

    def close(self) -> None:
        """Sends what is queued, for CLOSE_SECONDS at most. Waits: not for the event loop."""
        flush = threading.Thread(target=self._provider.shutdown, name="kvatlas-traces", daemon=True)
        flush.start()
        flush.join(CLOSE_SECONDS)
        if flush.is_alive():
            log.warning('event=traces_lost why="the collector did not take them in time"')
            self._exporter.shutdown()


class GenerationTrace:
    """The span of one generation that is still running."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, call: Call) -> None:
        self._tracer = tracer
        self._span = span
        self._call = call

    @property
    def traceparent(self) -> str:
        """Trace context to hand on: whoever continues stands below this span."""
        context = self._span.get_span_context()
        trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
        return f"00-{trace_id}-{span_id}-{context.trace_flags:02x}"

    def end(self, ending: Ending) -> None:
        """Writes down what became of it and lets go of it. Never waits, never raises."""
        try:
            self._end(ending)
        except Exception:  # as above: the request has ended well, whatever becomes of its span
            log.exception("event=trace_failed request=%s", self._call.request_id)

    def _end(self, ending: Ending) -> None:
        span = self._span
        if span.is_recording():
            span.update_name(ending.name)
            span.set_attributes(ending.attributes)
            for name, at, attributes in ending.events:
                span.add_event(name, attributes, self._nanoseconds(at))
            if ending.error:
                span.set_status(trace.StatusCode.ERROR, ending.error)
            parent = trace.set_span_in_context(span, Context())
            for phase in ending.phases:
                child = self._tracer.start_span(
                    phase.name,
                    parent,
                    attributes=phase.attributes,
                    start_time=self._nanoseconds(phase.began),
                )
                child.end(self._nanoseconds(phase.ended))
        span.end(self._nanoseconds(ending.at))

    def _nanoseconds(self, at: float) -> int:
        """Unix time of a moment of the monotonic clock."""
        return self._call.receive_time_ns + round((at - self._call.received) * 1e9)


class _ReportingExporter(SpanExporter):
    """Says once that the collector does not answer, and once that it does again."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._num_lost = 0
        # Its own lines come with each retry of each batch, and with each span that is pushed out.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                log.warning("event=trace_export_failed endpoint=%s", self._endpoint)
            self._num_lost += len(spans)
        elif self._num_lost:
            log.info("event=trace_export_recovered endpoint=%s lost=%d", self._endpoint, self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
