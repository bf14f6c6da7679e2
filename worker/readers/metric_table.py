"""The worker's metrics, one row each: name, type, help, labels, buckets, panel.

The source of the registry, of docs/metrics.md and of the dashboards. Knows nothing of how a value is
found; what is not here is not exported.
"""

from kvatlas.metric import Metric, MetricKind
from worker.pages.events import PageEventKind

CHECKS = ("state_sum", "refcount", "free_list", "page_table", "trie", "device_table")
READERS = ("observer", "feed", "recorder")
PHASES = ("prefill", "decode", "mixed")
BANDS = ("ok", "low", "critical", "exhausted")
SEAM_REASONS = ("unknown_key", "handshake")
MEMORY_KINDS = ("weights", "kv_pool", "workspace", "torch_reserved", "free")

STEP_SECONDS = tuple(0.0005 * 2**power for power in range(12))
CHECK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
STEP_TOKENS = tuple(float(2**power) for power in range(15))
STEP_SEQUENCES = tuple(float(2**power) for power in range(11))
AGE_SECONDS = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)
COMPILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
MASK_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0)
USES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
CAPACITIES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 3 / 2, 2.0, 3.0, 4.0, 8.0)
PAGE_SECONDS = tuple(0.1 * 4**power for power in range(12))

GAUGE, COUNTER = MetricKind.GAUGE, MetricKind.COUNTER
HISTOGRAM, INFO = MetricKind.HISTOGRAM, MetricKind.INFO

POOL = (
    Metric(
        "pages",
        GAUGE,
        "KV cache pages, by state; the states are disjoint.",
        "Page pool",
        {"state": ("free", "active", "cached", "pinned", "reserved")},
        panel="pages/Pages by state",
    ),
    Metric(
        "pages_capacity",
        GAUGE,
        "All pages, the dummy page included: the sum of kvatlas_pages.",
        "Page pool",
        panel="pages/Pools",
    ),
    Metric(
        "pages_watermark",
        GAUGE,
        "Available pages below which admission stops.",
        "Page pool",
        panel="pages/Available pages and watermark; rows",
    ),
    Metric(
        "page_size_tokens", GAUGE, "Tokens of one page.", "Page pool", excuse="constant; pool_info shows it"
    ),
    Metric(
        "page_size_bytes",
        GAUGE,
        "Bytes of one page over all layers and ranks.",
        "Page pool",
        panel="pages/Pools",
    ),
    Metric(
        "token_slots",
        GAUGE,
        "Slots of active pages; unfilled is internal fragmentation.",
        "Page pool",
        {"state": ("filled", "unfilled")},
        panel="pages/Slots of active pages",
    ),
    Metric(
        "pages_shared",
        GAUGE,
        "Active pages with two or more references.",
        "Page pool",
        panel="pages/Sharing",
    ),
    Metric(
        "page_references",
        GAUGE,
        "References to pages by live sequences; pins do not count.",
        "Page pool",
        panel="pages/Sharing",
    ),
    Metric(
        "page_table_rows",
        GAUGE,
        "Rows of the page table, without the dummy row.",
        "Page pool",
        {"state": ("used", "free")},
        panel="pages/Available pages and watermark; rows",
    ),
    Metric(
        "page_events",
        COUNTER,
        "Page events by kind; their sum is the revision of the page map.",
        "Page pool",
        {"event": tuple(kind.name.lower() for kind in PageEventKind)},
        panel="pages/Allocated, revived, freed, copied",
    ),
    Metric(
        "page_evictions",
        COUNTER,
        "Pages taken out of the prefix cache, by reason.",
        "Page pool",
        {"reason": ("capacity", "flush")},
        panel="pages/Evictions by reason",
    ),
    Metric(
        "page_allocation_failures",
        COUNTER,
        "Decisions that found no page even after eviction.",
        "Page pool",
        panel="pages/Preemptions, failed allocations",
    ),
    Metric(
        "pool_pressure_seconds",
        COUNTER,
        "Time by available (free and cached) pages: ok 20 % or more of the pool, low less, critical below the"
        " watermark, exhausted none. Adds up to the uptime.",
        "Page pool",
        {"band": BANDS},
        panel="pages/Time under pressure",
    ),
    Metric(
        "page_lifetime_seconds",
        HISTOGRAM,
        "Allocation of a page to its end: freed, or evicted from the prefix cache.",
        "Page pool",
        {"end": ("freed", "evicted")},
        AGE_SECONDS,
        panel="pages/Reuse gap; page lifetime",
    ),
    Metric(
        "page_idle_before_eviction_seconds",
        HISTOGRAM,
        "Last use of a page to its eviction for want of pages; short: useful pages are evicted.",
        "Page pool",
        buckets=AGE_SECONDS,
        panel="pages/Idle before eviction",
    ),
    Metric(
        "page_reuse_gap_seconds",
        HISTOGRAM,
        "Between two uses of a cached page, at a prefix hit.",
        "Page pool",
        buckets=AGE_SECONDS,
        panel="pages/Reuse gap; page lifetime",
    ),
    Metric(
        "page_uses_at_eviction",
        HISTOGRAM,
        "Prefix hits that an evicted page had served; the bottom bucket was cached for nothing.",
        "Page pool",
        buckets=USES,
        panel="pages/Hits a page had served when evicted",
    ),
    Metric(
        "page_reuse_distance_pages",
        HISTOGRAM,
        "Pages used since the last use of a page that a prompt wants again (LRU stack distance), evicted ones"
        " included as far back as a bounded list reaches; estimated from a sample of pages by fingerprint.",
        "Page pool",
        buckets=CAPACITIES,
        bucket_unit="usable pages of the pool",
        panel="pages/Hit rate by pool size",
    ),
    Metric(
        "prefix_tokens",
        COUNTER,
        "Looked-up prompt tokens by result, at first admission; a miss counts as evicted only as far back"
        " as the bounded list of evicted pages reaches.",
        "Page pool",
        {"result": ("hit", "miss_cold", "miss_evicted", "unaligned")},
        panel="pages/Looked-up tokens by result",
    ),
    Metric(
        "pool",
        INFO,
        "The pool as labels: worker, model, page_size, dtype, layers, kv_heads, head_dim, layout, device.",
        "Page pool",
        panel="pages/Pools",
    ),
)

