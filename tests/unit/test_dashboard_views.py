"""Each view, run without a browser on a pool that stands still: figures, tables, every state of failure."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import process
from dashboard.config import DashboardConfig, from_args
from dashboard.demo_source import DemoSource
from dashboard.facts import IntegrityFacts, ServerFacts, ViolationFacts
from dashboard.live_pages import LivePages
from dashboard.spectrogram import FIGURES
from dashboard.view_parts import short_id
from kvatlas.client.errors import KvatlasError, PermissionDenied, Refused, Unavailable
from tests.dashboard_app import dashboard_app

VIEWS = ("page_map", "requests", "prefix_tree", "what_if", "timeline", "integrity", "playground", "explain")
SETTINGS = from_args([], {})


class BrokenSource(DemoSource):
    """A source whose calls fail as told."""

    failure: KvatlasError | None = None
    breaks_roster = False

    def server(self) -> ServerFacts:
        if self.breaks_roster and self.failure:
            raise self.failure
        return super().server()

    def watch(self, worker_id: str, resume_after: Any) -> Any:
        if self.failure:
            raise self.failure
        return super().watch(worker_id, resume_after)


@pytest.fixture(scope="module")
def source() -> DemoSource:
    return DemoSource(512, seed=4, is_frozen=True)


def install(source: DemoSource) -> LivePages:
    pages = LivePages(source)
    process.install(SETTINGS, pages)
    return pages


@pytest.fixture
def pages(source: DemoSource, wait_until: Callable[..., None]) -> Iterator[LivePages]:
    """A subscriber that has the whole map of the pool."""
    source._ended.clear()
    pages = install(source)
    pages.start()
    wait_until(lambda: (one := pages.follower("")) is not None and one.live_map.is_whole)
    yield pages
    process.shut_down()
    process.install(SETTINGS)


def run(view: str, **query: str) -> AppTest:
    app = dashboard_app()
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    if view != "page_map":
        app.switch_page(f"views/{view}.py").run()
    assert not app.exception, [each.value for each in app.exception]
    return app


def figures_of(app: AppTest) -> dict[str, str]:
    return {each.label: str(each.value) for each in app.metric}


def texts_of(app: AppTest) -> str:
    parts = [*app.markdown, *app.caption, *app.info, *app.error, *app.warning, *app.success, *app.subheader]
    return "\n".join(str(each.value) for each in parts)


def drawn(app: AppTest) -> dict[str, Any]:
    """What the browser is told, by module."""
    told = {}
    for each in app.get("bidi_component"):
        data = json.loads(each.proto.json)
        told[data["module"]] = data
    return told


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_runs(view: str, pages: LivePages) -> None:
    app = run(view)
    assert app.metric or app.get("bidi_component") or texts_of(app)


def test_the_map_shows_figures_that_the_pool_has(pages: LivePages, source: DemoSource) -> None:
    app = run("page_map")
    shown, states = figures_of(app), source.pool.planes["states"]
    active, cached, free = (int((states == number).sum()) for number in (2, 3, 1))
    assert shown["In use"] == f"{active:,}"
    assert shown["Cached"] == f"{cached:,}"
    assert shown["Available"] == f"{100 * (free + cached) / 511:.0f}%"
    told = drawn(app)["page_map.js"]
    assert told["worker"] == "demo-0"
    assert told["selected"] is None
    assert told["palette"]["states"]["active"]["dark"] == "#3a66c8"


def test_a_page_in_the_url_is_inspected(pages: LivePages, source: DemoSource) -> None:
    sequence = source.pool.running[0]
    page = sequence.pages[0]
    app = run("page_map", page=str(page))
    assert f"Page {page}" in texts_of(app)
    assert f"slots {page * 16:,} … {page * 16 + 15:,}" in texts_of(app)
    assert any(short_id(sequence.request_id) in str(each.label) for each in app.button)
    assert drawn(app)["page_map.js"]["selected"] == page
    events = app.dataframe[0].value
    assert events["event"].tolist()[-1] in ("allocated", "shared", "revived", "sealed", "released")


def test_a_page_that_does_not_exist_is_told(pages: LivePages) -> None:
    assert "page 9999 of 512" in texts_of(run("page_map", page="9999"))


def test_a_request_in_the_url_is_ringed_and_listed(pages: LivePages, source: DemoSource) -> None:
    sequence = source.pool.running[-1]
    app = run("page_map", req=sequence.request_id)
    assert drawn(app)["page_map.js"]["owner"] == sequence.owner
    table = app.dataframe[0].value
    assert table["page"].tolist() == sequence.pages
    assert table["first slot"].tolist() == [page * 16 for page in sequence.pages]
    assert table["cached"].sum() == sequence.hit_tokens // 16
    assert "has ended" in texts_of(run("page_map", req="nobody"))


def test_how_it_is_looked_at_stands_in_the_address(pages: LivePages) -> None:
    told = drawn(run("page_map", colour="owner", layout="eviction"))["page_map.js"]
    assert (told["colour"], told["layout"]) == ("owner", "eviction")
    told = drawn(run("page_map", colour="<b>", layout=""))["page_map.js"]
    assert (told["colour"], told["layout"]) == ("state", "physical"), "what is no choice is the first one"
    assert drawn(run("requests", sort="pages"))["ribbons.js"]["sort"] == "pages"
    assert drawn(run("prefix_tree", shade="hits"))["icicle.js"]["shade"] == "hits"


def test_a_choice_outlives_a_change_of_view(pages: LivePages) -> None:
    app = run("page_map")
    app.session_state["kept_colour"] = (
        "refs"  # as a choice on the map leaves it; navigation drops the address
    )
    app.run()
    assert drawn(app)["page_map.js"]["colour"] == "refs"


def test_long_ids_are_told_by_their_ends() -> None:
    assert short_id("chat-42") == "chat-42"
    assert short_id("01a229c1-6bae-742e-9ddc-20c1b1304907") == "…b1304907"


def test_the_table_has_the_pages_of_the_map(pages: LivePages, source: DemoSource) -> None:
    app = run("page_map")
    app.toggle(key="as_table").set_value(True).run()
    rows = app.dataframe[0].value
    assert len(rows) == int((source.pool.planes["states"] == 2).sum())
    assert set(rows["state"]) == {"active"}


def test_requests_show_every_sequence_with_its_pages(pages: LivePages, source: DemoSource) -> None:
    app = run("requests")
    pool = source.pool
    rows = {each["request_id"]: each for each in drawn(app)["ribbons.js"]["sequences"]}
    assert rows.keys() == {each.request_id for each in (*pool.running, *pool.waiting)}
    for sequence in pool.running:
        row = rows[sequence.request_id]
        assert row["pages"] == sequence.pages
        assert row["cached"] == min(sequence.hit_tokens // 16, len(sequence.pages))
        assert f"{row['cached']} cached" in row["words"]
    for sequence in pool.waiting:
        assert f"needs {sequence.needed_pages} pages" in rows[sequence.request_id]["words"]
    shown = figures_of(app)
    references = int(pool.planes["ref_counts"].sum())
    active = int((pool.planes["states"] == 2).sum())
    assert shown["Pages saved by sharing"] == f"{references - active:,}"


@pytest.mark.parametrize("is_same", [True, False])
def test_a_rate_is_of_one_sequence_not_of_two_that_had_a_number_after_another(
    pages: LivePages, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    """Without the scope `admin` requests of other tenants have no id."""
    follower = pages.follower("")
    assert follower is not None
    (first, *_) = [each for each in follower.live_map.sequences() if each.owner]
    hidden = replace(first, request_id="", token_count=500)
    monkeypatch.setattr(follower.live_map, "sequences", lambda: [hidden])
    app = run("requests")
    later = replace(hidden, token_count=600 if is_same else 10, receive_ms=hidden.receive_ms + (not is_same))
    monkeypatch.setattr(follower.live_map, "sequences", lambda: [later])
    follower.live_map.clock_ms += 2000
    app.run()
    (row,) = drawn(app)["ribbons.js"]["sequences"]
    assert ("50 tok/s" in row["words"]) == is_same
    assert ("tok/s" in row["words"]) == is_same


def test_the_tree_covers_all_sealed_pages(pages: LivePages, source: DemoSource) -> None:
    app = run("prefix_tree")
    nodes = drawn(app)["icicle.js"]["nodes"]
    sealed = int((source.pool.planes["flags"] & 1).sum())
    assert sum(node["pages"] for node in nodes if not node["ghost"]) == sealed
    app.toggle(key="pinned_only").set_value(True).run()
    nodes = drawn(app)["icicle.js"]["nodes"]
    assert nodes
    assert all(node["pinned"] for node in nodes)


def test_what_if_asks_only_when_told_and_shows_today(pages: LivePages) -> None:
    app = run("what_if")
    assert not app.metric
    app.button[0].click().run()
    assert not app.exception
    shown = figures_of(app)
    assert shown["Estimate, today"] == shown["Observed"]
    assert shown["Twice the memory"].endswith("%")


@pytest.mark.parametrize("page_size", [1, 256])
def test_what_if_offers_the_page_size_that_the_pool_has(
    pages: LivePages, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    follower = pages.follower("")
    assert follower is not None
    geometry = replace(follower.live_map.geometry(), page_size=page_size)
    monkeypatch.setattr(follower.live_map, "geometry", lambda: geometry)
    assert run("what_if").button_group(key="sizes").value == [page_size]


@pytest.mark.parametrize("looked_up", [0, 160])
def test_results_of_look_ups_are_drawn_where_there_were_any(
    pages: LivePages, monkeypatch: pytest.MonkeyPatch, looked_up: int
) -> None:
    figures, times_ms = np.zeros((2, len(FIGURES)), np.uint32), np.array([0.0, 1000.0])
    figures[1, FIGURES.index("hit_tokens")] = looked_up
    follower = pages.follower("")
    assert follower is not None
    monkeypatch.setattr(follower.live_map.spectrogram, "figures", lambda since: (figures, times_ms))
    app = run("what_if")
    assert len(app.get("vega_lite_chart")) == (1 if looked_up else 0)
    assert f"{looked_up} prompt tokens were looked up in the prefix cache" in texts_of(app)


def test_integrity_shows_the_audit_and_the_copy(pages: LivePages) -> None:
    app = run("integrity")
    text = texts_of(app)
    for name in ("state_sum", "refcount", "free_list", "trie", "references", "parents"):
        assert f":green[✔] **{name}**" in text
    app.button(key="full_check").click().run()
    assert "Everything holds · 512 pages" in texts_of(app)


def test_a_violation_is_shown_with_both_sides(pages: LivePages, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ViolationFacts("refcount", "references of page 7", "1", "2", 7, None, 1_767_261_600_000)

    def integrity(worker_id: str) -> IntegrityFacts:
        sound = DemoSource.integrity(pages.source, worker_id)  # type: ignore[arg-type]
        checks = tuple(
            replace(check, fail_count=3) if check.name == "refcount" else check for check in sound.checks
        )
        return replace(sound, checks=checks, violations=(found,), violations_total=1)

    monkeypatch.setattr(pages.source, "integrity", integrity)
    app = run("integrity")
    assert ":red[✘] **refcount**" in texts_of(app)
    assert " · 1 violation in all" in texts_of(app)
    row = app.dataframe[0].value.iloc[0]
    assert (row["subject"], row["expected"], row["found"], row["page"]) == (
        "references of page 7",
        "1",
        "2",
        7,
    )


def test_the_timeline_draws_the_worker_that_is_shown(pages: LivePages) -> None:
    assert drawn(run("timeline"))["spectrogram.js"]["worker"] == "demo-0"


def test_the_ruler_has_every_token_of_the_prompt(pages: LivePages) -> None:
    app = run("playground")
    told = drawn(app)["ruler.js"]
    assert "".join(told["pieces"]).startswith("The lighthouse of Skarholm")
    assert sum(told["results"].values()) == len(told["pieces"])
    app.text_area(key="prompt").set_value("").run()
    assert not app.get("bidi_component")


def test_the_explanation_is_of_a_sequence_that_runs(pages: LivePages, source: DemoSource) -> None:
    told = drawn(run("explain"))["mapping.js"]
    lists = [each.pages[:48] for each in source.pool.running]
    assert told["pages"] in lists
    assert told["first_slot"] == told["pages"][0] * 16
    assert len(told["key_lanes"][0]) == 16


# what is wrong, and what to do


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Unavailable("no server answers at x:1", code="UNAVAILABLE"), ["No service at", "kvatlas serve"]),
        (
            PermissionDenied("scope cache.read", code="PERMISSION_DENIED", reason="MISSING_SCOPE"),
            ["Not allowed", "--token-file"],
        ),
        (Refused("64 watches", code="RESOURCE_EXHAUSTED", reason="WATCH_LIMIT"), ["Too many watches"]),
    ],
)
@pytest.mark.parametrize("where", ["roster", "watch"])
def test_a_failure_says_what_is_wrong_and_what_to_do(
    failure: KvatlasError, words: list[str], where: str, wait_until: Callable[..., None]
) -> None:
    source = BrokenSource(64, is_frozen=True)
    source.failure = failure
    source.breaks_roster = where == "roster"
    pages = install(source)
    pages.start()
    try:
        wait_until(lambda: pages.failure or ((one := pages.follower("")) and one.status.kind != "connecting"))
        text = texts_of(run("page_map"))
        if where == "roster" and isinstance(failure, Refused):
            words = ["64 watches"]
        for word in words:
            assert word in text
    finally:
        process.shut_down()


def test_figures_are_struck_while_the_map_is_stale(
    source: DemoSource, wait_until: Callable[..., None]
) -> None:
    now = [0.0]
    source._ended.clear()
    pages = LivePages(source, clock=lambda: now[0])
    process.install(SETTINGS, pages)
    pages.start()
    try:
        wait_until(lambda: (one := pages.follower("")) is not None and one.live_map.is_whole)
        follower = pages.follower("")
        assert follower is not None
        follower.join()  # a message on its way would be heard at the later time
        now[0] = 10.0
        wait_until(lambda: follower.status.kind == "stale")
        shown = figures_of(run("page_map"))
        assert shown["In use"].startswith("~~")
    finally:
        process.shut_down()


def test_several_workers_are_offered(pages: LivePages, source: DemoSource) -> None:
    pages._add("demo-1")
    app = run("page_map")
    assert {each.label for each in app.metric} == {"demo-0", "demo-1"}
    assert not app.get("bidi_component")
    app = run("page_map", worker="demo-0")
    assert drawn(app)["page_map.js"]["worker"] == "demo-0"


def test_a_service_without_a_prefix_cache_says_so(
    pages: LivePages, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    assert pages.server is not None
    without = replace(pages.server, features=frozenset({"pinning"}))
    monkeypatch.setattr(pages.source, "server", lambda: without)
    wait_until(lambda: pages.server == without)
    assert "prefix cache is off" in texts_of(run("prefix_tree"))


def test_a_link_cannot_put_its_words_on_the_page(pages: LivePages) -> None:
    """Anybody can make a link: what is no id, no number and no worker's name is not shown."""
    picture = "![seen](http://evil.example/seen.png)"
    app = run("page_map", req=picture, worker=picture, page=picture, t=picture)
    assert "evil.example" not in texts_of(app)
    assert drawn(app)["page_map.js"]["worker"] == "demo-0"
    assert drawn(app)["page_map.js"]["at"] is None


