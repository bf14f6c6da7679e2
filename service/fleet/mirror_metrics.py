"""Series of the page mirrors, read from them at scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.fleet.mirrors import PageMirrors
from service.metric_table import MIRRORS, RESYNC_CAUSES

_ROWS = {row.name: row for row in MIRRORS}


class MirrorCollector(Collector):
    """How old each mirror is and how often it was built anew. To be registered with a registry."""

    def __init__(self, mirrors: PageMirrors) -> None:
        self._mirrors = mirrors

    def collect(self) -> Iterator[Metric]:
        """Called from the thread of the scrape: reads plain numbers only."""
        row = _ROWS["page_mirror_age_seconds"]
        age = GaugeMetricFamily(row.family, row.help, labels=list(row.labels))
        row = _ROWS["page_mirror_resyncs"]
        resyncs = CounterMetricFamily(row.family, row.help, labels=list(row.labels))
        for kept in self._mirrors.kept:
            age.add_metric([kept.mirror.worker_id], kept.age_seconds)
            for cause in RESYNC_CAUSES:
                resyncs.add_metric([kept.mirror.worker_id, cause], kept.resyncs[cause])
        yield age
        yield resyncs
