"""The prefix tree: what the cache holds, as an icicle, with the ghosts of what it held."""

from itertools import islice
from typing import Any

import streamlit as st

from dashboard import process
from dashboard.components import mount
from dashboard.live_pages import Follower
from dashboard.tree import MAX_GHOSTS, PLANES, Node, Tree, build_tree
from dashboard.view_parts import choose_follower, counted, keep_looks, kept, needs_map, period

PERIOD_SECONDS = 5.0
LOOKS = {"shade": ("last use", "hits", "refs")}


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is not None:
        st.fragment(_live, run_every=period(PERIOD_SECONDS))(follower)


def _live(follower: Follower) -> None:
    period()
    if not needs_map(follower):
        return
    server = process.live_pages().server
    if server is not None and server.features and "prefix_cache" not in server.features:
        st.info("The prefix cache is off: the service does not name it among its features.")
        return
    with st.container(horizontal=True):
        is_pinned_only = st.toggle("pinned only", key="pinned_only")
        all_ghosts = st.toggle(
            "all ghosts", key="all_ghosts", help="evicted prefixes that nobody asked for again, too"
        )
    tree = _tree(follower, is_pinned_only=is_pinned_only, all_ghosts=all_ghosts)
    if not tree.nodes:
        st.info("Nothing is pinned." if is_pinned_only else "Nothing is cached yet: no page is sealed.")
        return
    pages, roots = counted(tree.num_pages, "sealed page"), counted(tree.num_roots, "first page")
    words = f"{pages} under {roots} · {tree.depth:,} deep"
    shade = kept("shade", LOOKS["shade"])
    data = {"nodes": [drawn(node) for node in tree.nodes], "words": words, "shade": shade}
    mount("icicle.js", data, key="icicle", on_picked=_take_pick, on_looked=_take_look)
    page = st.session_state.get("tree_page")
    if page is not None and st.button(f"Show page {page} on the map", key="tree_go"):
        wanted = {**st.query_params.to_dict(), "page": str(page)}
        st.switch_page("views/page_map.py", query_params=wanted)
    st.caption(
        "Each rectangle is a run of pages without a branch, as wide as all that hangs below it. "
        "Click: zoom, and again: back. Right click: copy the fingerprint."
    )


def _tree(follower: Follower, *, is_pinned_only: bool, all_ghosts: bool) -> Tree:
    live = follower.live_map
    with live.lock:
        planes = live.planes(PLANES)
        ghosts = list(islice(live.ghosts.gone(0 if all_ghosts else 1), MAX_GHOSTS))
        uptime, clock = live.uptime_ms, live.clock_ms
    return build_tree(planes, uptime, ghosts, clock, is_pinned_only=is_pinned_only)


def drawn(node: Node) -> dict[str, Any]:
    """What the browser gets of a node."""
    if node.is_rest:
        label = f"… {node.weight}"
    elif node.is_ghost:
        label = f"ghost {node.pages}"
    else:
        label = f"{counted(node.pages, 'page')} · {counted(node.hits, 'hit')}"
    return {
        "id": node.id,
        "parent": node.parent,
        "pages": node.pages,
        "weight": node.weight,
        "page": node.page,
        "hits": node.hits,
        "refs": node.refs,
        "idle_ms": node.idle_ms,
        "fingerprint": node.fingerprint,
        "pinned": node.is_pinned,
        "ghost": node.is_ghost,
        "rest": node.is_rest,
        "returns": node.returns,
        "label": label,
    }


def _take_look() -> None:
    keep_looks("icicle", LOOKS)


def _take_pick() -> None:
    picked = st.session_state["icicle"].get("picked") or {}
    st.session_state["tree_page"] = picked.get("page")


show()