def test_a_page_that_is_picked_again_is_inspected_once(pages: LivePages, source: DemoSource) -> None:
    """A click, a second page with the shift key, and the first one again."""
    first, second = source.pool.running[0].pages[:2]
    app = run("page_map", page=str(first))
    app.session_state["more_pages"] = [second, first]
    app.run()
    assert not app.exception, [each.value for each in app.exception]
    titles = [str(each.value) for each in app.subheader]
    assert titles == [f"Page {first}", f"Page {second}"]


@pytest.mark.parametrize("text", ["²", "-1", str(2**32 - 1), "9" * 30])
def test_a_number_that_is_none_of_a_page_names_nothing(pages: LivePages, text: str) -> None:
    """Digits of other scripts are no numbers, and a message has no place for larger ones."""
    app = run("page_map", page=text)
    assert drawn(app)["page_map.js"]["selected"] is None
    assert "Click a page" in texts_of(app)


@pytest.mark.parametrize("text", ["²", "-1", "9" * 30])
def test_a_number_that_is_no_moment_names_nothing(pages: LivePages, text: str) -> None:
    assert drawn(run("page_map", t=text))["page_map.js"]["at"] is None


def test_whoever_asks_first_makes_the_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """B119: each would be a channel to the service that nobody closes."""
    made: list[DemoSource] = []

    def make(settings: DashboardConfig) -> DemoSource:
        made.append(DemoSource(64, is_frozen=True))
        return made[-1]

    monkeypatch.setattr(process, "make_source", make)
    process.install(SETTINGS)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: process.live_pages(), range(32)))
        assert len(made) == 1
        assert all(pages is found[0] for pages in found)
    finally:
        process.shut_down()


def test_sessions_and_reruns_share_one_subscriber_and_leave_no_thread(
    source: DemoSource, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B119, B112: however many people look, and however often their scripts run."""
    watches: list[str] = []
    watch = source.watch

    def counting(worker_id: str, resume_after: Any) -> Any:
        watches.append(worker_id)
        return watch(worker_id, resume_after)

    monkeypatch.setattr(source, "watch", counting)
    source._ended.clear()
    pages = install(source)
    pages.start()
    try:
        wait_until(lambda: (one := pages.follower("")) is not None and one.live_map.is_whole)
        run("page_map")
        ours = {thread.name for thread in threading.enumerate() if thread.name.startswith("pages-")}
        before = threading.active_count()
        for _ in range(8):
            run("requests")
        one = run("page_map")
        for _ in range(30):
            one.run()
        assert threading.active_count() <= before
        assert {t.name for t in threading.enumerate() if t.name.startswith("pages-")} == ours
        assert watches == ["demo-0"]
        follower = pages.follower("")
        assert follower is not None
        assert len(follower.live_map.spectrogram.columns(0)[1]) <= 600
    finally:
        process.shut_down()
    wait_until(lambda: not any(t.name.startswith("pages-") for t in threading.enumerate()))
