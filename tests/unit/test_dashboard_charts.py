"""Charts: rates of counters that may fall, few points however long, sums; numbers as people say them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dashboard import charts, readings
from dashboard.facts import Estimate, EstimateReport
from dashboard.spectrogram import FIGURES
from dashboard.view_parts import counted, span
from kvatlas.v1 import cache_pb2 as pb


def test_a_counter_that_fell_began_anew_and_no_rate_is_negative() -> None:
    """B120: a worker that starts again counts from 0."""
    figures = np.zeros((4, len(FIGURES)), np.uint32)
    figures[:, FIGURES.index("allocated")] = (100, 150, 3, 20)
    rates = charts.rates(figures, np.array([0.0, 1000.0, 2000.0, 4000.0]), "allocated")
    assert rates.tolist() == [50.0, 3.0, 8.5]


@pytest.mark.parametrize("seconds", [3, 150, 151, 299, 600])
def test_charts_over_time_have_few_points_however_long_they_are(seconds: int) -> None:
    figures, times = np.zeros((seconds, len(FIGURES)), np.uint32), np.arange(seconds) * 1000.0
    for chart, num_series in ((charts.states_over_time, 5), (charts.rates_over_time, 3)):
        (rows,) = json.loads(chart(figures, times, "dark").to_json())["datasets"].values()
        assert len({row["time"] for row in rows}) * num_series == len(rows)
        assert min(seconds - 1, 75) <= len(rows) / num_series <= 150


def test_where_nothing_was_heard_nothing_is_drawn() -> None:
    """A worker that hung for a minute had kept its pages and its rates by these charts."""
    figures = np.full((6, len(FIGURES)), 7, np.uint32)
    times = np.array([0.0, 1000.0, 3500.0, 60_000.0, 61_000.0, 62_000.0])
    hole = "1970-01-01T00:00:04.500000+00:00"
    (rows,) = json.loads(charts.states_over_time(figures, times, "dark").to_json())["datasets"].values()
    assert [row["pages"] for row in rows if row["time"] == hole] == [0] * 5
    assert len(rows) == 5 * 7
    (rows,) = json.loads(charts.rates_over_time(figures, times, "dark").to_json())["datasets"].values()
    assert [row["per second"] for row in rows if row["time"] == hole] == [None] * 3
    assert len(rows) == 3 * 6


def report() -> EstimateReport:
    tokens = {"hit": 60, "miss_cold": 30, "miss_evicted": 5, "unaligned": 5}
    estimates = tuple(
        Estimate(1600 * times, size, "lru", tokens, 0.1 * times, 0.01, 3, 2.0)
        for times in (1, 2, 4)
        for size in (8, 16)
    )
    observed = Estimate(3200, 16, "lru", tokens, 0.21, 0.0, 3, 2.0)
    return EstimateReport(estimates, observed, 0.1, 50, 1000, 60.0, 8)


def test_the_curve_shows_one_setting_and_what_was_observed() -> None:
    chart = json.loads(charts.hit_rate_curve(report(), 3200, 16, "lru", "dark").to_json())
    data = [row for rows in chart["datasets"].values() for row in rows]
    assert sorted(row["times today"] for row in data if "slots" in row) == [0.5, 1.0, 2.0]
    assert [row["y"] for row in data if row.get("what") == "observed"] == [0.21]
    table = charts.page_sizes(report(), 3200)
    assert table["page size"].tolist() == [8, 16]


def test_what_is_not_known_of_the_pool_is_no_zero() -> None:
    unknown = readings.estimate(pb.CacheEstimate(pool_slots=3200, page_size=8))
    none = readings.estimate(
        pb.CacheEstimate(pool_slots=3200, page_size=16, evictions=0, mean_wasted_slots=0.0)
    )
    table = charts.page_sizes(replace(report(), estimates=(unknown, none)), 3200)
    for column in ("evictions", "wasted slots"):
        assert table[column].isna().tolist() == [True, False]
        assert table[column][1] == 0


def test_misses_add_up_to_all_tokens() -> None:
    chart = json.loads(
        charts.misses({"hit": 1, "miss_cold": 2, "miss_evicted": 0, "unaligned": 1}, "light").to_json()
    )
    (rows,) = chart["datasets"].values()
    assert [row["share"] for row in rows] == [0.25, 0.5, 0.0, 0.25]


def test_durations_and_counts_are_said_as_people_say_them() -> None:
    assert [span(seconds) for seconds in (0.04, 119.94, 120, 7199, 7200)] == [
        "0.0 s",
        "119.9 s",
        "2 min",
        "120 min",
        "2.0 h",
    ]
    assert [counted(number, "hit") for number in (0, 1, 1234)] == ["0 hits", "1 hit", "1,234 hits"]
