"""The map as rows: for screen readers, for sorting, and for copying."""

import numpy as np
import pandas as pd
import streamlit as st

from dashboard.live_pages import Follower
from dashboard.theme import STATES
from kvatlas.client.page_map import STATE_NAMES

MAX_ROWS = 5000
PLANES = (
    "states",
    "flags",
    "ref_counts",
    "filled_slots",
    "owners",
    "hit_counts",
    "parent_page_ids",
    "used_ms",
)
NO_PAGE = 0xFFFFFFFF


def show_table(follower: Follower) -> None:
    """Pages by state and owner, 5 000 rows at most."""
    state, owner = st.columns(2)
    wanted = state.multiselect("State", STATES, default=["active"], key="table_states")
    wanted_owner = owner.number_input("Sequence #", min_value=0, value=0, key="table_owner", help="0: all")
    rows = table(follower, wanted, int(wanted_owner))
    st.dataframe(rows, hide_index=True, height=520)
    st.caption(f"{len(rows):,} rows" + (" (the first ones)" if len(rows) == MAX_ROWS else ""))


def table(follower: Follower, states: list[str], owner: int) -> pd.DataFrame:
    """Rows of the pages that match."""
    live = follower.live_map
    if not live.is_whole:
        return pd.DataFrame()
    planes = live.planes(PLANES)
    numbers = [number for number, name in STATE_NAMES.items() if name in states]
    is_wanted = np.isin(planes["states"], numbers)
    if owner:
        is_wanted &= planes["owners"] == owner
    pages = np.flatnonzero(is_wanted)[:MAX_ROWS]
    parents = planes["parent_page_ids"][pages].astype(np.int64)
    idle = np.uint32(live.uptime_ms) - planes["used_ms"][pages].astype(np.uint32)
    return pd.DataFrame(
        {
            "page": pages,
            "state": [STATE_NAMES.get(int(each), "unknown") for each in planes["states"][pages]],
            "sequence": planes["owners"][pages],
            "refs": planes["ref_counts"][pages],
            "filled": planes["filled_slots"][pages],
            "hits": planes["hit_counts"][pages],
            "sealed": (planes["flags"][pages].astype(np.int64) & 1) == 1,
            "parent": [None if each == NO_PAGE else each for each in parents.tolist()],
            "idle s": np.round(idle / 1000, 1),
        }
    )
