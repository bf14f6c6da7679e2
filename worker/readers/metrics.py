"""The worker's series: one table of names, one collector, one snapshot.

Gauges that must add up come from one frozen MetricsView, which the observer replaces each turn; a
scrape computes nothing from the engine. Names, label sets and buckets are those of docs/metrics.md and
are present at 0 from the first scrape.
"""

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, product

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from worker.description import VERSION, WorkerDescription
from worker.pages.events import PageEventKind
from worker.stats import EngineCounts, PoolTotals, StepStats, WaitReason

CHECKS = ("state_sum", "refcount", "free_list", "page_table", "trie", "device_table")
READERS = ("observer", "feed", "recorder")
PHASES = ("prefill", "decode", "mixed")
STEP_SECONDS = tuple(0.0005 * 2**power for power in range(12))
CHECK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
STEP_TOKENS = tuple(float(2**power) for power in range(15))
STEP_SEQUENCES = tuple(float(2**power) for power in range(11))

Samples = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric family; `labels` has the closed set of values of each label."""

    name: str  # without kvatlas_, counters without _total
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


GAUGE, COUNTER, HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily

SERIES = (
    Series(
        "pages",
        GAUGE,
        "KV cache pages, by state; the states are disjoint.",
        {"state": ("free", "active", "cached", "pinned", "reserved")},
    ),
    Series("pages_capacity", GAUGE, "All pages, the dummy page included: the sum of kvatlas_pages."),
    Series("pages_watermark", GAUGE, "Available pages below which admission stops."),
    Series("page_size_tokens", GAUGE, "Tokens of one page."),
    Series("page_size_bytes", GAUGE, "Bytes of one page over all layers and ranks."),
    Series(
        "token_slots",
        GAUGE,
        "Slots of active pages; unfilled is internal fragmentation.",
        {"state": ("filled", "unfilled")},
    ),
    Series("pages_shared", GAUGE, "Active pages with two or more references."),
    Series("page_references", GAUGE, "References to pages by live sequences; pins do not count."),
    Series(
        "page_table_rows",
        GAUGE,
        "Rows of the page table, without the dummy row.",
        {"state": ("used", "free")},
    ),
    Series(
        "page_events",
        COUNTER,
        "Page events by kind; their sum is the revision of the page map.",
        {"event": tuple(kind.name.lower() for kind in PageEventKind)},
    ),
    Series(
        "page_evictions",
        COUNTER,
        "Pages taken out of the prefix cache, by reason.",
        {"reason": ("capacity", "flush")},
    ),
    Series("page_allocation_failures", COUNTER, "Decisions that found no page even after eviction."),
    Series(
        "prefix_tokens",
        COUNTER,
        "Looked-up prompt tokens by result, at first admission; a miss counts as evicted only as far back"
        " as the bounded list of evicted pages reaches.",
        {"result": ("hit", "miss_cold", "miss_evicted", "unaligned")},
    ),
    Series(
        "integrity_checks",
        COUNTER,
        "Invariants checked under load, by result.",
        {"check": CHECKS, "result": ("pass", "fail")},
    ),
    Series(
        "integrity_last_success_timestamp_seconds",
        GAUGE,
        "Unix time of the last round in which every check passed; 0: none yet.",
    ),
    Series("integrity_check_seconds", HISTOGRAM, "Length of one round of checks.", buckets=CHECK_SECONDS),
    Series(
        "page_events_dropped",
        COUNTER,
        "Page events that a reader lost; the observer rebuilds from a snapshot.",
        {"reader": READERS},
    ),
    Series("requests_running", GAUGE, "Requests of which at least one sequence has a row."),
    Series(
        "requests_waiting",
        GAUGE,
        "Accepted requests without a row, by what they wait for.",
        {"reason": ("pages", "rows", "step_tokens", "priority", "other")},
    ),
    Series(
        "preemptions", COUNTER, "Sequences that lost their pages, by mode.", {"mode": ("recompute", "swap")}
    ),
    Series("preempted_tokens", COUNTER, "Tokens whose KV was given up by preemption."),
    Series("step_seconds", HISTOGRAM, "One forward pass, by phase.", {"phase": PHASES}, STEP_SECONDS),
    Series("step_tokens", HISTOGRAM, "Tokens computed in a step.", buckets=STEP_TOKENS),
    Series("step_sequences", HISTOGRAM, "Sequences in a step.", buckets=STEP_SEQUENCES),
    Series("scheduler_idle_seconds", COUNTER, "Time in which there was nothing to run."),
    Series(
        "link_sequence_mismatches",
        COUNTER,
        "Heartbeats of services whose count of live sequences lastingly differs from ours.",
    ),
)


class Buckets:
    """A histogram that one thread fills and others read as a frozen copy."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def frozen(self) -> tuple[tuple[int, ...], float]:
        """Counts by bucket, not yet accumulated, and the sum of all values."""
        return tuple(self._counts), self._sum