INTEGRITY = (
    Metric(
        "integrity_checks",
        COUNTER,
        "Invariants checked under load, by result.",
        "Integrity and feed",
        {"check": CHECKS, "result": ("pass", "fail")},
        panel="pages/Checks",
    ),
    Metric(
        "integrity_last_success_timestamp_seconds",
        GAUGE,
        "Unix time of the last round in which every check passed; 0: none yet.",
        "Integrity and feed",
        panel="pages/Age of the last pass; length of a round",
    ),
    Metric(
        "integrity_check_seconds",
        HISTOGRAM,
        "Length of one round of checks.",
        "Integrity and feed",
        buckets=CHECK_SECONDS,
        panel="pages/Age of the last pass; length of a round",
    ),
    Metric(
        "page_events_dropped",
        COUNTER,
        "Page events that a reader lost; the observer rebuilds from a snapshot.",
        "Integrity and feed",
        {"reader": READERS},
        panel="pages/Watchers; lost events",
    ),
)

ENGINE = (
    Metric(
        "requests_running",
        GAUGE,
        "Requests of which at least one sequence has a row.",
        "Engine",
        panel="serving/Running, and waiting by reason",
    ),
    Metric(
        "requests_waiting",
        GAUGE,
        "Accepted requests without a row, by what they wait for.",
        "Engine",
        {"reason": ("pages", "rows", "step_tokens", "priority", "other")},
        panel="serving/Running, and waiting by reason",
    ),
    Metric(
        "preemptions",
        COUNTER,
        "Sequences that lost their pages, by mode.",
        "Engine",
        {"mode": ("recompute", "swap")},
        panel="pages/Preemptions, failed allocations",
    ),
    Metric(
        "preempted_tokens",
        COUNTER,
        "Tokens whose KV was given up by preemption.",
        "Engine",
        panel="pages/Preemptions, failed allocations",
    ),
    Metric(
        "step_seconds",
        HISTOGRAM,
        "One forward pass, by phase.",
        "Engine",
        {"phase": PHASES},
        STEP_SECONDS,
        panel="serving/Step time by phase",
    ),
    Metric(
        "step_tokens",
        HISTOGRAM,
        "Tokens computed in a step.",
        "Engine",
        buckets=STEP_TOKENS,
        panel="serving/Tokens, sequences a step",
    ),
    Metric(
        "step_sequences",
        HISTOGRAM,
        "Sequences in a step.",
        "Engine",
        buckets=STEP_SEQUENCES,
        panel="serving/Tokens, sequences a step",
    ),
    Metric(
        "step_graphs",
        COUNTER,
        "Steps by how the device was driven: replayed from a CUDA graph, or eager, as always on a CPU.",
        "Engine",
        {"result": ("replayed", "eager")},
        panel="serving/Idle; eager steps",
    ),
    Metric(
        "constraint_lookups",
        COUNTER,
        "Constraints of requests: hit was compiled before and kept, miss was compiled.",
        "Engine",
        {"result": ("hit", "miss")},
        excuse="what constraints cost, for whoever uses them",
    ),
    Metric(
        "constraint_compile_seconds",
        HISTOGRAM,
        "Time to compile a constraint, beside the engine.",
        "Engine",
        buckets=COMPILE_SECONDS,
        excuse="what constraints cost, for whoever uses them",
    ),
    Metric(
        "constraint_mask_seconds",
        HISTOGRAM,
        "Time to find the tokens that a constraint allows next, beside the forward pass, by row.",
        "Engine",
        buckets=MASK_SECONDS,
        excuse="what constraints cost, for whoever uses them",
    ),
    Metric(
        "scheduler_idle_seconds",
        COUNTER,
        "Time in which there was nothing to run.",
        "Engine",
        panel="serving/Idle; eager steps",
    ),
    Metric(
        "request_page_seconds",
        HISTOGRAM,
        "KvBill.page_seconds of a finished request: pages times seconds held, shared pages split.",
        "Engine",
        buckets=PAGE_SECONDS,
        panel="serving/KV bill",
    ),
    Metric(
        "gpu_memory_bytes",
        GAUGE,
        "Memory of the GPU by use; workspace is what torch holds beside weights and pool, torch_reserved what"
        " its allocator keeps in reserve. 0 without a GPU.",
        "Engine",
        {"kind": MEMORY_KINDS},
        panel="serving/GPU memory",
    ),
    Metric(
        "link_sequence_mismatches",
        COUNTER,
        "Heartbeats of services whose count of live sequences lastingly differs from ours.",
        "Engine",
        panel="serving/Must stay at 0",
    ),
    Metric(
        "seam_refused",
        COUNTER,
        "Connections to a tcp socket that were refused: a key that is not known, or a handshake without any.",
        "Engine",
        {"reason": SEAM_REASONS},
        panel="serving/Must stay at 0",
    ),
    Metric(
        "build",
        INFO,
        "Release of this process as labels: version, commit, python.",
        "Engine",
        panel="pages/Pools",
    ),
)

TABLE: tuple[Metric, ...] = POOL + INTEGRITY + ENGINE
"""Every metric of the worker, in the order of the exposition."""
