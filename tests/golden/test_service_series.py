"""The service's series as a contract: names, types, help, labels and buckets do not change unnoticed."""

import json
from pathlib import Path

from prometheus_client import CollectorRegistry

from service.metrics import ServiceMetrics

GOLDEN = Path(__file__).with_name("service_series.json")


def test_the_series_are_those_of_the_record() -> None:
    """To write the record anew: PYTHONPATH=.:protos python tests/golden/test_service_series.py"""
    assert described() == json.loads(GOLDEN.read_text())


def described() -> dict[str, object]:
    registry = CollectorRegistry()
    metrics = ServiceMetrics(registry, version="1", commit="c")
    call = ("unary", "a.B", "C")  # series of calls come with the first call
    metrics.calls_started.labels(*call)
    metrics.calls_handled.labels(*call, "OK")
    metrics.call_seconds.labels(*call)
    series: dict[str, object] = {}
    for family in registry.collect():
        samples = [f"{sample.name} {json.dumps(sample.labels, sort_keys=True)}" for sample in family.samples]
        if family.type == "info":
            samples = [f"{sample.name} {sorted(sample.labels)}" for sample in family.samples]
        series[family.name] = {"type": family.type, "help": family.documentation, "samples": sorted(samples)}
    return series


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(described(), indent=1) + "\n")
