"""What views tell a newcomer: where a prompt goes, since when figures count, what they rest on."""

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import client, process
from dashboard.client import ServiceSource
from dashboard.config import from_args
from dashboard.demo_source import DemoSource
from dashboard.live_pages import LivePages
from dashboard.look_ups import basis, begun_late, recent_results
from dashboard.spectrogram import FIGURES
from dashboard.view_parts import prompt_command
from kvatlas.client.channel import DEFAULT_ADDRESS
from kvatlas.client.errors import DeadlineExceeded
from tests.dashboard_app import dashboard_app


class AddressedSource(DemoSource):
    """A pool that says it is a server's, with the sequences that it is told to have."""

    def __init__(self, address: str, *, is_quiet: bool) -> None:
        super().__init__(512, seed=4, is_frozen=True)
        self._address = address
        if is_quiet:
            self.pool.running.clear()
            self.pool.waiting.clear()

    @property
    def address(self) -> str:
        return self._address


@pytest.fixture
def follow(wait_until: Callable[..., None]) -> Iterator[Callable[[DemoSource], LivePages]]:
    """Makes the dashboard's process follow a source, and has its whole map."""

    def begin(source: DemoSource) -> LivePages:
        process.shut_down()
        pages = LivePages(source)
        process.install(from_args([], {}), pages)
        pages.start()
        wait_until(lambda: (one := pages.follower("")) is not None and one.live_map.is_whole)
        return pages

    yield begin
    process.shut_down()
    process.install(from_args([], {}))


def run(view: str) -> AppTest:
    app = dashboard_app().run()
    app.switch_page(f"views/{view}.py").run()
    assert not app.exception, [each.value for each in app.exception]
    return app


@pytest.mark.parametrize(
    ("address", "command"),
    [
        (DEFAULT_ADDRESS, "kvatlas generate 'The sky is'"),
        ("127.0.0.1:25010", "kvatlas generate 'The sky is' --address 127.0.0.1:25010"),
        ("unix:/tmp/a b", "kvatlas generate 'The sky is' --address 'unix:/tmp/a b'"),
    ],
)
@pytest.mark.parametrize("view", ["requests", "explain"])
def test_a_view_without_sequences_says_how_to_have_one_on_this_server(
    follow: Callable[[DemoSource], LivePages], view: str, address: str, command: str
) -> None:
    follow(AddressedSource(address, is_quiet=True))
    said = run(view).info[0].value
    assert prompt_command() == command
    assert f"`{command}`" in said
    assert "second tab" in said, "an answer of the playground ends when its view is left"


def test_the_map_tells_the_browser_where_a_prompt_goes(follow: Callable[[DemoSource], LivePages]) -> None:
    follow(AddressedSource("10.0.0.1:7", is_quiet=True))
    app = dashboard_app().run()
    told = json.loads(app.get("bidi_component")[0].proto.json)
    assert told["module"] == "page_map.js"
    assert told["prompt_command"].endswith(" --address 10.0.0.1:7")


def test_the_explanation_of_a_sequence_stays_when_it_ends(
    follow: Callable[[DemoSource], LivePages], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = follow(AddressedSource("x:1", is_quiet=False))
    app = run("explain")
    assert not [each for each in app.caption if "has ended" in each.value]
    shown = app.get("bidi_component")[0].proto.json
    follower = pages.follower("")
    assert follower is not None
    monkeypatch.setattr(follower.live_map, "sequences", list)
    app.run()
    assert not app.exception
    assert [each for each in app.caption if "has ended" in each.value]
    assert app.get("bidi_component")[0].proto.json == shown


def test_the_pool_has_room_in_all_pages_but_the_one_of_nobody(
    follow: Callable[[DemoSource], LivePages],
) -> None:
    follow(AddressedSource("x:1", is_quiet=True))
    words = run("explain").markdown[0].value
    assert f"**{511 * 16:,} tokens** in 511 pages" in words
    assert "One more, page 511, is nobody's" in words


@pytest.mark.parametrize(
    ("seconds", "begun_ms", "tokens"),
    [(0, 5000.0, 0), (200, 5000.0, 200), (299, None, 299), (400, None, 300)],
)
def test_results_count_since_the_dashboard_looks_or_five_minutes(
    follow: Callable[[DemoSource], LivePages],
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    begun_ms: float | None,
    tokens: int,
) -> None:
    """A hit a second."""
    follower = follow(AddressedSource("x:1", is_quiet=False)).follower("")
    assert follower is not None
    times_ms = 5000.0 + 1000.0 * np.arange(seconds + 1)
    figures = np.zeros((seconds + 1, len(FIGURES)), np.uint32)
    figures[:, FIGURES.index("hit_tokens")] = np.arange(seconds + 1)
    monkeypatch.setattr(follower.live_map.spectrogram, "figures", lambda since: (figures, times_ms))
    assert begun_late(follower.live_map) == begun_ms
    assert recent_results(follower.live_map)["hit"] == tokens
    app = run("what_if")
    stretch = "last 5 min" if begun_ms is None else "since 00:00:05"
    assert f"Prompt tokens, {stretch}" in [each.value for each in app.subheader]
    told = [each.value for each in app.caption if "looked up" in each.value]
    assert told[0].endswith("since this dashboard began") == (begun_ms is not None)


def test_a_gap_in_what_was_seen_makes_five_minutes_no_longer(
    follow: Callable[[DemoSource], LivePages], monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = follow(AddressedSource("x:1", is_quiet=False)).follower("")
    assert follower is not None
    times_ms = np.array([0.0, 1000.0, 400_000.0, 401_000.0])
    figures = np.zeros((4, len(FIGURES)), np.uint32)
    figures[:, FIGURES.index("hit_tokens")] = [0, 10, 20, 50]
    monkeypatch.setattr(follower.live_map.spectrogram, "figures", lambda since: (figures, times_ms))
    assert recent_results(follower.live_map)["hit"] == 30


def test_the_diamond_says_when_it_is_of_fewer_requests_than_the_curve() -> None:
    report = DemoSource(512, seed=4, is_frozen=True).estimate("demo-0", [16], ["lru"], 0.0)
    counted = sum(report.observed.tokens.values())
    assert basis(replace(report, token_count=counted)).endswith("how far to believe the rest.")
    assert basis(replace(report, token_count=counted * 10 // 9)).endswith("how far to believe the rest.")
    assert f"{counted:,} of these tokens, too few" in basis(
        replace(report, token_count=counted * 10 // 9 + 1)
    )


def test_what_is_not_answered_in_time_says_how_long_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What if said "DEADLINE_EXCEEDED: Deadline Exceeded" on a busy machine."""
    monkeypatch.setattr(client, "ESTIMATE_TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        source = ServiceSource(f"127.0.0.1:{mute.getsockname()[1]}")
        try:
            with pytest.raises(DeadlineExceeded, match=r"no answer in 0\.3 s: the server is busy"):
                source.estimate("worker-0", (16,), ("lru",), 0.0)
        finally:
            source.close()
