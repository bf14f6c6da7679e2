"""The dashboard of the server: requests, latencies, the engine, streams."""

from deploy.grafana.board import Board, Panel, PanelKind, Query, Row
from deploy.grafana.promql import S, W, in_range, increases, quantile, quantiles, rate, share, total

REQUESTS = "kvatlas_requests_total"
TTFT = "kvatlas_time_to_first_token_seconds"
GRAPHS = "kvatlas_step_graphs_total"
OUTCOME_COLOURS = {
    "completed": "hit",
    "cancelled": "miss_cold",
    "deadline": "critical",
    "rejected": "low",
    "failed": "exhausted",
}

HEALTH = Row(
    "Health",
    (
        Panel(
            "TTFT p99, worst process",
            "Time from the call to its first token; an estimate between two bucket edges.",
            "s",
            (Query(f"max(kvatlas:ttft_seconds:p99_rate5m{{{S}}})"),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (1.0, "critical"), (5.0, "exhausted")),
        ),
        Panel(
            "ITL p99, worst process",
            "Time between two messages of a stream.",
            "s",
            (Query(f"max(kvatlas:itl_seconds:p99_rate5m{{{S}}})"),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (0.2, "critical"), (1.0, "exhausted")),
        ),
        Panel(
            "Running",
            "Requests of which at least one sequence is being computed.",
            "short",
            (Query(f"sum(kvatlas_requests_running{{{W}}})"),),
            PanelKind.STAT,
        ),
        Panel(
            "Waiting",
            "Requests that wait, on workers and for one.",
            "short",
            (Query("sum(kvatlas_requests_waiting)"),),
            PanelKind.STAT,
        ),
        Panel(
            "Failed share",
            "Requests that ended in an error of ours.",
            "percentunit",
            (Query(share(total(rate(REQUESTS, f'{S},outcome="failed"')), total(rate(REQUESTS, S)))),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (0.001, "critical"), (0.01, "exhausted")),
        ),
        Panel(
            "Budget burn, 1 h",
            "How many times too fast first tokens later than 1 s use up the budget of 1 % in 30 days.",
            "suffix: times",
            (Query("kvatlas:ttft_slow:ratio_rate1h / 0.01"),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (1.0, "critical"), (14.4, "exhausted")),
        ),
    ),
)

LOAD = Row(
    "Requests",
    (
        Panel(
            "Running, and waiting by reason",
            "What computes and what waits for pages, rows, a step's tokens, its turn or a worker.",
            "short",
            (
                Query(f"sum(kvatlas_requests_running{{{W}}})", "running"),
                Query("sum by (reason) (kvatlas_requests_waiting)", "waiting: {{reason}}"),
            ),
            width=6,
            is_stacked=True,
            colours={"running": "active"},
        ),
        Panel(
            "Ended by outcome",
            "Requests a second, each counted once, at its end.",
            "reqps",
            (Query(total(rate(REQUESTS, S), "outcome"), "{{outcome}}"),),
            width=6,
            is_stacked=True,
            colours=OUTCOME_COLOURS,
        ),
        Panel(
            "Tokens",
            "Tokens a second, out and in.",
            "short",
            (
                Query(total(rate("kvatlas_generated_tokens_total", S)), "generated"),
                Query(total(rate("kvatlas_prompt_tokens_total", S)), "prompt"),
            ),
            width=6,
        ),
        Panel(
            "Length of requests",
            "Tokens of a request: its prompt, what of it was cached, its output.",
            "short",
            (
                *quantiles("kvatlas_request_prompt_tokens", S, "prompt"),
                *quantiles("kvatlas_request_cached_tokens", S, "cached"),
                *quantiles("kvatlas_request_generated_tokens", S, "generated"),
            ),
            width=6,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From the call to its first token; a dot is a request with a trace.",
            "s",
            quantiles(TTFT, S, has_exemplars=True),
        ),
        Panel(
            "Distribution of time to first token",
            "How many first tokens came within each bucket.",
            "s",
            (Query(increases(TTFT, S, "le"), "{{le}}"),),
            PanelKind.HEAT_MAP,
        ),
        Panel(
            "Queue; prefill",
            "From the call to its admission, and from there to the first token.",
            "s",
            (
                *quantiles("kvatlas_request_queue_seconds", S, "queue"),
                *quantiles("kvatlas_request_prefill_seconds", S, "prefill"),
            ),
        ),
        Panel(
            "Between messages; per output token",
            "Time between two messages of a stream, and per token even where messages merge.",
            "s",
            (
                *quantiles("kvatlas_inter_token_latency_seconds", S, "message"),
                *quantiles("kvatlas_request_time_per_output_token_seconds", S, "token"),
            ),
            width=12,
        ),
        Panel(
            "Whole request",
            "The 99th percentile of receive to end, by outcome.",
            "s",
            (Query(quantile(0.99, "kvatlas_request_duration_seconds", S, "outcome"), "{{outcome}} p99"),),
            width=12,
            colours={f"{outcome} p99": colour for outcome, colour in OUTCOME_COLOURS.items()},
        ),
    ),
)

