"""Integrity: what the worker's audit says of its books, and what the copy here says of itself."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import process
from dashboard.facts import CheckFacts, IntegrityFacts, ViolationFacts
from dashboard.live_pages import Follower
from dashboard.mirror_checks import check_mirror
from dashboard.recordings import save_past
from dashboard.view_parts import choose_follower, clock_text, counted, needs_map, period
from kvatlas.client.errors import KvatlasError

ROW = 3  # tiles side by side
MEANS = {
    "state_sum": "every page is in one state; the states add up to the pool",
    "refcount": "references of a page are the rows that hold it",
    "free_list": "the free list has each free page once, and no other",
    "page_table": "no row twice; pages of a sequence fit its tokens",
    "trie": "sealed pages, and only they, are in the prefix index",
    "device_table": "rows on the device are what the books say",
}
RECORD_SECONDS = 300


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is None:
        return
    st.fragment(_live, run_every=period())(follower)
    left, right = st.columns(2)
    with left:
        _full_check(follower)
    with right:
        _download(follower)
        _record(follower)


def _live(follower: Follower) -> None:
    period()
    if not needs_map(follower):
        return
    st.subheader("The worker's audit", anchor=False)
    st.caption("The worker checks its own books while requests run.")
    try:
        facts = process.live_pages().source.integrity(follower.worker_id)
    except KvatlasError as failure:
        st.caption(f"No audit: {failure}")
    else:
        _audit(facts, follower.live_map.clock_ms)
    st.subheader("This copy", anchor=False)
    with follower.live_map.locked() as page_map:
        checks = check_mirror(page_map)
    st.caption("What this dashboard holds of the pool, checked against itself now.")
    for column, check in zip(st.columns(len(checks)), checks, strict=True):
        words = f"{check.num_faults} pages: {check.pages}" if check.num_faults else "holds on every page"
        _tile(column, check.name, check.words, words, is_wrong=check.num_faults > 0)
    if follower.faults:
        st.caption(
            f"{follower.faults} messages of the feed did not fit and were answered with a new snapshot."
        )


def _audit(facts: IntegrityFacts, clock_ms: float) -> None:
    for start in range(0, len(facts.checks), ROW):
        for column, check in zip(st.columns(ROW), facts.checks[start : start + ROW], strict=False):
            words, is_wrong = _passes(check, clock_ms)
            _tile(column, check.name, MEANS.get(check.name, ""), words, is_wrong=is_wrong)
    words = (
        f"{facts.sweep_count:,} times over every page · last round {facts.last_round_seconds * 1000:.2f} ms"
    )
    st.caption(f"{words} · {counted(facts.violations_total, 'violation')} in all")
    if facts.violations:
        st.dataframe(violations_table(facts.violations), hide_index=True)


def _passes(check: CheckFacts, clock_ms: float) -> tuple[str, bool | None]:
    """How often it held; whether it failed, None: nobody knows yet."""
    if check.last_run_ms is None:
        return "not run yet", None
    ago = max(0.0, clock_ms - check.last_run_ms) / 1000
    return f"{check.pass_count:,} passes · {check.fail_count:,} fails · {ago:.0f} s ago", check.fail_count > 0


def _tile(
    column: "st.delta_generator.DeltaGenerator", name: str, means: str, words: str, *, is_wrong: bool | None
) -> None:
    """One check: its mark, what it says, how it stands."""
    mark = {None: ":gray[…]", False: ":green[✔]", True: ":red[✘]"}[is_wrong]
    lines = [f"{mark} **{name}**", *([means] if means else []), f":small[{words}]"]
    column.container(border=True, height="stretch").markdown("  \n".join(lines))


def violations_table(violations: Sequence[ViolationFacts]) -> pd.DataFrame:
    """Both sides of each finding."""
    return pd.DataFrame(
        [
            {
                "check": each.check,
                "subject": each.subject,
                "expected": each.expected,
                "found": each.found,
                "page": each.page_id,
                "row": each.row,
                "time": clock_text(each.time_ms) if each.time_ms else "",
            }
            for each in violations
        ]
    )


def _full_check(follower: Follower) -> None:
    if not st.button("Run a full check", key="full_check", help="every page, every row; needs `admin`"):
        return
    try:
        with st.spinner("checking every page between steps"):
            run = process.live_pages().source.run_integrity_check(follower.worker_id)
    except KvatlasError as failure:
        st.error(str(failure))
        return
    stood = f"engine stood {run.engine_seconds * 1000:.1f} ms"
    words = f"{run.checked_pages:,} pages, {run.checked_rows:,} rows, {stood}"
    if run.violations_total:
        st.error(f"{counted(run.violations_total, 'violation')} · {words}")
        st.dataframe(violations_table(run.violations), hide_index=True)
    else:
        st.success(f"Everything holds · {words}")


def _download(follower: Follower) -> None:
    if follower.live_map.is_whole and st.toggle("Prepare a snapshot", key="wants_snapshot"):
        st.download_button(
            "Download snapshot (.npz)",
            follower.live_map.snapshot_bytes(),
            file_name=f"pages-{follower.worker_id}.npz",
            mime="application/octet-stream",
        )


def _record(follower: Follower) -> None:
    address = process.config().admin_server
    if not address:
        return
    if st.button(f"Save the last {RECORD_SECONDS // 60} minutes as a recording", key="record"):
        try:
            with st.spinner("the worker writes them"):
                data = save_past(address, follower.worker_id, RECORD_SECONDS)
        except KvatlasError as failure:
            st.error(str(failure))
            return
        name = f"{follower.worker_id}-{clock_text(follower.live_map.clock_ms).replace(':', '')}.kvrec"
        st.session_state["recording"] = (name, data)
    if "recording" in st.session_state:
        name, data = st.session_state["recording"]
        st.download_button(f"Download {name} ({len(data):,} bytes)", data, file_name=name)


show()
