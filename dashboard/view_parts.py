"""What every view needs: whose pool is shown, what is wrong if it is not, and how often to look again."""

import re
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from dashboard import process
from dashboard.live_pages import Follower
from kvatlas.client.channel import DEFAULT_ADDRESS

TAB_SECONDS = 6.0  # a tab that has not been heard of for this long is closed
SECONDS_PER_TAB = 0.24  # so that fragments together stay below half a core
ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
NUMBER = re.compile(r"[0-9]{1,15}")
MAX_PAGE = 0xFFFFFFFE  # of the messages: u32, of which the last says "no page"
NOTHING = "n/a"
GRAFANA_MS = 300_000  # before and after a moment
LONGEST_ID, ID_END = 16, 8  # characters of an id that is shown whole; of a longer one
HELP = {
    "Available": "free pages and those that may be evicted, of all that can be used",
    "Unfilled": "slots of pages in use that hold no token yet",
    "Refs/page": "sequences that refer to a page in use; above 1: pages saved by sharing",
    "Hits": "prompt tokens that were found in the prefix cache, since the worker started",
    "Regret": "prompt tokens that had been in the cache and were evicted: more memory would have kept them",
    "Bill": "pages in use times the seconds that they were",
    "Tail": "slots that no token filled when it ended",
}
"""Of figures whose name is not enough."""
SECOND_TAB = "use the playground in a second tab: an answer ends when its view is left"
"""How to have a sequence to look at without a shell."""

_tabs: dict[str, float] = {}
_tabs_lock = threading.Lock()


def note_tab() -> int:
    """Says that this tab is open; how many are."""
    context = get_script_run_ctx(suppress_warning=True)
    now = time.monotonic()
    with _tabs_lock:
        if context is not None:
            _tabs[context.session_id] = now
        for name in [name for name, seen in _tabs.items() if now - seen > TAB_SECONDS]:
            del _tabs[name]
        return len(_tabs)


def query_id(name: str) -> str:
    """An id in the address, or "": what is no id is not shown, since anybody can make a link."""
    text = st.query_params.get(name, "")
    return text if ID.fullmatch(text) else ""


def query_page() -> int | None:
    """The page that the address names; None: no number that a page could have."""
    page = _query_number("page")
    return page if page is not None and page <= MAX_PAGE else None


def query_moment() -> int | None:
    """The moment that the address names, ms since 1970; None: what is there is none."""
    return _query_number("t")


def _query_number(name: str) -> int | None:
    text = st.query_params.get(name, "")
    return int(text) if NUMBER.fullmatch(text) else None


def kept(name: str, choices: Sequence[str]) -> str:
    """A choice that the address names, or else the one that was made last in this tab, or the first one.

    Navigation drops what stands in the address; the tab remembers it.
    """
    text = st.query_params.get(name) or st.session_state.get(f"kept_{name}", "")
    return text if text in choices else choices[0]


def keep(name: str, value: str, choices: Sequence[str]) -> None:
    """Notes a choice, in the address too; the first choice is what an address without it means."""
    if value not in choices:
        return
    st.session_state[f"kept_{name}"] = value
    if value == choices[0]:
        st.query_params.pop(name, None)
    else:
        st.query_params[name] = value


def keep_looks(key: str, choices: Mapping[str, Sequence[str]]) -> None:
    """Notes how a component is looked at, as it has just said."""
    looked = st.session_state[key].get("looked") or {}
    for name, names in choices.items():
        if isinstance(looked.get(name), str):
            keep(name, looked[name], names)


def period(least_seconds: float = 1.0) -> float:
    """Seconds between two runs of a view's fragment."""
    return max(least_seconds, SECONDS_PER_TAB * note_tab())


def choose_follower() -> Follower | None:
    """The worker that is shown; None after an explanation why there is none."""
    pages = process.live_pages()
    followers = pages.followers()
    if not followers:
        _explain_no_worker()
        return None
    wanted = query_id("worker")
    if len(followers) > 1:
        wanted = wanted or st.session_state.get("kept_worker", "")
        names = [each.worker_id for each in followers]
        picked = st.segmented_control(
            "Worker", names, default=wanted if wanted in names else None, key="worker_choice"
        )
        if picked is None:
            _show_workers(followers)
            return None
        st.session_state["kept_worker"] = st.query_params["worker"] = wanted = picked
    follower = pages.follower(wanted) or pages.follower("")
    if follower is None:
        st.warning(f"No worker is called {wanted!r}.")
        return None
    return follower


