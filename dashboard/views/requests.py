"""Requests: one ribbon per sequence, its pages in token order, and who waits for what."""

from collections import Counter
from typing import Any

import streamlit as st

from dashboard.components import mount
from dashboard.live_pages import Follower
from dashboard.view_parts import (
    SECOND_TAB,
    choose_follower,
    figures,
    keep_looks,
    kept,
    needs_map,
    period,
    prompt_command,
    sequence_name,
    short_id,
)
from kvatlas.client.page_map import SequencePages

MAX_SHOWN = 200
LOOKS = {"sort": ("newest", "pages", "wait")}
WAIT_WORDS = {
    "pages": "needs {needed} pages: {free} free + {evictable} evictable",
    "rows": "needs a row of the page table",
    "step_tokens": "waits for the token budget of a step",
    "priority": "others of higher priority go first",
    "": "next in the queue",
}


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is not None:
        st.fragment(_live, run_every=period())(follower)


def _live(follower: Follower) -> None:
    period()
    if not needs_map(follower):
        return
    live = follower.live_map
    sequences, totals, geometry = live.sequences(), live.totals(), live.geometry()
    running = [each for each in sequences if each.owner]
    waiting = [each for each in sequences if not each.owner]
    figures(
        {
            "Running": f"{len(running):,}",
            "Waiting": f"{len(waiting):,}",
            "Pages in use": f"{totals['active_pages']:,}",
            "Pages saved by sharing": f"{totals['references'] - totals['active_pages']:,}",
            "Preemptions": f"{totals['preemptions_total']:,}",
        },
        is_stale=follower.status.kind not in ("live", "resync"),
    )
    if not sequences:
        st.info(f"No sequences. Send a prompt: `{prompt_command()}`, or {SECOND_TAB}.")
        return
    rows = ribbons(sequences, totals, geometry.page_size, _rates(follower, running))
    total = f"{len(rows):,} of {len(sequences):,} sequences"
    data = {
        "sequences": rows,
        "page_size": geometry.page_size,
        "total": total,
        "sort": kept("sort", LOOKS["sort"]),
    }
    mount("ribbons.js", data, key="ribbons", on_picked=_take_pick, on_looked=_take_look)
    _go()


def ribbons(
    sequences: list[SequencePages], totals: dict[str, int], page_size: int, rates: dict[int, float]
) -> list[dict[str, Any]]:
    """What the browser draws, the newest 200."""
    holders = Counter(page for each in sequences for page in set(each.page_ids.tolist()))
    newest = sorted(sequences, key=lambda each: -each.receive_ms)[:MAX_SHOWN]
    return [_ribbon(each, holders, totals, page_size, rates) for each in newest]


def _ribbon(
    one: SequencePages, holders: Counter[int], totals: dict[str, int], page_size: int, rates: dict[int, float]
) -> dict[str, Any]:
    pages = one.page_ids.tolist()
    tail = one.token_count - (len(pages) - 1) * page_size if pages else 0
    return {
        "key": f"{one.request_id}/{one.choice_index}/{one.owner}",
        "name": sequence_name(one.owner, one.request_id, one.choice_index)
        if one.owner
        else short_id(one.request_id),
        "request_id": one.request_id,
        "owner": one.owner,
        "state": one.state,
        "receive_ms": one.receive_ms,
        "pages": pages,
        "cached": min(one.hit_tokens // page_size, len(pages)),
        "tail": min(1.0, max(0.0, tail / page_size)),
        "shared": [place for place, page in enumerate(pages) if holders[page] > 1],
        "words": _words(one, len(pages), tail, totals, page_size, rates),
    }


def _words(
    one: SequencePages,
    num_pages: int,
    tail: int,
    totals: dict[str, int],
    page_size: int,
    rates: dict[int, float],
) -> str:
    if not one.owner:
        words = WAIT_WORDS.get(one.wait_reason, one.wait_reason).format(
            needed=one.needed_pages, free=totals["free_pages"], evictable=totals["cached_pages"]
        )
        return f"preempted: will compute its tokens again · {words}" if one.state == "preempted" else words
    cached = min(one.hit_tokens // page_size, num_pages)
    rate = rates.get(one.owner)
    speed = f" · {rate:.0f} tok/s" if rate else ""
    return f"{one.state} · {cached} cached | {num_pages - cached} computed | tail {tail}/{page_size}{speed}"


def _rates(follower: Follower, running: list[SequencePages]) -> dict[int, float]:
    """Tokens a second by owner, from the counts of this tab's run before, of the same life of the worker."""
    clock, epoch = follower.live_map.clock_ms, follower.live_map.geometry().epoch
    # Owners are numbers, given anew by each worker and again when a sequence has ended; ids may be hidden.
    now = {
        (follower.worker_id, epoch, each.owner, each.request_id, each.receive_ms): each for each in running
    }
    then_clock, then = st.session_state.get("token_counts", (clock, {}))
    st.session_state["token_counts"] = (clock, {name: each.token_count for name, each in now.items()})
    seconds = (clock - then_clock) / 1000
    if seconds <= 0:
        return {}
    return {
        each.owner: (each.token_count - then[name]) / seconds for name, each in now.items() if name in then
    }


def _take_look() -> None:
    keep_looks("ribbons", LOOKS)


def _take_pick() -> None:
    """A page or a sequence was picked; a callback must not leave the view, so that comes after it."""
    picked = st.session_state["ribbons"].get("picked") or {}
    if "page" in picked:
        st.session_state["go"] = {"page": str(picked["page"])}
    elif picked.get("request_id") or picked.get("request"):
        st.session_state["go"] = {"req": str(picked["request"])}


def _go() -> None:
    wanted = st.session_state.pop("go", None)
    if wanted:
        st.switch_page("views/page_map.py", query_params={**st.query_params.to_dict(), **wanted})


show()
