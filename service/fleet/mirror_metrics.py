"""Series of the page mirrors, read from them at scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.fleet.mirrors import CAUSES, PageMirrors


class MirrorCollector(Collector):
    """How old each mirror is and how often it was built anew. To be registered with a registry."""

    def __init__(self, mirrors: PageMirrors) -> None:
        self._mirrors = mirrors

    def collect(self) -> Iterator[Metric]:
        """Called from the thread of the scrape: reads plain numbers only."""
        age = GaugeMetricFamily(
            "kvatlas_page_mirror_age_seconds",
            "Since the last message of a worker's page feed, by this process's clock.",
            labels=["worker"],
        )
        resyncs = CounterMetricFamily(
            "kvatlas_page_mirror_resyncs_total",
            "Snapshots fetched, by cause: a start, something missed, a new life of the worker.",
            labels=["worker", "cause"],
        )
        for kept in self._mirrors.kept:
            age.add_metric([kept.mirror.worker_id], kept.age_seconds)
            for cause in CAUSES:
                resyncs.add_metric([kept.mirror.worker_id, cause], kept.resyncs[cause])
        yield age
        yield resyncs
