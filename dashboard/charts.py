"""Frozen values → small charts. Pure; colours come from the palette, for the ground that is shown."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dashboard.facts import RESULTS, Estimate, EstimateReport
from dashboard.spectrogram import COLUMN_MS, FIGURES
from dashboard.theme import STATES, colours

RESULT_WORDS = {
    "hit": "hit",
    "miss_cold": "cold",
    "miss_evicted": "evicted: what memory would buy",
    "unaligned": "unaligned: what a smaller page would buy",
}
MAX_POINTS = 150
HOLE_MS = 3 * COLUMN_MS  # without a column: nothing was heard, as in components/strip.js


def rates(figures: NDArray[np.uint32], times_ms: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Per second from column to column. A counter that fell began anew at 0: never a negative rate."""
    values = figures[:, FIGURES.index(name)].astype(np.int64)
    steps = np.diff(values)
    steps = np.where(steps < 0, values[1:], steps)
    return steps / np.maximum(np.diff(times_ms) / 1000.0, 1e-3)


def states_over_time(figures: NDArray[np.uint32], times_ms: NDArray[np.float64], kind: str) -> Any:
    """Stacked pages by state; at most 150 points, and one at each hole, where nothing is drawn."""
    every = _stride(len(times_ms))
    order = ["reserved", "pinned", "active", "cached", "free"]
    rows = [
        {
            "time": pd.Timestamp(times_ms[at], unit="ms", tz="UTC"),
            "state": state,
            "pages": int(figures[at, FIGURES.index(state)]),
            "order": order.index(state),
        }
        for at in range(0, len(times_ms), every)
        for state in STATES
    ]
    rows += [
        {"time": hole, "state": state, "pages": 0, "order": order.index(state)}
        for hole in _holes(times_ms)
        for state in STATES
    ]
    look = colours("states", kind)
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_area(interpolate="step-after")
        .encode(
            x=alt.X("time:T", title=None, axis=alt.Axis(format="%H:%M:%S")),
            y=alt.Y("pages:Q", stack="zero", title="pages"),
            color=alt.Color(
                "state:N",
                scale=alt.Scale(domain=list(STATES), range=[look[state] for state in STATES]),
                legend=alt.Legend(orient="top", title=None, columns=3),
            ),
            order="order:Q",
            tooltip=["time:T", "state:N", "pages:Q"],
        )
        .properties(height=260)
        .configure(**_words(kind))
    )


def rates_over_time(figures: NDArray[np.uint32], times_ms: NDArray[np.float64], kind: str) -> Any:
    """Pages allocated and evicted, sequences preempted, a second; at most 150 points, lines end at holes."""
    names = ("allocated", "evicted", "preempted")
    every = _stride(len(times_ms) - 1)
    rows: list[dict[str, object]] = []
    for name in names:
        values = rates(figures, times_ms, name)
        rows += [{"time": hole, "what": name, "per second": None} for hole in _holes(times_ms)]
        rows += [
            {
                "time": pd.Timestamp(times_ms[at + 1], unit="ms", tz="UTC"),
                "what": name,
                "per second": float(values[at]),
            }
            for at in range(0, len(values), every)
        ]
    look = [
        colours("states", kind)["active"],
        colours("results", kind)["miss_evicted"],
        colours("bands", kind)["exhausted"],
    ]
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_line()
        .encode(
            x=alt.X("time:T", title=None, axis=alt.Axis(format="%H:%M:%S")),
            y=alt.Y("per second:Q"),
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=list(names), range=look),
                legend=alt.Legend(orient="top", title=None),
            ),
            strokeDash=alt.StrokeDash("what:N", sort=list(names), legend=None),
            tooltip=["time:T", "what:N", "per second:Q"],
        )
        .properties(height=210)
        .configure(**_words(kind))
    )


def _holes(times_ms: NDArray[np.float64]) -> list[pd.Timestamp]:
    """Where the last column before a hole ends."""
    ends = times_ms[:-1][np.diff(times_ms) > HOLE_MS] + COLUMN_MS
    return [pd.Timestamp(end, unit="ms", tz="UTC") for end in ends]


