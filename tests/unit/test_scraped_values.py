"""Each figure of a scrape stands under its own name and label: all of them differ here."""

from dataclasses import replace
from itertools import count

import pytest
from prometheus_client import CollectorRegistry

from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.pages.events import PageEventKind
from worker.readers.metric_table import BANDS, MEMORY_KINDS, READERS
from worker.readers.metrics import MetricsView, WorkerCollector, first_view
from worker.stats import EngineCounts, PoolTotals, WaitReason

POOL = PoolTotals(
    revision=100,
    step=101,
    free_pages=3,
    active_pages=11,
    cached_pages=5,
    pinned_pages=2,
    reserved_pages=1,
    shared_pages=4,
    references=17,
    filled_slots=39,
    unfilled_slots=6,
)
COUNTS = EngineCounts(
    running_requests=201,
    waiting_by_reason={reason: 210 + reason for reason in WaitReason},
    hit_tokens_total=221,
    miss_cold_tokens_total=222,
    miss_evicted_tokens_total=223,
    unaligned_tokens_total=224,
    preemptions_total=231,
    preempted_tokens_total=232,
    allocation_failures_total=233,
)


def view() -> MetricsView:
    return replace(
        first_view(POOL),
        counts=COUNTS,
        events_by_kind=tuple(300 + kind for kind in range(16)),
        flush_evictions=6,
        rows_used=3,
        idle_seconds=401.5,
        checks={("trie", "pass"): 411, ("trie", "fail"): 412},
        last_success_seconds=421.25,
        dropped=dict(zip(READERS, count(431), strict=False)),
        pressure_seconds=dict(zip(BANDS, count(441), strict=False)),
        graphs=(451, 452),
        memory_bytes=dict(zip(MEMORY_KINDS, count(461), strict=False)),
        constraint_lookups={("hit",): 471, ("miss",): 472},
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    pool = PoolDescription(21, 4, 8, 32, "lru", page_bytes=4096)
    description = WorkerDescription("w", 1, ModelDescription("m", 9, 32), pool, 1, 32, 0, (), "", b"")
    WorkerCollector(
        made,
        description,
        view=view,
        mismatches=lambda: 481,
        watermark_pages=7,
        seam_refusals={"unknown_key": 491, "handshake": 492},
    )
    return made


VALUES: dict[str, dict[str, float]] = {
    'pages{state="%s"}': {"free": 3, "active": 11, "cached": 5, "pinned": 2, "reserved": 1},
    'token_slots{state="%s"}': {"filled": 39, "unfilled": 6},
    'page_table_rows{state="%s"}': {"used": 3, "free": 5},
    'page_events_total{event="%s"}': {kind.name.lower(): 300 + kind for kind in PageEventKind},
    'page_evictions_total{reason="%s"}': {"capacity": 300, "flush": 6},
    'prefix_tokens_total{result="%s"}': {
        "hit": 221,
        "miss_cold": 222,
        "miss_evicted": 223,
        "unaligned": 224,
    },
    'requests_waiting{reason="%s"}': {
        "other": 210,
        "pages": 211,
        "rows": 212,
        "step_tokens": 213,
        "priority": 214,
    },
    'page_events_dropped_total{reader="%s"}': {"observer": 431, "feed": 432, "recorder": 433},
    'pool_pressure_seconds_total{band="%s"}': {"ok": 441, "low": 442, "critical": 443, "exhausted": 444},
    'step_graphs_total{result="%s"}': {"replayed": 451, "eager": 452},
    'gpu_memory_bytes{kind="%s"}': dict(zip(MEMORY_KINDS, count(461), strict=False)),
    'constraint_lookups_total{result="%s"}': {"hit": 471, "miss": 472},
    'seam_refused_total{reason="%s"}': {"unknown_key": 491, "handshake": 492},
    'preemptions_total{mode="%s"}': {"recompute": 231, "swap": 0},
}
PLAIN = {
    "pages_capacity": 22,
    "pages_watermark": 7,
    "page_size_tokens": 4,
    "page_size_bytes": 4096,
    "pages_shared": 4,
    "page_references": 17,
    "page_allocation_failures_total": 233,
    "integrity_last_success_timestamp_seconds": 421.25,
    "requests_running": 201,
    "preempted_tokens_total": 232,
    "scheduler_idle_seconds_total": 401.5,
    "link_sequence_mismatches_total": 481,
}


def test_each_figure_has_its_own_name_and_label(registry: CollectorRegistry) -> None:
    wanted = {f"kvatlas_{name}": float(value) for name, value in PLAIN.items()}
    for name, values in VALUES.items():
        wanted |= {f"kvatlas_{name % label}": float(value) for label, value in values.items()}
    found = {
        sample.name + (f'{{{label}="{value}"}}' if label else ""): sample.value
        for family in registry.collect()
        if family.type not in ("histogram", "info") and family.name != "kvatlas_integrity_checks"
        for sample in family.samples
        for label, value in list(sample.labels.items()) or [("", "")]
    }
    assert found == wanted


def test_a_check_that_never_ran_is_there_with_zero(registry: CollectorRegistry) -> None:
    def checks(check: str) -> list[float | None]:
        name = "kvatlas_integrity_checks_total"
        return [registry.get_sample_value(name, {"check": check, "result": r}) for r in ("pass", "fail")]

    assert checks("trie") == [411.0, 412.0]
    assert checks("refcount") == [0.0, 0.0]