def needs_map(follower: Follower) -> bool:
    """Whether there is a map; explains if there is none."""
    # What follows keeps its place on the page, whether there is a word of warning or not: a component that
    # moves is made anew, with a new socket.
    place = st.empty()
    status = follower.status
    if follower.live_map.is_whole:
        if status.kind in ("stale", "no_service", "gone", "bug", "denied", "limit"):
            place.caption(
                f":orange[**{words_of(status.kind)}**, {status.age_seconds:.0f} s: {status.reason}]"
            )
        return True
    explain(status.kind, status.reason)
    return False


def words_of(kind: str) -> str:
    """A status as people say it."""
    return {
        "no_service": "no service",
        "denied": "not allowed",
        "limit": "too many watches",
        "gone": "this worker is gone",
        "bug": "the feed did not fit",
    }.get(kind, kind)


def explain(kind: str, reason: str) -> None:
    """Why there is no map, and what to do."""
    address = process.live_pages().source.address
    if kind == "denied":
        st.error(f"**Not allowed.** {reason}")
        st.markdown(
            "The dashboard sends the token in the file that `--token-file` names; it needs `cache.read`."
        )
    elif kind == "limit":
        st.error(f"**Too many watches.** {reason}")
    elif kind == "no_service":
        st.error(f"**No service at {address}.** {reason}")
        st.markdown(
            "Start one with `kvatlas serve`, or name another: `kvatlas dashboard --address HOST:PORT`."
        )
    elif kind == "bug":
        st.error(f"**{words_of(kind).capitalize()}.** {reason}")
    elif kind == "gone":
        st.error(f"**This worker is gone.** {reason}")
    else:
        st.info(f"Connecting to {address} … {reason}")


def prompt_command() -> str:
    """What sends a prompt to the server that is shown, as a shell takes it."""
    address = process.live_pages().source.address
    where = "" if address == DEFAULT_ADDRESS else f" --address {shlex.quote(address)}"
    return f"kvatlas generate 'The sky is'{where}"


def figures(values: Mapping[str, str], *, is_stale: bool = False) -> None:
    """One line of figures; struck while they are not of now."""
    with st.container(horizontal=True, gap="small"):
        for label, value in values.items():
            shown = f"~~{value}~~" if is_stale else value
            st.metric(label, shown, width="content", help=HELP.get(label))


def share(part: float, whole: float, digits: int = 0) -> str:
    """A percentage, or a dash where there is nothing to divide by."""
    return f"{100 * part / whole:.{digits}f}%" if whole else NOTHING


def span(seconds: float) -> str:
    """A duration in the unit that people would take."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(number: int, what: str) -> str:
    """`1 hit`, `2 hits`."""
    return f"{number:,} {what}" + "s" * (number != 1)


def sequence_name(owner: int, request_id: str, choice_index: int = 0) -> str:
    """How a sequence is called on the screen: by its owner number, and by its request where that is known."""
    name = f"#{owner}" + (f"/{choice_index}" if choice_index else "")
    return f"{name} {short_id(request_id)}" if request_id else name


def short_id(request_id: str) -> str:
    """An id as far as it fits beside other things. Ids that the service makes begin alike: the end tells."""
    return request_id if len(request_id) <= LONGEST_ID else f"…{request_id[-ID_END:]}"


def grafana_link(dashboard: str = "pages") -> None:
    """A link to Grafana, where the config says that there is one; around the moment that is shown."""
    url = process.config().grafana_url.rstrip("/")
    if url:
        st.markdown(f"[Grafana]({url}/d/kvatlas-{dashboard}?{_grafana_range()})")


def _grafana_range() -> str:
    moment = query_moment()
    if moment is None:
        return "from=now-15m&to=now"
    return f"from={max(0, moment - GRAFANA_MS)}&to={moment + GRAFANA_MS}"


def theme_kind() -> str:
    """`dark` or `light`: the ground that the browser shows."""
    return "dark" if st.context.theme.type == "dark" else "light"


def clock_text(ms: float) -> str:
    """A moment as a clock of the browser's time zone shows it."""
    try:
        zone: tzinfo = ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        zone = UTC
    return datetime.fromtimestamp(ms / 1000, zone).strftime("%H:%M:%S")


def _explain_no_worker() -> None:
    pages = process.live_pages()
    if pages.failure:
        explain(pages.failure_kind, pages.failure)
    elif pages.server is not None:
        st.info("The service runs, and has no worker yet.")
    else:
        explain("connecting", "")
    _look_again()


@st.fragment(run_every=1.0)
def _look_again() -> None:
    """Runs the view again as soon as there is a worker."""
    if process.live_pages().followers():
        st.rerun()


def _show_workers(followers: Sequence[Follower]) -> None:
    for column, follower in zip(st.columns(len(followers)), followers, strict=True):
        load = follower.load
        available = share(load.available_pages, load.total_pages) if load else NOTHING
        column.metric(follower.worker_id, available, help="pages that are free or may be evicted")