@dataclass(frozen=True, slots=True)
class MetricsView:
    """Everything a scrape shows, as of one turn of the observer."""

    counts: EngineCounts
    pool: PoolTotals
    events_by_kind: tuple[int, ...]  # by number of the kind
    flush_evictions: int
    rows_used: int
    idle_seconds: float
    checks: Mapping[tuple[str, ...], int]  # (check, result)
    last_success_seconds: float  # Unix time; 0: none yet
    dropped: Mapping[str, int]  # by reader
    histograms: Mapping[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], float]]


class StepMeter:
    """Histograms of steps and of audit rounds, filled by the observer."""

    def __init__(self) -> None:
        self._seconds = {phase: Buckets(STEP_SECONDS) for phase in PHASES}
        self._tokens = Buckets(STEP_TOKENS)
        self._sequences = Buckets(STEP_SEQUENCES)
        self._checks = Buckets(CHECK_SECONDS)

    def step(self, step: StepStats) -> None:
        """One step that ended."""
        self._seconds[step.phase].observe(step.seconds)
        self._tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self._sequences.observe(step.num_sequences)

    def check(self, seconds: float) -> None:
        """One round of the audit."""
        self._checks.observe(seconds)

    def frozen(self) -> dict[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], float]]:
        """All histograms by name and label values."""
        histograms: dict[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], float]]
        histograms = {("step_seconds", (phase,)): self._seconds[phase].frozen() for phase in PHASES}
        histograms["step_tokens", ()] = self._tokens.frozen()
        histograms["step_sequences", ()] = self._sequences.frozen()
        histograms["integrity_check_seconds", ()] = self._checks.frozen()
        return histograms


def first_view(pool: PoolTotals) -> MetricsView:
    """What a worker shows before the observer's first turn."""
    no_checks: dict[tuple[str, ...], int] = {
        (check, result): 0 for check in CHECKS for result in ("pass", "fail")
    }
    return MetricsView(
        EngineCounts(),
        pool,
        (0,) * 16,
        0,
        0,
        0.0,
        no_checks,
        0.0,
        dict.fromkeys(READERS, 0),
        StepMeter().frozen(),
    )


