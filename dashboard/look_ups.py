"""Look-ups of the last minutes: results, since when they are known, how far estimates of them go."""

import time

from dashboard.charts import rates
from dashboard.facts import RESULTS, EstimateReport
from dashboard.live_map import LiveMap

MISS_SECONDS = 300
ENOUGH = 0.9  # of the tokens that estimates have, counted ones


def recent_results(live_map: LiveMap, seconds: int = MISS_SECONDS) -> dict[str, int]:
    """Prompt tokens by result over the last minutes, from the counters of each second."""
    with live_map.lock:
        columns, times = live_map.spectrogram.figures(0)
    is_recent = times >= (times[-1] - 1000.0 * seconds if len(times) else 0.0)
    columns, times = columns[is_recent], times[is_recent]
    if len(times) < 2:
        return dict.fromkeys(RESULTS, 0)
    spans = (times[1:] - times[:-1]) / 1000.0
    return {name: round(float((rates(columns, times, f"{name}_tokens") * spans).sum())) for name in RESULTS}


def begun_late(live_map: LiveMap, seconds: int = MISS_SECONDS) -> float | None:
    """When this dashboard began to look, ms since 1970; None: at least so many seconds ago."""
    with live_map.lock:
        _, times = live_map.spectrogram.figures(0)
    if not len(times):
        return time.time_ns() / 1e6
    return float(times[0]) if times[-1] - times[0] < 1000.0 * (seconds - 1) else None


def basis(report: EstimateReport) -> str:
    """What the diamond is, and whether it may be compared: the worker counts requests when they end."""
    ended = sum(report.observed.tokens.values())
    if ended < ENOUGH * report.token_count:
        return (
            f"The diamond is what was really counted, of requests that have ended: {ended:,} of these "
            "tokens, too few to be compared with the curve."
        )
    return (
        "The diamond is what was really counted: its distance from the curve is how far to believe the rest."
    )
