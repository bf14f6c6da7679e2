"""The dashboard of the page pool: what holds memory, what is found again, what is evicted too early."""

from deploy.grafana.board import Board, Panel, PanelKind, Query, Row
from deploy.grafana.promql import S, W, in_range, increases, quantile, quantiles, rate, share, total

PREFIX = "kvatlas_prefix_tokens_total"
DISTANCE = "kvatlas_page_reuse_distance_pages"
PRESSURE = "kvatlas_pool_pressure_seconds_total"

# The share of reused pages that a pool of `le` pages would have found, times the share of whole-page
# tokens ever seen before.
WHAT_IF = (
    f'sum by (le) (rate({DISTANCE}_bucket{{{W},le!="+Inf"}}[30m]))'
    f" / ignoring (le) group_left () (sum(rate({DISTANCE}_count{{{W}}}[30m])) > 0)"
    f' * ignoring (le) group_left () (sum(rate({PREFIX}{{{W},result=~"hit|miss_evicted"}}[30m]))'
    f" / (sum(rate({PREFIX}{{{W}}}[30m])) > 0))"
)

HEALTH = Row(
    "Health",
    (
        Panel(
            "Available, worst worker",
            "Free and cached pages over usable ones: what admission can use.",
            "percentunit",
            (Query(f"min(kvatlas:pages_available:ratio{{{W}}})"),),
            PanelKind.STAT,
            steps=((0.0, "exhausted"), (0.01, "critical"), (0.2, "hit")),
        ),
        Panel(
            "Prefix hits",
            "Share of looked-up prompt tokens whose KV was there.",
            "percentunit",
            (Query(share(total(rate(PREFIX, f'{W},result="hit"')), total(rate(PREFIX, W)))),),
            PanelKind.STAT,
            steps=((0.0, "miss_cold"), (0.01, "hit")),
        ),
        Panel(
            "Regret",
            "Share of looked-up prompt tokens whose KV had been evicted before they were asked for again.",
            "percentunit",
            (Query(share(total(rate(PREFIX, f'{W},result="miss_evicted"')), total(rate(PREFIX, W)))),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (0.05, "critical"), (0.1, "exhausted")),
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their pages, a second; their tokens are computed twice.",
            "ops",
            (Query(total(rate("kvatlas_preemptions_total", W))),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (0.001, "critical"), (0.1, "exhausted")),
        ),
        Panel(
            "Failed checks in range",
            "Invariants of the pool that did not hold; any is a reason to act.",
            "none",
            (Query(in_range("kvatlas_integrity_checks_total", f'{W},result="fail"')),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (0.001, "exhausted")),
        ),
        Panel(
            "Oldest mirror",
            "Age of the oldest copy of a worker's pages that a service keeps.",
            "s",
            (Query(f"max(kvatlas_page_mirror_age_seconds{{{S}}})"),),
            PanelKind.STAT,
            steps=((0.0, "hit"), (3.0, "critical"), (5.0, "exhausted")),
        ),
        Panel(
            "Pools",
            "Every worker's pool: its geometry, pages and bytes; releases of all processes.",
            "bytes",
            (
                Query(f"kvatlas_pool_info{{{W}}}"),
                Query(f"kvatlas_pages_capacity{{{W}}} * on (instance) kvatlas_page_size_bytes{{{W}}}"),
                Query("kvatlas_build_info"),
            ),
            PanelKind.TABLE,
            width=24,
            height=6,
            columns={
                "instance": "Process",
                "worker": "Worker",
                "model": "Model",
                "page_size": "Tokens a page",
                "dtype": "KV type",
                "layers": "Layers",
                "kv_heads": "KV heads",
                "head_dim": "Head size",
                "device": "Device",
                "Value #B": "Pool",
                "version": "Release",
                "commit": "Commit",
            },
            links=(("Live page map", "${dashboard}/?worker=${__data.fields.Worker}"),),
        ),
    ),
)

POOL = Row(
    "Page pool",
    (
        Panel(
            "Pages by state",
            "Every page is in one state; the top of the stack is the capacity.",
            "short",
            (Query(f"sum by (state) (kvatlas_pages{{{W}}})", "{{state}}"),),
            is_stacked=True,
            colours={state: state for state in ("active", "pinned", "cached", "free", "reserved")},
            links=(("Page map at this time", "${dashboard}/?t=${__value.time}"),),
        ),
        Panel(
            "Slots of active pages",
            "Slots with and without a token; unfilled ones are fragmentation, on the right its share.",
            "short",
            (
                Query(f"sum by (state) (kvatlas_token_slots{{{W}}})", "{{state}}"),
                Query(
                    share(
                        f'sum(kvatlas_token_slots{{{W},state="unfilled"}})',
                        f"sum(kvatlas_token_slots{{{W}}})",
                    ),
                    "share unfilled",
                    "percentunit",
                ),
            ),
            colours={"filled": "active", "unfilled": "miss_cold", "share unfilled": "critical"},
        ),
        Panel(
            "Sharing",
            "References per active page, where 1 is nothing shared, and on the right the pages that are.",
            "none",
            (
                Query(
                    share(
                        f"sum(kvatlas_page_references{{{W}}})", f'sum(kvatlas_pages{{{W},state="active"}})'
                    ),
                    "references per active page",
                ),
                Query(f"sum(kvatlas_pages_shared{{{W}}})", "shared pages", "short"),
            ),
        ),
        Panel(
            "Allocated, revived, freed, copied",
            "Page events a second.",
            "ops",
            (
                Query(
                    total(
                        rate("kvatlas_page_events_total", f'{W},event=~"allocated|revived|freed|copied"'),
                        "event",
                    ),
                    "{{event}}",
                ),
            ),
        ),
        Panel(
            "Evictions by reason",
            "Cached pages given up a second, for want of room or by order.",
            "ops",
            (Query(total(rate("kvatlas_page_evictions_total", W), "reason"), "{{reason}}"),),
            colours={"capacity": "miss_evicted", "flush": "miss_cold"},
        ),
        Panel(
            "Time under pressure",
            "Share of time in each band of available pages; a scrape can miss an exhaustion, this cannot.",
            "percentunit",
            (
                Query(
                    total(rate(PRESSURE, f'{W},band!="ok"'), "band")
                    + " / ignoring (band) group_left () "
                    + total(rate(PRESSURE, W)),
                    "{{band}}",
                ),
            ),
            is_stacked=True,
            max=1.0,
            colours={band: band for band in ("low", "critical", "exhausted")},
        ),
        Panel(
            "Preemptions, failed allocations",
            "Sequences that lost their pages and decisions that found none; on the right tokens given up.",
            "ops",
            (
                Query(total(rate("kvatlas_preemptions_total", W), "mode"), "preempted: {{mode}}"),
                Query(total(rate("kvatlas_page_allocation_failures_total", W)), "failed allocations"),
                Query(total(rate("kvatlas_preempted_tokens_total", W)), "tokens given up", "short"),
            ),
        ),
        Panel(
            "Available pages and watermark; rows",
            "Free and cached pages over the watermark of admission, and rows of the page table.",
            "short",
            (
                Query(f'sum(kvatlas_pages{{{W},state=~"free|cached"}})', "available pages"),
                Query(f"sum(kvatlas_pages_watermark{{{W}}})", "watermark"),
                Query(f"sum by (state) (kvatlas_page_table_rows{{{W}}})", "rows {{state}}"),
            ),
            colours={"available pages": "cached", "watermark": "critical"},
        ),
    ),
)