ENGINE = Row(
    "Engine",
    (
        Panel(
            "Step time by phase",
            "One forward pass, of prompts, of single tokens, or of both.",
            "s",
            (
                Query(quantile(0.5, "kvatlas_step_seconds", W, "phase"), "{{phase}} p50"),
                Query(quantile(0.99, "kvatlas_step_seconds", W, "phase"), "{{phase}} p99"),
            ),
        ),
        Panel(
            "Tokens, sequences a step",
            "Size of a step; larger ones use the device better.",
            "short",
            (
                *quantiles("kvatlas_step_tokens", W, "tokens"),
                *quantiles("kvatlas_step_sequences", W, "sequences"),
            ),
        ),
        Panel(
            "Idle; eager steps",
            "Share of time with nothing to run, and of steps outside a CUDA graph: all of them on a CPU.",
            "percentunit",
            (
                Query(f"avg({rate('kvatlas_scheduler_idle_seconds_total', W)})", "idle"),
                Query(
                    share(total(rate(GRAPHS, f'{W},result="eager"')), total(rate(GRAPHS, W))), "eager steps"
                ),
            ),
            max=1.0,
        ),
        Panel(
            "GPU memory",
            "What holds the memory of the GPU; 0 without one.",
            "bytes",
            (Query(f"sum by (kind) (kvatlas_gpu_memory_bytes{{{W}}})", "{{kind}}"),),
            width=12,
            is_stacked=True,
        ),
        Panel(
            "KV bill",
            "Page-seconds of a finished request: what its memory cost, shared pages split.",
            "none",
            quantiles("kvatlas_request_page_seconds", W),
            width=12,
        ),
    ),
)

STREAMS = Row(
    "Streams",
    (
        Panel(
            "Merged messages; tokens waiting",
            "Messages saved a second since a reader was late, and on the right tokens that wait for readers.",
            "ops",
            (
                Query(total(rate("kvatlas_stream_merges_total", S)), "merged"),
                Query(f"sum(kvatlas_stream_queue_tokens{{{S}}})", "tokens waiting", "short"),
            ),
        ),
        Panel(
            "Stalled writes; slow readers",
            "Time in writes that readers stalled, a second, and on the right calls ended as SLOW_READER.",
            "s",
            (
                Query(total(rate("kvatlas_stream_send_blocked_seconds_total", S)), "stalled"),
                Query(total(rate("kvatlas_stream_slow_readers_total", S)), "slow readers", "ops"),
            ),
        ),
        Panel(
            "Resumes; gap; tokens found",
            "Streams that moved to another worker, how long they stood still, and how their KV came.",
            "ops",
            (
                Query(total(rate("kvatlas_resumes_total", S), "reason"), "resumed: {{reason}}"),
                *(
                    Query(query.expr, query.legend, "s")
                    for query in quantiles("kvatlas_resume_gap_seconds", S, "gap")
                ),
                Query(total(rate("kvatlas_resume_prefix_tokens_total", S), "result"), "tokens {{result}}"),
            ),
        ),
        Panel(
            "Calls by code",
            "gRPC calls a second by method and status, and on the right how long they take.",
            "reqps",
            (
                Query(
                    total(rate("grpc_server_handled_total", S), "grpc_method, grpc_code"),
                    "{{grpc_method}} {{grpc_code}}",
                ),
                Query(total(rate("grpc_server_started_total", S)), "started"),
                *(
                    Query(query.expr, query.legend, "s")
                    for query in quantiles("grpc_server_handling_seconds", S, "call")
                ),
            ),
            width=16,
        ),
        Panel(
            "Must stay at 0",
            "Disagreements of service and worker about live sequences; auth files that could not be read;"
            " connections between service and worker that their keys forbade.",
            "none",
            (
                Query(in_range("kvatlas_link_sequence_mismatches_total", W), "sequence mismatches"),
                Query(in_range("kvatlas_auth_reload_failures_total", S), "failed auth reloads"),
                Query(in_range("kvatlas_seam_refused_total", W), "strangers at workers"),
                Query(in_range("kvatlas_seam_handshakes_failed_total", S), "failed handshakes"),
            ),
            PanelKind.STAT,
            height=8,
            steps=((0.0, "hit"), (0.001, "exhausted")),
        ),
    ),
)

BOARD = Board(
    "kvatlas-serving",
    "kvatlas: serving",
    "Requests, latencies, the engine and streams.",
    (HEALTH, LOAD, LATENCY, ENGINE, STREAMS),
)
