"""This process's series: requests, tokens, latencies as a client feels them, streams, resumes, gRPC calls.

Owns a registry of its own, passed in, so that two services in one process never meet. Every label set is
closed and present at 0 from the first scrape; children are kept, since labels() costs three times an inc().
Numbers with the mark "at scrape" are read from their owner by a function then. Ratios exist only in rules.
"""

import platform
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics

from service.request import LostReason

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITL_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
E2E_BUCKETS = tuple(0.01 * 2**k for k in range(16))
GAP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MAX_TOKEN_EDGE = 131_072
TOKEN_BUCKETS = tuple(
    float(step * 10**power) for power in range(6) for step in (1, 2, 5) if step * 10**power <= MAX_TOKEN_EDGE
)
OUTCOMES = ("completed", "cancelled", "deadline", "rejected", "failed")


class ServiceMetrics:
    """The series of one service process; empty buckets mean the lists above."""

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
        self._e2e_buckets = tuple(e2e_buckets) or E2E_BUCKETS
        self._requests(tuple(ttft_buckets) or TTFT_BUCKETS, tuple(itl_buckets) or ITL_BUCKETS)
        self._streams()
        self._resumes()
        self._calls()
        build = Info("kvatlas_build", "Release of this process.", registry=registry)
        build.info({"version": version, "commit": commit, "python": platform.python_version()})

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _histogram(
        self, name: str, help: str, edges: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(name, help, labels, buckets=edges, registry=self.registry)

    def _requests(self, ttft: Sequence[float], itl: Sequence[float]) -> None:
        outcomes = self._counter(
            "kvatlas_requests_total",
            "Requests at their end, one each; rejected: never admitted.",
            ["outcome"],
        )
        durations = self._histogram(
            "kvatlas_request_duration_seconds", "Receive to end.", self._e2e_buckets, ["outcome"]
        )
        self.requests = {outcome: outcomes.labels(outcome) for outcome in OUTCOMES}
        self.duration = {outcome: durations.labels(outcome) for outcome in OUTCOMES}
        self.prompt_tokens = self._counter(
            "kvatlas_prompt_tokens_total", "Prompt tokens, counted as requests are admitted."
        )
        self.generated_tokens = self._counter(
            "kvatlas_generated_tokens_total", "Output tokens, counted as they leave."
        )
        self.ttft = self._histogram("kvatlas_time_to_first_token_seconds", "Receive to first send.", ttft)
        self.itl = self._histogram(
            "kvatlas_inter_token_latency_seconds",
            "Between two sends of one sequence, preemption and resume included; one observation a message.",
            itl,
        )
        self.time_per_token = self._histogram(
            "kvatlas_request_time_per_output_token_seconds",
            "(end - first token) / (tokens - 1) of a request's longest sample.",
            itl,
        )
        self.queue = self._histogram("kvatlas_request_queue_seconds", "Receive to admission.", ttft)
        self.prefill = self._histogram("kvatlas_request_prefill_seconds", "Admission to first token.", ttft)
        self.request_prompt_tokens = self._histogram(
            "kvatlas_request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self.request_cached_tokens = self._histogram(
            "kvatlas_request_cached_tokens",
            "Prompt tokens of a request found in the cache.",
            (0.0, *TOKEN_BUCKETS),
        )
        self.request_generated_tokens = self._histogram(
            "kvatlas_request_generated_tokens", "Output tokens of a request, all samples.", TOKEN_BUCKETS
        )
        waiting = Gauge(
            "kvatlas_requests_waiting",
            "Requests that no worker has taken yet.",
            ["reason"],
            registry=self.registry,
        )
        self.waiting = waiting.labels("worker")

    def _streams(self) -> None:
        self.merges = self._counter(
            "kvatlas_stream_merges_total", "Messages saved since tokens were joined for a late reader."
        )
        self.queue_tokens = Gauge(
            "kvatlas_stream_queue_tokens", "Tokens waiting in mailboxes.", registry=self.registry
        )
        self.send_blocked = self._counter(
            "kvatlas_stream_send_blocked_seconds_total", "Time in writes that a reader stalled."
        )
        self.slow_readers = self._counter("kvatlas_stream_slow_readers_total", "Calls ended as SLOW_READER.")

        watchers = Gauge(
            "kvatlas_page_watchers", "Open WatchPageMap calls.", ["mode"], registry=self.registry
        )
        self.page_watchers = {mode: watchers.labels(mode) for mode in ("state", "events")}
        self.page_watch_lagged = self._counter(
            "kvatlas_page_watch_lagged_total", "Readers of page events that fell behind the ring."
        )

    def _resumes(self) -> None:
        resumes = self._counter(
            "kvatlas_resumes_total",
            "Sequences that moved to another worker, or to its next life.",
            ["reason"],
        )
        self.resumes = {reason: resumes.labels(reason.value) for reason in LostReason}
        self.resume_gap = self._histogram(
            "kvatlas_resume_gap_seconds", "Loss of a worker to admission elsewhere.", GAP_BUCKETS
        )
        prefix = self._counter(
            "kvatlas_resume_prefix_tokens_total",
            "Tokens of resumed sequences, by how their KV came.",
            ["result"],
        )
        self.resume_hit, self.resume_computed = prefix.labels("hit"), prefix.labels("computed")

    def _calls(self) -> None:
        labels = ["grpc_type", "grpc_service", "grpc_method"]
        self.calls_started = self._counter("grpc_server_started_total", "Calls that began.", labels)
        self.calls_handled = self._counter(
            "grpc_server_handled_total", "Calls that ended, by status.", [*labels, "grpc_code"]
        )
        self.call_seconds = self._histogram(
            "grpc_server_handling_seconds", "Time of a call.", self._e2e_buckets, labels
        )

    def read_at_scrape(self, *, queue_tokens: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Says where two gauges come from; the functions run on the scraping thread and only read."""
        self.queue_tokens.set_function(queue_tokens)
        self.waiting.set_function(waiting)
