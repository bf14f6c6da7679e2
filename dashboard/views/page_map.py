"""The live map: every page of the pool, and what is known of the one that was picked."""

from typing import Any

import streamlit as st

from dashboard.components import mount
from dashboard.inspector import inspect
from dashboard.live_pages import Follower
from dashboard.page_table_view import show_table
from dashboard.view_parts import (
    NOTHING,
    choose_follower,
    counted,
    figures,
    grafana_link,
    keep_looks,
    kept,
    needs_map,
    period,
    prompt_command,
    query_id,
    query_moment,
    query_page,
    share,
)

HZ = 10
LOOKS = {  # ways to look at the map, by their name in the address; the first one is the default
    "colour": ("state", "owner", "fill", "refs", "age"),
    "layout": ("physical", "request", "eviction", "age"),
}


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is None:
        return
    st.fragment(_live, run_every=period())(follower)


def _live(follower: Follower) -> None:
    """Figures above, map on the left, inspector on the right; all of one fragment, a run a second."""
    period()
    if not needs_map(follower):
        return
    _figures(follower)
    warning = st.empty()  # what follows keeps its place
    found = follower.live_map.violations
    if found:
        last = found[-1]
        words = f"{last.subject}: expected {last.expected}, found {last.found}"
        warning.error(f"The live audit found {counted(len(found), 'violation')}. {words}. See Integrity.")
    if st.session_state.get("as_table"):
        show_table(follower)
    else:
        left, right = st.columns([3, 1], gap="medium")
        with left:
            _map(follower)
        with right:
            inspect(follower)
    below, link = st.columns([3, 1])
    below.toggle("Table", key="as_table", help="the same pages as rows")
    with link:
        grafana_link()


def _figures(follower: Follower) -> None:
    live = follower.live_map
    totals, geometry, status = live.totals(), live.geometry(), follower.status
    usable = geometry.page_count - totals["reserved_pages"]
    available = totals["free_pages"] + totals["cached_pages"]
    active = totals["active_pages"]
    looked_up = sum(
        totals[f"{name}_tokens_total"] for name in ("hit", "miss_cold", "miss_evicted", "unaligned")
    )
    figures(
        {
            "Available": share(available, usable),
            "In use": f"{active:,}",
            "Cached": f"{totals['cached_pages']:,}",
            "Unfilled": share(totals["wasted_slots"], active * geometry.page_size, 1),
            "Refs/page": f"{totals['references'] / active:.2f}" if active else NOTHING,
            "Hits": share(totals["hit_tokens_total"], looked_up),
            "Regret": share(totals["miss_evicted_tokens_total"], looked_up, 1),
        },
        is_stale=status.kind not in ("live", "resync"),
    )


def _map(follower: Follower) -> None:
    data: dict[str, Any] = {
        "worker": follower.worker_id,
        "hz": HZ,
        "selected": query_page(),
        "owner": _ringed_owner(follower),
        "at": query_moment(),
        "prompt_command": prompt_command(),
        **{name: kept(name, choices) for name, choices in LOOKS.items()},
    }
    mount("page_map.js", data, key="page_map", on_picked=_take_pick, on_looked=_take_look)


def _take_look() -> None:
    keep_looks("page_map", LOOKS)


def _take_pick() -> None:
    picked = st.session_state["page_map"].get("picked") or {}
    page = picked.get("page", -1)
    more = st.session_state.get("more_pages", [])
    before = query_page()
    if page < 0:
        st.query_params.pop("page", None)
        st.session_state["more_pages"] = []
        return
    if picked.get("more") and before is not None:
        st.session_state["more_pages"] = [before, *(each for each in more if each != before)][:7]
    else:
        st.session_state["more_pages"] = []
    st.query_params.pop("req", None)
    st.query_params["page"] = str(page)


def _ringed_owner(follower: Follower) -> int:
    """Of the request that the URL names."""
    request_id = query_id("req")
    if not request_id:
        return 0
    owners = [each.owner for each in follower.live_map.sequences() if each.request_id == request_id]
    return owners[0] if owners else 0


show()
