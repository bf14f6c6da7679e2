"""What if the pool were larger, its pages smaller, its policy another: hit rates from EstimateCache."""

import time

import streamlit as st

from dashboard import process
from dashboard.charts import hit_rate_curve, misses, page_sizes
from dashboard.facts import EstimateReport
from dashboard.live_map import Geometry
from dashboard.live_pages import Follower
from dashboard.look_ups import basis, begun_late, recent_results
from dashboard.view_parts import (
    choose_follower,
    clock_text,
    counted,
    figures,
    needs_map,
    share,
    theme_kind,
)
from kvatlas.client.errors import KvatlasError

PAGE_SIZES = (8, 16, 32, 64)  # beside the pool's own
POLICIES = ("lru", "lfu", "fifo", "cost")
WINDOWS = {"all that is held": 0, "10 min": 600, "5 min": 300, "1 min": 60}
LEAST_SECONDS = 60.0  # between two runs of the same question: it takes the worker seconds


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is None or not needs_map(follower):
        return
    geometry = follower.live_map.geometry()
    with st.container(key="beside"):  # one below the other where there is little room: page.css
        left, right = st.columns([3, 2], gap="large")
    with right:
        _misses(follower)
    with left:
        _estimates(follower, geometry)


def _misses(follower: Follower) -> None:
    begun_ms = begun_late(follower.live_map)
    stretch = "last 5 min" if begun_ms is None else f"since {clock_text(begun_ms)}"
    st.subheader(f"Prompt tokens, {stretch}", anchor=False)
    tokens = recent_results(follower.live_map)
    if any(tokens.values()):  # of none there are no shares
        st.altair_chart(misses(tokens, theme_kind()), width="stretch")
    words = f"{sum(tokens.values()):,} prompt tokens were looked up in the prefix cache"
    st.caption(words if begun_ms is None else f"{words} since this dashboard began")


def _estimates(follower: Follower, geometry: Geometry) -> None:
    st.subheader("Hit rate by pool size", anchor=False)
    with st.form("what_if", border=False):
        columns = st.columns([3, 2, 2, 1], vertical_alignment="bottom")
        sizes = columns[0].pills(
            "Page sizes",
            sorted({*PAGE_SIZES, geometry.page_size}),
            selection_mode="multi",
            default=[geometry.page_size],
            key="sizes",
        )
        policies = columns[1].multiselect(
            "Policies", POLICIES, default=[geometry.eviction_policy or "lru"], key="policies"
        )
        window = columns[2].selectbox("Window", list(WINDOWS), key="window")
        is_asked = columns[3].form_submit_button("Run")
    question = (follower.worker_id, tuple(sorted(sizes)), tuple(policies), window)
    if is_asked:
        _ask(question)
    kept = st.session_state.get("estimate")
    if kept is None:
        st.caption("Run plays the requests of the recent past through pools of other sizes, on the worker.")
        return
    answer, asked_at, asked_for = kept
    if isinstance(answer, str):
        st.error(answer)
        return
    _show(answer, geometry, asked_for[2])
    st.caption(f"asked {time.monotonic() - asked_at:.0f} s ago")


def _ask(question: tuple[str, tuple[int, ...], tuple[str, ...], str]) -> None:
    kept = st.session_state.get("estimate")
    is_same = kept is not None and kept[2] == question and not isinstance(kept[0], str)
    if kept is not None and is_same and time.monotonic() - kept[1] < LEAST_SECONDS:
        st.toast("Asked less than a minute ago: the answer is the same.")
        return
    worker_id, sizes, policies, window = question
    answer: EstimateReport | str
    try:
        with st.spinner("the worker plays the recent past again"):
            answer = process.live_pages().source.estimate(worker_id, sizes, policies, WINDOWS[window])
    except KvatlasError as failure:
        answer = str(failure)
    st.session_state["estimate"] = (answer, time.monotonic(), question)


def _show(report: EstimateReport, geometry: Geometry, policies: tuple[str, ...]) -> None:
    today = (geometry.page_count - 1) * geometry.page_size
    kind = theme_kind()
    combinations = sorted({(each.page_size, each.policy) for each in report.estimates})
    wanted = (geometry.page_size, geometry.eviction_policy)
    default = combinations.index(wanted) if wanted in combinations else 0
    picked = combinations[default]
    if len(combinations) > 1:
        picked = st.selectbox(
            "Curve", combinations, index=default, format_func=lambda one: f"pages of {one[0]}, {one[1]}"
        )
    chart = hit_rate_curve(report, today, picked[0], picked[1], kind)
    st.altair_chart(chart, width="stretch")
    figures(verdict(report, today, picked[0], picked[1]))
    if len(combinations) > 1:
        st.dataframe(page_sizes(report, today), hide_index=True)
    st.caption(
        f"sample {report.sampling_rate:.0%} of prefixes, {counted(report.request_count, 'request')}, "
        f"{counted(report.token_count, 'prompt token')} in {report.seconds / 60:.1f} min. {basis(report)}"
    )


def verdict(report: EstimateReport, today_slots: int, page_size: int, policy: str) -> dict[str, str]:
    """Today, twice the memory, and what was counted, in one line."""
    mine = [each for each in report.estimates if each.page_size == page_size and each.policy == policy]

    def at(times: float) -> str:
        near = [each for each in mine if abs(each.pool_slots / today_slots - times) < 0.03 * times]
        return f"{near[0].hit_ratio:.1%}" if near else share(0, 0)

    return {
        "Observed": f"{report.observed.hit_ratio:.1%}",
        "Estimate, today": at(1.0),
        "Half the memory": at(0.5),
        "Twice the memory": at(2.0),
    }


show()