def _stride(count: int) -> int:
    """Steps from one of so many points to the next that is drawn."""
    return max(1, -(-count // MAX_POINTS))


def hit_rate_curve(report: EstimateReport, today_slots: int, page_size: int, policy: str, kind: str) -> Any:
    """Hit rate against pool size, with today's size and what was really counted."""
    wanted = [each for each in report.estimates if each.page_size == page_size and each.policy == policy]
    points = pd.DataFrame([_point(each, today_slots) for each in wanted])
    look, ground = colours("results", kind), colours("ground", kind)
    base = alt.Chart(points).encode(
        x=alt.X(
            "times today:Q", scale=alt.Scale(type="log", base=2), axis=alt.Axis(title="pool, times today")
        )
    )
    rate = alt.Y("hit rate:Q", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False))
    tooltip = [
        "times today:Q",
        "slots:Q",
        alt.Tooltip("hit rate:Q", format=".1%"),
        "evictions:Q",
        "preemptions:Q",
        "wasted slots:Q",
    ]
    line = base.mark_line(color=look["hit"]).encode(y=rate)
    dots = base.mark_point(color=look["hit"], filled=True, size=70).encode(y=rate, tooltip=tooltip)
    bars = base.mark_rule(color=look["hit"]).encode(y=alt.Y("low:Q", title="hit rate"), y2="high:Q")
    today = (
        alt.Chart(pd.DataFrame({"x": [1.0]}))
        .mark_rule(strokeDash=[4, 4], color=ground["muted"])
        .encode(x="x:Q")
    )
    seen = (
        alt.Chart(pd.DataFrame({"x": [1.0], "y": [report.observed.hit_ratio], "what": ["observed"]}))
        .mark_point(shape="diamond", size=160, filled=True, opacity=1, color=look["miss_evicted"])
        .encode(x="x:Q", y="y:Q", tooltip=["what:N", alt.Tooltip("y:Q", format=".1%", title="hit rate")])
    )
    return (today + line + bars + dots + seen).properties(height=300).configure(**_words(kind))


def _words(kind: str) -> dict[str, Any]:
    """Labels as dark as the other words of the page: Streamlit's own are pale."""
    muted = colours("ground", kind)["muted"]
    axis = {"labelColor": muted, "titleColor": muted}
    return {"axis": axis, "legend": axis}


def misses(tokens: dict[str, int], kind: str) -> Any:
    """Looked-up prompt tokens by result."""
    total = max(1, sum(tokens.values()))
    rows = [
        {"result": RESULT_WORDS[name], "share": tokens[name] / total, "tokens": tokens[name]}
        for name in RESULTS
    ]
    look = colours("results", kind)
    words = [RESULT_WORDS[name] for name in RESULTS]
    base = alt.Chart(pd.DataFrame(rows)).encode(
        x=alt.X("share:Q", axis=alt.Axis(format="%", tickCount=4), title=None),
        y=alt.Y("result:N", sort=words, title=None, axis=alt.Axis(labelLimit=260)),
        tooltip=["result:N", alt.Tooltip("share:Q", format=".1%"), "tokens:Q"],
    )
    colour = alt.Color(
        "result:N", scale=alt.Scale(domain=words, range=[look[n] for n in RESULTS]), legend=None
    )
    percent = base.mark_text(align="left", dx=5, color=colours("ground", kind)["text"]).encode(
        text=alt.Text("share:Q", format=".1%")
    )
    return (base.mark_bar().encode(color=colour) + percent).properties(height=150).configure(**_words(kind))


def page_sizes(report: EstimateReport, today_slots: int) -> pd.DataFrame:
    """At today's pool: page size against hits and wasted slots."""
    nearest = _nearest(report.estimates, today_slots)
    rows = [
        {
            "page size": each.page_size,
            "policy": each.policy,
            "hit rate": f"{each.hit_ratio:.1%} ± {each.hit_ratio_error:.1%}",
            "unaligned": f"{each.tokens['unaligned'] / max(1, sum(each.tokens.values())):.1%}",
            "evictions": each.evictions,
            "preemptions": each.preemptions,
            "wasted slots": _wasted(each),
        }
        for each in nearest
    ]
    return pd.DataFrame(rows)


def _wasted(each: Estimate) -> int | None:
    return None if each.mean_wasted_slots is None else round(each.mean_wasted_slots)


def _nearest(estimates: Sequence[Estimate], slots: int) -> list[Estimate]:
    """Those of the pool size that is closest to today's."""
    if not estimates:
        return []
    best = min((each.pool_slots for each in estimates), key=lambda size: abs(size - slots))
    return [each for each in estimates if each.pool_slots == best]


def _point(each: Estimate, today_slots: int) -> dict[str, Any]:
    return {
        "times today": each.pool_slots / today_slots,
        "slots": each.pool_slots,
        "hit rate": each.hit_ratio,
        "low": max(0.0, each.hit_ratio - each.hit_ratio_error),
        "high": min(1.0, each.hit_ratio + each.hit_ratio_error),
        "evictions": each.evictions,
        "preemptions": each.preemptions,
        "wasted slots": _wasted(each),
    }