PREFIX_CACHE = Row(
    "Prefix cache",
    (
        Panel(
            "Looked-up tokens by result",
            "Prompt tokens a second: found, never seen, evicted before, or past the last whole page.",
            "short",
            (Query(total(rate(PREFIX, W), "result"), "{{result}}"),),
            is_stacked=True,
            colours={result: result for result in ("hit", "miss_cold", "miss_evicted", "unaligned")},
        ),
        Panel(
            "Hit rate by pool size",
            "Estimated hit rate of a pool of so many pages (edges are 1/16 to 8 times this one): a curve that"
            " still rises at this pool's size says that memory would help. For one worker, or equal ones.",
            "percentunit",
            (Query(WHAT_IF),),
            PanelKind.BARS,
            max=1.0,
            columns={"le": "Pages", "Value": "Hit rate"},
            colours={"Hit rate": "hit"},
        ),
        Panel(
            "Idle before eviction",
            "How long evicted pages had not been used; short means that useful pages are evicted.",
            "s",
            quantiles("kvatlas_page_idle_before_eviction_seconds", W),
        ),
        Panel(
            "Reuse gap; page lifetime",
            "Time between two uses of a cached page, and median life of a page by its end.",
            "s",
            (
                *quantiles("kvatlas_page_reuse_gap_seconds", W, "reuse gap"),
                Query(quantile(0.5, "kvatlas_page_lifetime_seconds", W, "end"), "life, {{end}}, p50"),
            ),
            width=12,
        ),
        Panel(
            "Hits a page had served when evicted",
            "The bottom row was cached for nothing.",
            "none",
            (Query(increases("kvatlas_page_uses_at_eviction", W, "le"), "{{le}}"),),
            PanelKind.HEAT_MAP,
            width=12,
        ),
    ),
)

INTEGRITY = Row(
    "Integrity and feed",
    (
        Panel(
            "Checks",
            "Invariants checked a second, under load.",
            "ops",
            (
                Query(
                    total(rate("kvatlas_integrity_checks_total", W), "check, result"), "{{check}} {{result}}"
                ),
            ),
            width=6,
        ),
        Panel(
            "Age of the last pass; length of a round",
            "Since every check last passed, on the oldest worker, and on the right how long a round takes.",
            "s",
            (
                Query(f"time() - min(kvatlas_integrity_last_success_timestamp_seconds{{{W}}})", "last pass"),
                *(
                    Query(query.expr, query.legend, "s")
                    for query in quantiles("kvatlas_integrity_check_seconds", W, "round")
                ),
            ),
            width=6,
        ),
        Panel(
            "Mirror age; resyncs",
            "How old each service's copy of a worker's pages is, on the right how often it was made anew.",
            "s",
            (
                Query(f"max by (worker) (kvatlas_page_mirror_age_seconds{{{S}}})", "age of {{worker}}"),
                Query(
                    "sum by (worker, cause) (increase(kvatlas_page_mirror_resyncs_total"
                    f"{{{S}}}[$__rate_interval]))",
                    "resyncs of {{worker}}: {{cause}}",
                    "short",
                ),
            ),
            width=6,
        ),
        Panel(
            "Watchers; lost events",
            "Open watches of the page map, and on the right events a second that readers lost.",
            "short",
            (
                Query(f"sum by (mode) (kvatlas_page_watchers{{{S}}})", "watchers: {{mode}}"),
                Query(
                    total(rate("kvatlas_page_events_dropped_total", W), "reader"), "lost: {{reader}}", "ops"
                ),
                Query(total(rate("kvatlas_page_watch_lagged_total", S)), "watches that fell behind", "ops"),
            ),
            width=6,
        ),
    ),
)

BOARD = Board(
    "kvatlas-pages",
    "kvatlas: pages",
    "The KV cache: every page's state, what is found again, what is evicted too early.",
    (HEALTH, POOL, PREFIX_CACHE, INTEGRITY),
)
