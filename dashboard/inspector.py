"""The inspector: one page in words, its holders, its place in the prefix tree, its last events."""

import pandas as pd
import streamlit as st

from dashboard import process
from dashboard.facts import PageFacts
from dashboard.live_pages import Follower
from dashboard.view_parts import clock_text, counted, query_id, query_page, sequence_name, short_id, span
from kvatlas.client.errors import KvatlasError
from kvatlas.client.page_map import SequencePages

MAX_ROWS = 512


def inspect(follower: Follower) -> None:
    """What the URL's `page` or `req` names; a hint where it names nothing."""
    request_id = query_id("req")
    selected, more = query_page(), st.session_state.get("more_pages", [])
    if request_id:
        _request(follower, request_id)
    for page in dict.fromkeys([selected, *more]):  # each once: its widgets are named by it
        if page is not None:
            _page(follower, page)
    if not request_id and selected is None:
        st.caption("Click a page. Shift-click adds one. Arrows, Enter, Esc, + - 0, g, c, l work on the map.")


def _page(follower: Follower, page_id: int) -> None:
    live = follower.live_map
    if not live.is_whole:
        return
    try:
        facts = process.live_pages().source.page(follower.worker_id, page_id)
    except KvatlasError as failure:
        st.subheader(f"Page {page_id}", anchor=False)
        st.caption(str(failure))
        return
    size = live.geometry().page_size
    st.subheader(f"Page {page_id}", anchor=False)
    marks = ["sealed"] * facts.is_sealed + ["pinned"] * facts.is_pinned
    first = page_id * size
    lines = [
        " · ".join(
            [
                f"**{facts.state}**",
                f"{facts.filled_slots}/{size} slots",
                counted(facts.ref_count, "ref"),
                *marks,
            ]
        ),
        f"allocated {span(facts.age_seconds)} ago · idle {span(facts.idle_seconds)}",
        f"slots {first:,} … {first + size - 1:,}",
        *_prefix(facts),
    ]
    st.markdown("  \n".join(lines))
    _holders(follower, facts)
    _events(facts)


def _holders(follower: Follower, facts: PageFacts) -> None:
    if not facts.holders:
        return
    st.caption("used by")
    for holder in facts.holders[:8]:
        name = sequence_name(holder.owner, holder.request_id, holder.choice_index)
        key = f"holder-{facts.page_id}-{holder.owner}"
        if st.button(f"{name} · {holder.state} · {counted(holder.token_count, 'token')}", key=key):
            st.query_params["req"] = holder.request_id
            st.rerun(scope="fragment")
    if len(facts.holders) > 8:
        st.caption(f"and {len(facts.holders) - 8} more")


def _prefix(facts: PageFacts) -> list[str]:
    if not facts.is_sealed:
        return []
    parent = "first of its prefix" if facts.parent_page_id is None else f"after page {facts.parent_page_id}"
    children = ", ".join(map(str, facts.child_page_ids[:6]))
    more = f" and {len(facts.child_page_ids) - 6} more" if len(facts.child_page_ids) > 6 else ""
    then = f" · then {children}{more}" if children else ""
    return [f"prefix: {parent}{then} · {counted(facts.hit_count, 'hit')}"]


def _events(facts: PageFacts) -> None:
    if not facts.events:
        return
    rows = [
        {
            "time": clock_text(event.time_ms),
            "event": event.kind,
            "sequence": f"#{event.owner}" if event.owner else "",
            "refs": event.ref_count,
        }
        for event in reversed(facts.events)
    ]
    st.dataframe(pd.DataFrame(rows), hide_index=True, height=min(36 * len(rows) + 38, 260))


def _request(follower: Follower, request_id: str) -> None:
    """A sequence: logical page → page → first slot, as the page table has it."""
    found = [each for each in follower.live_map.sequences() if each.request_id == request_id]
    st.subheader(f"Request {short_id(request_id)}", anchor=False)
    if short_id(request_id) != request_id:
        st.caption(request_id)
    if not found:
        st.caption("has ended")
    for sequence in found[:4]:
        _sequence(follower, sequence)
    if st.button("close", key="close-request"):
        st.query_params.pop("req", None)
        st.rerun(scope="fragment")


def _sequence(follower: Follower, sequence: SequencePages) -> None:
    size = follower.live_map.geometry().page_size
    cached = sequence.hit_tokens // size
    st.markdown(
        f"#{sequence.owner} **{sequence.state}** · {counted(sequence.token_count, 'token')} on "
        f"{counted(len(sequence.page_ids), 'page')} · {cached} from the cache"
    )
    device = st.toggle("compare with the device", key=f"device-{sequence.owner}", help="needs `admin`")
    slots = _device_slots(follower, sequence) if device else None
    pages = sequence.page_ids[:MAX_ROWS].tolist()
    rows = []
    for place, page in enumerate(pages):
        row: dict[str, object] = {"position": place, "page": page, "first slot": page * size}
        if slots is not None:
            seen = slots[place * size] if place * size < len(slots) else None
            row |= {"device": seen, "same": seen == page * size}
        row["cached"] = place < cached
        rows.append(row)
    st.dataframe(pd.DataFrame(rows), hide_index=True, height=min(36 * len(rows) + 38, 300))


def _device_slots(follower: Follower, sequence: SequencePages) -> tuple[int, ...] | None:
    """The row of the page table as the device holds it; a sentence where that cannot be had."""
    if sequence.row is None:
        st.caption("It has no row of the page table now.")
        return None
    source = process.live_pages().source
    try:
        rows = source.table_rows(follower.worker_id, [sequence.row], from_device=True)
    except KvatlasError as failure:
        st.caption(str(failure))
        return None
    mine = [row for row in rows if row.owner == sequence.owner]
    return mine[0].slots if mine else None
