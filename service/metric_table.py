"""The service's metrics, one row each: name, type, help, labels, buckets, panel.

The source of the registry, of docs/metrics.md and of the dashboards. Knows nothing of how a value is
found; what is not here is not exported.
"""

from kvatlas.metric import Metric, MetricKind

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITL_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
E2E_SECONDS = tuple(0.01 * 2**k for k in range(16))
GAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MAX_TOKEN_EDGE = 131_072
TOKENS = tuple(
    float(step * 10**power) for power in range(6) for step in (1, 2, 5) if step * 10**power <= MAX_TOKEN_EDGE
)
OUTCOMES = ("completed", "cancelled", "deadline", "rejected", "failed")
RESUME_REASONS = ("crash", "partition", "drain")
SEAM_REASONS = ("key", "handshake")
RESYNC_CAUSES = ("initial", "gap", "epoch")

GAUGE, COUNTER = MetricKind.GAUGE, MetricKind.COUNTER
HISTOGRAM, INFO = MetricKind.HISTOGRAM, MetricKind.INFO

MIRRORS = (
    Metric(
        "page_mirror_age_seconds",
        GAUGE,
        "Since the last message of a worker's page feed, by this process's clock.",
        "Integrity and feed",
        {"worker": ()},
        panel="pages/Mirror age; resyncs",
    ),
    Metric(
        "page_mirror_resyncs",
        COUNTER,
        "Snapshots fetched, by cause: a start, something missed, a new life of the worker.",
        "Integrity and feed",
        {"worker": (), "cause": RESYNC_CAUSES},
        panel="pages/Mirror age; resyncs",
    ),
)

WATCHES = (
    Metric(
        "page_watchers",
        GAUGE,
        "Open WatchPageMap calls.",
        "Integrity and feed",
        {"mode": ("state", "events")},
        panel="pages/Watchers; lost events",
    ),
    Metric(
        "page_watch_lagged",
        COUNTER,
        "Readers of page events that fell behind the ring.",
        "Integrity and feed",
        panel="pages/Watchers; lost events",
    ),
)

REQUESTS = (
    Metric(
        "requests",
        COUNTER,
        "Requests at their end, one each; rejected: never admitted.",
        "Requests and streams",
        {"outcome": OUTCOMES},
        panel="serving/Ended by outcome",
    ),
    Metric(
        "requests_waiting",
        GAUGE,
        "Requests that no worker has taken yet.",
        "Requests and streams",
        {"reason": ("worker",)},
        panel="serving/Running, and waiting by reason",
    ),
    Metric(
        "prompt_tokens",
        COUNTER,
        "Prompt tokens, counted as requests are admitted.",
        "Requests and streams",
        panel="serving/Tokens",
    ),
    Metric(
        "generated_tokens",
        COUNTER,
        "Output tokens, counted as they leave.",
        "Requests and streams",
        panel="serving/Tokens",
    ),
    Metric(
        "time_to_first_token_seconds",
        HISTOGRAM,
        "Receive to first send.",
        "Requests and streams",
        buckets=TTFT_SECONDS,
        panel="serving/Time to first token",
    ),
    Metric(
        "inter_token_latency_seconds",
        HISTOGRAM,
        "Between two sends of one sequence, preemption and resume included; one observation a message.",
        "Requests and streams",
        buckets=ITL_SECONDS,
        panel="serving/Between messages; per output token",
    ),
    Metric(
        "request_time_per_output_token_seconds",
        HISTOGRAM,
        "(end - first token) / (tokens - 1) of a request's longest sample.",
        "Requests and streams",
        buckets=ITL_SECONDS,
        panel="serving/Between messages; per output token",
    ),
    Metric(
        "request_duration_seconds",
        HISTOGRAM,
        "Receive to end.",
        "Requests and streams",
        {"outcome": OUTCOMES},
        E2E_SECONDS,
        panel="serving/Whole request",
    ),
    Metric(
        "request_queue_seconds",
        HISTOGRAM,
        "Receive to admission.",
        "Requests and streams",
        buckets=TTFT_SECONDS,
        panel="serving/Queue; prefill",
    ),
    Metric(
        "request_prefill_seconds",
        HISTOGRAM,
        "Admission to first token.",
        "Requests and streams",
        buckets=TTFT_SECONDS,
        panel="serving/Queue; prefill",
    ),
    Metric(
        "request_prompt_tokens",
        HISTOGRAM,
        "Prompt tokens of a request.",
        "Requests and streams",
        buckets=TOKENS,
        panel="serving/Length of requests",
    ),
    Metric(
        "request_cached_tokens",
        HISTOGRAM,
        "Prompt tokens of a request found in the cache.",
        "Requests and streams",
        buckets=(0.0, *TOKENS),
        panel="serving/Length of requests",
    ),
    Metric(
        "request_generated_tokens",
        HISTOGRAM,
        "Output tokens of a request, all samples.",
        "Requests and streams",
        buckets=TOKENS,
        panel="serving/Length of requests",
    ),
)

