"""What a metric is called, means and looks like: the row type of the metric tables of all processes.

Each process has one table of these rows (worker/readers/metric_table.py, service/metric_table.py). The
table makes its registry, docs/metrics.md and the dashboards, so the three cannot disagree. Knows no
Prometheus library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class MetricKind(Enum):
    """Types of the Prometheus exposition format that are used."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


_SUFFIXES = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    `labels` gives the closed set of values of each label; an empty set means values that only the running
    process knows (workers of the configuration, methods of the API), never what a client sends. Exactly
    one of `panel` and `excuse` is set.
    """

    name: str  # of the family: without prefix, without _total or _info
    kind: MetricKind
    help: str
    section: str  # heading in docs/metrics.md
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()  # upper edges, without +Inf
    bucket_unit: str = ""  # what the edges are multiples of; empty: the unit in the name
    panel: str = ""  # "dashboard/title" of the panel that shows it
    excuse: str = ""  # why no panel shows it
    prefix: str = "kvatlas_"

    @property
    def family(self) -> str:
        """Name of the family, as in HELP and TYPE lines of OpenMetrics."""
        return self.prefix + self.name

    @property
    def exposed(self) -> str:
        """Name in queries; histograms have _bucket, _sum and _count behind it."""
        return self.family + _SUFFIXES.get(self.kind, "")
