"""This process's series: requests, tokens, latencies as a client feels them, streams, resumes, gRPC calls.

Made from metric_table.py. Owns a registry of its own, passed in, so that two services in one process
never meet. Every label set is closed and present at 0 from the first scrape; series of calls come with the
first call of a method. Children are kept, since labels() costs three times an inc(). Two gauges are read
from their owners at a scrape. Ratios exist only in rules.
"""

import platform
from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from kvatlas.metric import Metric, MetricKind
from service.metric_table import CALLS, REQUESTS, STREAMS, TABLE, WATCHES
from service.request import LostReason

Family = TypeVar("Family", bound=MetricWrapperBase)

_ROWS = {row.name: row for row in TABLE}
_KINDS: dict[MetricKind, type[MetricWrapperBase]] = {
    MetricKind.GAUGE: Gauge,
    MetricKind.COUNTER: Counter,
    MetricKind.INFO: Info,
}
_TTFT = ("time_to_first_token_seconds",)
_ITL = ("inter_token_latency_seconds", "request_time_per_output_token_seconds")
_E2E = ("request_duration_seconds", "grpc_server_handling_seconds")


class ServiceMetrics:
    """The series of one service process; empty buckets mean those of the table."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        version: str,
        commit: str,
        ttft_buckets: Sequence[float] = (),
        itl_buckets: Sequence[float] = (),
        e2e_buckets: Sequence[float] = (),
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        chosen = ((_TTFT, ttft_buckets), (_ITL, itl_buckets), (_E2E, e2e_buckets))
        self._edges = {name: tuple(edges) for names, edges in chosen for name in names if edges}
        self._families = {row.name: self._make(row) for row in (*WATCHES, *REQUESTS, *STREAMS, *CALLS)}
        self._requests()
        self._streams()
        self._resumes()
        self.calls_started = self._family("grpc_server_started", Counter)
        self.calls_handled = self._family("grpc_server_handled", Counter)
        self.call_seconds = self._family("grpc_server_handling_seconds", Histogram)
        build = {"version": version, "commit": commit, "python": platform.python_version()}
        self._family("build", Info).info(build)

    def _make(self, row: Metric) -> MetricWrapperBase:
        labels = list(row.labels)
        if row.kind is MetricKind.HISTOGRAM:
            edges = self._edges.get(row.name, row.buckets)
            made: MetricWrapperBase = Histogram(
                row.family, row.help, labels, buckets=edges, registry=self.registry
            )
        else:
            made = _KINDS[row.kind](row.family, row.help, labels, registry=self.registry)
        if labels:
            for values in product(*row.labels.values()):  # none where the running process knows the values
                made.labels(*values)
        return made

    def _family(self, name: str, kind: type[Family]) -> Family:
        family = self._families[name]
        assert isinstance(family, kind), f"{name} is a {type(family).__name__}"
        return family

    def _children(self, name: str, kind: type[Family]) -> dict[str, Family]:
        """Those of a family with one label, by its value."""
        family = self._family(name, kind)
        (values,) = _ROWS[name].labels.values()
        return {value: family.labels(value) for value in values}

    def _requests(self) -> None:
        self.requests = self._children("requests", Counter)
        self.duration = self._children("request_duration_seconds", Histogram)
        self.prompt_tokens = self._family("prompt_tokens", Counter)
        self.generated_tokens = self._family("generated_tokens", Counter)
        self.ttft = self._family("time_to_first_token_seconds", Histogram)
        self.itl = self._family("inter_token_latency_seconds", Histogram)
        self.time_per_token = self._family("request_time_per_output_token_seconds", Histogram)
        self.queue = self._family("request_queue_seconds", Histogram)
        self.prefill = self._family("request_prefill_seconds", Histogram)
        self.request_prompt_tokens = self._family("request_prompt_tokens", Histogram)
        self.request_cached_tokens = self._family("request_cached_tokens", Histogram)
        self.request_generated_tokens = self._family("request_generated_tokens", Histogram)
        self._waiting = self._children("requests_waiting", Gauge)["worker"]

    def _streams(self) -> None:
        self.merges = self._family("stream_merges", Counter)
        self._queue_tokens = self._family("stream_queue_tokens", Gauge)
        self.send_blocked = self._family("stream_send_blocked_seconds", Counter)
        self.slow_readers = self._family("stream_slow_readers", Counter)
        self.page_watchers = self._children("page_watchers", Gauge)
        self.page_watch_lagged = self._family("page_watch_lagged", Counter)
        self.auth_reload_failures = self._family("auth_reload_failures", Counter)
        self.seam_failures = self._children("seam_handshakes_failed", Counter)  # by reason

    def _resumes(self) -> None:
        by_value = self._children("resumes", Counter)
        self.resumes = {reason: by_value[reason.value] for reason in LostReason}
        self.resume_gap = self._family("resume_gap_seconds", Histogram)
        tokens = self._children("resume_prefix_tokens", Counter)
        self.resume_hit, self.resume_computed = tokens["hit"], tokens["computed"]

    def read_at_scrape(self, *, queue_tokens: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Says where two gauges come from; the functions run on the scraping thread and only read."""
        self._queue_tokens.set_function(queue_tokens)
        self._waiting.set_function(waiting)