STREAMS = (
    Metric(
        "stream_merges",
        COUNTER,
        "Messages saved since tokens were joined for a late reader.",
        "Requests and streams",
        panel="serving/Merged messages; tokens waiting",
    ),
    Metric(
        "stream_queue_tokens",
        GAUGE,
        "Tokens waiting in mailboxes.",
        "Requests and streams",
        panel="serving/Merged messages; tokens waiting",
    ),
    Metric(
        "stream_send_blocked_seconds",
        COUNTER,
        "Time in writes that a reader stalled.",
        "Requests and streams",
        panel="serving/Stalled writes; slow readers",
    ),
    Metric(
        "stream_slow_readers",
        COUNTER,
        "Calls ended as SLOW_READER.",
        "Requests and streams",
        panel="serving/Stalled writes; slow readers",
    ),
    Metric(
        "resumes",
        COUNTER,
        "Sequences that moved to another worker, or to its next life.",
        "Requests and streams",
        {"reason": RESUME_REASONS},
        panel="serving/Resumes; gap; tokens found",
    ),
    Metric(
        "resume_gap_seconds",
        HISTOGRAM,
        "Loss of a worker to admission elsewhere.",
        "Requests and streams",
        buckets=GAP_SECONDS,
        panel="serving/Resumes; gap; tokens found",
    ),
    Metric(
        "resume_prefix_tokens",
        COUNTER,
        "Tokens of resumed sequences, by how their KV came.",
        "Requests and streams",
        {"result": ("hit", "computed")},
        panel="serving/Resumes; gap; tokens found",
    ),
    Metric(
        "auth_reload_failures",
        COUNTER,
        "Reloads of the auth file that did not parse; the old one stays in force.",
        "Requests and streams",
        panel="serving/Must stay at 0",
    ),
    Metric(
        "seam_handshakes_failed",
        COUNTER,
        "Connections to workers that their keys forbade: the worker does not know ours, or has another one.",
        "Requests and streams",
        {"reason": SEAM_REASONS},
        panel="serving/Must stay at 0",
    ),
)

_CALL = {"grpc_type": (), "grpc_service": (), "grpc_method": ()}

CALLS = (
    Metric(
        "grpc_server_started",
        COUNTER,
        "Calls that began.",
        "Calls",
        _CALL,
        panel="serving/Calls by code",
        prefix="",
    ),
    Metric(
        "grpc_server_handled",
        COUNTER,
        "Calls that ended, by status.",
        "Calls",
        {**_CALL, "grpc_code": ()},
        panel="serving/Calls by code",
        prefix="",
    ),
    Metric(
        "grpc_server_handling_seconds",
        HISTOGRAM,
        "Time of a call.",
        "Calls",
        _CALL,
        E2E_SECONDS,
        panel="serving/Calls by code",
        prefix="",
    ),
    Metric(
        "build",
        INFO,
        "Release of this process as labels: version, commit, python.",
        "Calls",
        panel="pages/Pools",
    ),
)

TABLE: tuple[Metric, ...] = MIRRORS + WATCHES + REQUESTS + STREAMS + CALLS
"""Every metric of the service, in the order of docs/metrics.md."""
