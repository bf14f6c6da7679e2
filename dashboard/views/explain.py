"""How it works: tokens, pages, slots, rows and the lanes of a kernel, drawn from the running pool."""

from typing import Any

import streamlit as st

from dashboard.components import mount
from dashboard.kernel_mapping import MAX_HEAD_SIZE, MIN_HEAD_SIZE, KernelMapping
from dashboard.live_map import Geometry
from dashboard.live_pages import Follower
from dashboard.view_parts import (
    SECOND_TAB,
    choose_follower,
    counted,
    needs_map,
    prompt_command,
    sequence_name,
)
from kvatlas.client.page_map import SequencePages

MAX_PAGES = 48
SHOWN_PAGE_SIZE = 16  # where the pool's own is none that the kernel was made for


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is None or not needs_map(follower):
        return
    geometry = follower.live_map.geometry()
    st.markdown(_pool_words(geometry))
    sequence = _choose(follower)
    if sequence is None:
        st.info(f"No sequence runs. Send a prompt: `{prompt_command()}`, or {SECOND_TAB}.")
        _look_again(follower)
        return
    most = min(len(sequence.page_ids), MAX_PAGES)
    position = int(st.slider("Page of the sequence", 0, most - 1, 0, key="position")) if most > 1 else 0
    data = drawing(sequence, position, geometry)
    mount("mapping.js", data, key="mapping")
    st.markdown(_words(sequence, position, geometry, data))


@st.fragment(run_every=1.0)
def _look_again(follower: Follower) -> None:
    """Runs the view again as soon as a sequence runs."""
    if _running(follower):
        st.rerun()


def _running(follower: Follower) -> list[SequencePages]:
    return [each for each in follower.live_map.sequences() if len(each.page_ids)]


def _choose(follower: Follower) -> SequencePages | None:
    """The sequence that was picked stays picked as long as it runs."""
    running = _running(follower)
    if not running:
        return _last(follower)
    by_name = {sequence_name(each.owner, each.request_id, each.choice_index): each for each in running}
    held = st.session_state.get("explained")
    if held not in by_name:
        st.session_state["explained"] = next(iter(by_name))
    chosen = by_name[st.selectbox("Sequence", list(by_name), key="explained")]
    st.session_state["last_explained"] = (follower.worker_id, chosen)
    return chosen


def _last(follower: Follower) -> SequencePages | None:
    """What was drawn last, which the reader may still be at: answers are short."""
    worker_id, sequence = st.session_state.get("last_explained", ("", None))
    if sequence is None or worker_id != follower.worker_id:
        return None
    name = sequence_name(sequence.owner, sequence.request_id, sequence.choice_index)
    st.caption(f"{name} has ended: this is how it was.")
    found: SequencePages = sequence
    return found


def drawing(sequence: SequencePages, position: int, geometry: Geometry) -> dict[str, Any]:
    """What the browser draws: numbers of this pool, and the kernel's mapping for its shape."""
    pages = sequence.page_ids[:MAX_PAGES].tolist()
    mapping = kernel_mapping(geometry)
    size = geometry.page_size
    return {
        "pages": pages,
        "position": position,
        "first_slot": pages[position] * size,
        "page_size": size,
        "filled": max(0, min(size, sequence.token_count - position * size)),
        "row": sequence.row,
        "kernel_page_size": mapping.page_size,
        "head_size": mapping.head_size,
        "warp": mapping.warp_of(position),
        "num_warps": mapping.num_warps,
        "key_lanes": mapping.key_lanes(),
        "value_lanes": mapping.value_lanes(),
        "vec_size": mapping.vec_size,
        "value_vec_size": mapping.value_vec_size,
    }


def kernel_mapping(geometry: Geometry) -> KernelMapping:
    """Of the pool's own shape where the kernel was made for it; else of the nearest one that it was."""
    own = KernelMapping(geometry.page_size, geometry.head_dim)
    if own.exists:
        return own
    head = min(max(geometry.head_dim // 8 * 8, MIN_HEAD_SIZE), MAX_HEAD_SIZE)
    nearest = KernelMapping(geometry.page_size, head)
    return nearest if nearest.exists else KernelMapping(SHOWN_PAGE_SIZE, head)


def _pool_words(geometry: Geometry) -> str:
    slots = (geometry.page_count - 1) * geometry.page_size  # without nobody's
    size = geometry.page_bytes * geometry.page_count / 2**20
    return (
        f"This pool has room for K and V of **{slots:,} tokens** in {geometry.page_count - 1:,} pages of "
        f"{geometry.page_size}: {counted(geometry.layer_count, 'layer')} x "
        f"{counted(geometry.kv_head_count, 'KV head')} x {counted(geometry.head_dim, 'number')}, "
        f"{geometry.page_bytes:,} bytes a page. One more, page "
        f"{geometry.dummy_page}, is nobody's: padding reads and writes there. {size:,.0f} MiB in all."
    )


def _words(sequence: SequencePages, position: int, geometry: Geometry, data: dict[str, Any]) -> str:
    size, page = geometry.page_size, int(sequence.page_ids[position])
    first, token = position * size, position * size + 1
    row = "no row now" if sequence.row is None else f"row {sequence.row}"
    same = (
        ""
        if data["kernel_page_size"] == size and data["head_size"] == geometry.head_dim
        else (
            f" (drawn for pages of {data['kernel_page_size']} and heads of {data['head_size']}: "
            "the kernel was never made for this pool's shape)"
        )
    )
    name = sequence.request_id or f"#{sequence.owner}"
    return f"""
1. **Tokens → pages.** Tokens {first} … {first + size - 1} of {name} are in page {page}. Only the order in the
   sequence counts; where the page lies does not.
2. **Pages → slots.** A slot is the place of one token: `page x {size} + offset`. Token {token} is in slot
   `{page} x {size} + 1 = {page * size + 1}`, in every layer.
3. **Rows.** The page table on the device has one row for each running sequence; this one has {row}. Its
   entries are slots, one for each token, so a kernel may ignore the page size.
4. **Warps.** In the historical kernel a warp of 32 lanes takes a whole page, warps take turns: position
   {position} goes to warp {data["warp"]} of {data["num_warps"]}. Point at a cell above: it shows what one
   lane reads of K and of V{same}.
"""


show()
