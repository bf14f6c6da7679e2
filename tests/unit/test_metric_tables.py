"""The metric tables: names, units and labels as Prometheus and the house want them."""

import re

import pytest

from kvatlas.metric import Metric, MetricKind
from service.metric_table import TABLE as SERVICE
from worker.readers.metric_table import TABLE as WORKER

ALL = [*WORKER, *SERVICE]
UNITS = ("seconds", "tokens", "pages", "bytes")


@pytest.mark.parametrize("table", [WORKER, SERVICE])
def test_no_two_metrics_of_a_process_have_one_family(table: tuple[Metric, ...]) -> None:
    """A gauge beside a counter of the same family is refused by OpenMetrics."""
    families = [metric.family for metric in table]
    assert len(set(families)) == len(families)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.exposed)
def test_names_are_plain_and_without_the_suffixes_of_the_exposition(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert not metric.name.endswith(("_total", "_info", "_count", "_sum", "_bucket", "_created"))
    assert not re.search(r"_(ms|milliseconds|perc|percent|ratio)\b", metric.name)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.exposed)
def test_help_is_a_sentence(metric: Metric) -> None:
    assert re.fullmatch(r"[^\n]+\.", metric.help)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.exposed)
def test_each_metric_is_on_a_panel_or_says_why_not(metric: Metric) -> None:
    assert bool(metric.panel) != bool(metric.excuse)
    assert not metric.panel or metric.panel.split("/", 1)[0] in ("pages", "serving")


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.exposed)
def test_buckets_belong_to_histograms_and_rise(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert all(low < high for low, high in zip(metric.buckets, metric.buckets[1:], strict=False))


def test_histograms_of_times_and_amounts_name_their_unit() -> None:
    without = {
        metric.name
        for metric in ALL
        if metric.kind is MetricKind.HISTOGRAM and not metric.name.endswith(UNITS)
    }
    assert without == {"page_uses_at_eviction", "step_sequences"}  # they count what the name says


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.exposed)
def test_labels_never_carry_what_a_client_sends(metric: Metric) -> None:
    closed = {name for name, values in metric.labels.items() if values}
    running = set(metric.labels) - closed
    assert running <= {"worker", "grpc_type", "grpc_service", "grpc_method", "grpc_code"}
    assert not set(metric.labels) & {"request_id", "tenant", "page", "prompt", "model", "instance", "job"}


def test_the_edges_of_opentelemetry_are_among_ours() -> None:
    """So that ours can be summed down to gen_ai.server.time_to_first_token and .time_per_output_token.

    The lists are those of the GenAI metrics of the OpenTelemetry semantic conventions 1.36.
    """
    by_name = {metric.name: metric for metric in SERVICE}
    first_token = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0}
    per_token = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5}
    duration = {0.01 * 2**power for power in range(14)}
    assert first_token <= set(by_name["time_to_first_token_seconds"].buckets)
    assert per_token <= set(by_name["inter_token_latency_seconds"].buckets)
    assert duration <= set(by_name["request_duration_seconds"].buckets)
