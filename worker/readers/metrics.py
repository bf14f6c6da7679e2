"""The worker's series: one collector over the table of metrics, one snapshot a scrape.

Gauges that must add up come from one frozen MetricsView, which the observer replaces each turn; a
scrape computes nothing from the engine. Names, label sets and buckets are those of metric_table.py and
are present at 0 from the first scrape.
"""

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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

from kvatlas.metric import Metric as Row
from kvatlas.metric import MetricKind
from kvatlas.revision import source_revision
from worker.description import VERSION, WorkerDescription
from worker.pages.events import PageEventKind
from worker.readers.buckets import FrozenBuckets
from worker.readers.metric_table import BANDS, CHECKS, MEMORY_KINDS, READERS, TABLE
from worker.readers.pace import Pace
from worker.stats import EngineCounts, PoolTotals, WaitReason

SCRAPE_REST_SECONDS = 0.001
"""Between pieces of a scrape, half of other readers': with theirs it took up to 22 ms on an H200's host."""

Samples = Mapping[tuple[str, ...], float]
Histograms = Mapping[tuple[str, tuple[str, ...]], FrozenBuckets]
"""By name and label values."""


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
    pressure_seconds: Mapping[str, float]  # by band
    graphs: tuple[int, int]  # steps replayed, steps run eagerly
    memory_bytes: Mapping[str, int]  # of the GPU, by kind
    constraint_lookups: Samples  # by result
    histograms: Histograms


def first_view(pool: PoolTotals) -> MetricsView:
    """What a worker shows before the observer's first turn."""
    empty: Histograms = {
        (row.name, values): ((0,) * (len(row.buckets) + 1), 0.0)
        for row in TABLE
        if row.kind is MetricKind.HISTOGRAM
        for values in product(*row.labels.values())
    }
    return MetricsView(
        counts=EngineCounts(),
        pool=pool,
        events_by_kind=(0,) * 16,
        flush_evictions=0,
        rows_used=0,
        idle_seconds=0.0,
        checks={(check, result): 0 for check in CHECKS for result in ("pass", "fail")},
        last_success_seconds=0.0,
        dropped=dict.fromkeys(READERS, 0),
        pressure_seconds=dict.fromkeys(BANDS, 0.0),
        graphs=(0, 0),
        memory_bytes=dict.fromkeys(MEMORY_KINDS, 0),
        constraint_lookups={("hit",): 0, ("miss",): 0},
        histograms=empty,
    )


_FAMILIES: dict[
    MetricKind, type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]
] = {
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


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
        seam_refusals: Mapping[str, int] | None = None,  # by reason; None: no keys, nobody refused
    ) -> None:
        self._description = description
        self._view = view
        self._mismatches = mismatches
        self._watermark_pages = watermark_pages
        self._seam_refusals = seam_refusals or {}
        self._commit = source_revision()
        usable = description.pool.num_pages
        self._edges = {row.name: _edges_of(row, usable) for row in TABLE if row.buckets}
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Names alone: a registry refuses a second collector of the same series (B112)."""
        for row in TABLE:
            yield _empty(row)

    def collect(self) -> Iterable[Metric]:
        """One scrape, in pieces: written out by its reader meanwhile, it takes 2 to 4 ms."""
        view, pace = self._view(), Pace(SCRAPE_REST_SECONDS)
        pace.begin()
        samples, infos = self._samples(view), self._infos()
        for row in TABLE:
            if row.kind is MetricKind.INFO:
                info = InfoMetricFamily(row.family, row.help)
                info.add_metric([], infos[row.name])
                yield info
            else:
                yield self._family(row, samples.get(row.name, {}), view)
            pace.rest()

    def _family(self, row: Row, samples: Samples, view: MetricsView) -> Metric:
        family = _empty(row)
        for values in product(*row.labels.values()):
            if isinstance(family, HistogramMetricFamily):
                counts, total = view.histograms[row.name, values]
                buckets = list(zip(self._edges[row.name], accumulate(counts), strict=True))
                family.add_metric(list(values), buckets=buckets, sum_value=total)
            elif isinstance(family, (GaugeMetricFamily, CounterMetricFamily)):
                family.add_metric(list(values), samples.get(values, 0))
        return family

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
            "pool_pressure_seconds": {(band,): seconds for band, seconds in view.pressure_seconds.items()},
            "step_graphs": {("replayed",): view.graphs[0], ("eager",): view.graphs[1]},
            "gpu_memory_bytes": {(kind,): number for kind, number in view.memory_bytes.items()},
            "constraint_lookups": view.constraint_lookups,
            "scheduler_idle_seconds": {(): view.idle_seconds},
            "link_sequence_mismatches": {(): self._mismatches()},
            "seam_refused": {(reason,): number for reason, number in self._seam_refusals.items()},
        }

    def _infos(self) -> dict[str, dict[str, str]]:
        description, pool = self._description, self._description.pool
        return {
            "pool": {
                "worker": description.worker_id,
                "model": description.model.model_id,
                "page_size": str(pool.page_size),
                "dtype": pool.dtype,
                "layers": str(pool.layer_count),
                "kv_heads": str(pool.kv_head_count),
                "head_dim": str(pool.head_dim),
                "layout": "page_slot_head",
                "device": pool.device,
            },
            "build": {
                "version": VERSION,
                "commit": self._commit,
                "python": platform.python_version(),
            },
        }


def _empty(row: Row) -> Metric:
    if row.kind is MetricKind.INFO:
        return InfoMetricFamily(row.family, row.help)
    return _FAMILIES[row.kind](row.family, row.help, labels=list(row.labels))


def _edges_of(row: Row, usable_pages: int) -> list[str]:
    """Upper edges as the exposition writes them; some are multiples of the pool."""
    scale = usable_pages if row.bucket_unit else 1
    return [*(str(float(edge * scale)) for edge in row.buckets), "+Inf"]