class WorkerCollector(Collector):
    """All series of the worker, from one view per scrape. Registers itself with the registry it is given."""

    def __init__(
        self,
        registry: CollectorRegistry,
        description: WorkerDescription,
        *,
        view: Callable[[], MetricsView],
        mismatches: Callable[[], int],
        watermark_pages: int,
    ) -> None:
        self._description = description
        self._view = view
        self._mismatches = mismatches
        self._watermark_pages = watermark_pages
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Names alone: a registry refuses a second collector of the same series (B112)."""
        for series in SERIES:
            yield series.kind("kvatlas_" + series.name, series.help, labels=list(series.labels))
        yield InfoMetricFamily("kvatlas_pool", "")
        yield InfoMetricFamily("kvatlas_build", "")

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        view = self._view()
        samples = self._samples(view)
        for series in SERIES:
            yield _family(series, samples.get(series.name, {}), view)
        yield self._pool_info()
        build = InfoMetricFamily("kvatlas_build", "Release of this process.")
        build.add_metric([], {"version": VERSION, "commit": "", "python": platform.python_version()})
        yield build

    def _samples(self, view: MetricsView) -> dict[str, Samples]:
        counts, pool, shape = view.counts, view.pool, self._description.pool
        waiting = {reason.name.lower(): number for reason, number in view.counts.waiting_by_reason.items()}
        waiting["other"] = waiting.pop(WaitReason.NONE.name.lower(), 0)
        capacity = shape.num_pages + pool.reserved_pages
        return {
            "pages": {
                ("free",): pool.free_pages,
                ("active",): pool.active_pages,
                ("cached",): pool.cached_pages,
                ("pinned",): pool.pinned_pages,
                ("reserved",): pool.reserved_pages,
            },
            "pages_capacity": {(): capacity},
            "pages_watermark": {(): self._watermark_pages},
            "page_size_tokens": {(): shape.page_size},
            "page_size_bytes": {(): shape.page_bytes},
            "token_slots": {("filled",): pool.filled_slots, ("unfilled",): pool.unfilled_slots},
            "pages_shared": {(): pool.shared_pages},
            "page_references": {(): pool.references},
            "page_table_rows": {("used",): view.rows_used, ("free",): shape.max_running - view.rows_used},
            "page_events": {(kind.name.lower(),): view.events_by_kind[kind] for kind in PageEventKind},
            "page_evictions": {
                ("capacity",): view.events_by_kind[PageEventKind.EVICTED] - view.flush_evictions,
                ("flush",): view.flush_evictions,
            },
            "page_allocation_failures": {(): counts.allocation_failures_total},
            "prefix_tokens": {
                ("hit",): counts.hit_tokens_total,
                ("miss_cold",): counts.miss_cold_tokens_total,
                ("miss_evicted",): counts.miss_evicted_tokens_total,
                ("unaligned",): counts.unaligned_tokens_total,
            },
            "integrity_checks": view.checks,
            "integrity_last_success_timestamp_seconds": {(): view.last_success_seconds},
            "page_events_dropped": {(reader,): number for reader, number in view.dropped.items()},
            "requests_running": {(): counts.running_requests},
            "requests_waiting": {(reason,): number for reason, number in waiting.items()},
            "preemptions": {("recompute",): counts.preemptions_total},
            "preempted_tokens": {(): counts.preempted_tokens_total},
            "scheduler_idle_seconds": {(): view.idle_seconds},
            "link_sequence_mismatches": {(): self._mismatches()},
        }

    def _pool_info(self) -> Metric:
        description, pool = self._description, self._description.pool
        info = InfoMetricFamily("kvatlas_pool", "Geometry of the page pool.")
        values = {
            "worker": description.worker_id,
            "model": description.model.model_id,
            "page_size": str(pool.page_size),
            "dtype": pool.dtype,
            "layers": str(pool.layer_count),
            "kv_heads": str(pool.kv_head_count),
            "head_dim": str(pool.head_dim),
            "layout": "page_slot_head",
            "device": pool.device,
        }
        info.add_metric([], values)
        return info


def _family(series: Series, samples: Samples, view: MetricsView) -> Metric:
    family = series.kind("kvatlas_" + series.name, series.help, labels=list(series.labels))
    for values in product(*series.labels.values()):
        if isinstance(family, HistogramMetricFamily):
            counts, total = view.histograms[series.name, values]
            bounds = [*(str(bound) for bound in series.buckets), "+Inf"]
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(list(values), buckets=buckets, sum_value=total)
        else:
            family.add_metric(list(values), samples.get(values, 0))
    return family
