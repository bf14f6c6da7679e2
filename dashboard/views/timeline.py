"""The timeline: states and pressure over ten minutes, and a spectrogram of the pool."""

import streamlit as st

from dashboard.charts import rates_over_time, states_over_time
from dashboard.components import mount
from dashboard.live_pages import Follower
from dashboard.view_parts import choose_follower, grafana_link, needs_map, period, theme_kind

PERIOD_SECONDS = 5.0


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is None or not needs_map(follower):
        return
    mount("spectrogram.js", {"worker": follower.worker_id}, key="spectrogram", on_picked=_take_pick)
    wanted = st.session_state.pop("timeline_go", None)
    if wanted:
        st.switch_page("views/page_map.py", query_params={**st.query_params.to_dict(), **wanted})
    st.fragment(_charts, run_every=period(PERIOD_SECONDS))(follower)
    st.caption(
        "A band that stays lit and grows old is a leak; one that flickers is thrashing; a line from top to "
        "bottom is a restart. Click: the map at that moment."
    )
    grafana_link()


def _charts(follower: Follower) -> None:
    period()
    needs_map(follower)
    live = follower.live_map
    with live.lock:
        figures, times = live.spectrogram.figures(0)
    if len(times) < 3:
        st.caption("The first columns come in a moment.")
        return
    kind = theme_kind()
    st.altair_chart(states_over_time(figures, times, kind), width="stretch")
    st.altair_chart(rates_over_time(figures, times, kind), width="stretch")


def _take_pick() -> None:
    picked = st.session_state["spectrogram"].get("picked") or {}
    if "t" in picked:
        st.session_state["timeline_go"] = {"t": str(picked["t"]), "page": str(picked["page"])}


show()
