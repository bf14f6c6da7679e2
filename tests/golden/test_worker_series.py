"""The worker's series as a contract: names, types, help, labels and buckets do not change unnoticed."""

import json
from pathlib import Path

from prometheus_client import CollectorRegistry

from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.readers.metrics import WorkerCollector, first_view
from worker.stats import PoolTotals

GOLDEN = Path(__file__).with_name("worker_series.json")


def test_the_series_are_those_of_the_record() -> None:
    """To write the record anew: PYTHONPATH=.:protos python tests/golden/test_worker_series.py"""
    assert described() == json.loads(GOLDEN.read_text())


def described() -> dict[str, object]:
    registry = CollectorRegistry()
    pool = PoolDescription(8, 4, 2, 32, "lru")
    description = WorkerDescription("w", 1, ModelDescription("m", 9, 32), pool, 1, 32, 0, (), "", b"")
    WorkerCollector(
        registry,
        description,
        view=lambda: first_view(PoolTotals(0, 0, 8, 0, 0, 0, 1)),
        mismatches=lambda: 0,
        watermark_pages=0,
    )
    series: dict[str, object] = {}
    for family in registry.collect():
        samples = sorted(
            {f"{sample.name} {json.dumps(sample.labels, sort_keys=True)}" for sample in family.samples}
        )
        if family.type == "info":
            samples = [f"{sample.name} {sorted(sample.labels)}" for sample in family.samples]
        series[family.name] = {"type": family.type, "help": family.documentation, "samples": samples}
    return series


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(described(), indent=1) + "\n")
