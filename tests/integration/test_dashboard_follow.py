"""The subscriber against real gRPC: it follows, notices silence, comes back, and leaves nothing running."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard import live_pages
from dashboard.client import ServiceSource
from dashboard.live_pages import Follower, LivePages
from dashboard.recordings import save_past
from dashboard.testing import WORKER_ID, FeedServer
from kvatlas.client.errors import PermissionDenied
from kvatlas.client.page_map import PageMap
from kvatlas.client.sync import Client
from kvatlas.v1 import cache_pb2 as pb

ROOT = Path(__file__).parents[2]
COUNT = 70_000  # two parts of a snapshot
BACK_SECONDS = 3.0


@pytest.fixture
def feed() -> Iterator[FeedServer]:
    feed = FeedServer(COUNT, changed_share=0.001).start()
    yield feed
    feed.stop()


@pytest.fixture
def pages(feed: FeedServer, wait_until: Callable[..., None]) -> Iterator[LivePages]:
    pages = LivePages(ServiceSource(feed.address)).start()
    wait_until(lambda: (one := pages.follower("")) is not None and one.status.kind == "live")
    yield pages
    pages.stop()


def the(pages: LivePages) -> Follower:
    follower = pages.follower("")
    assert follower is not None
    return follower


def test_a_large_map_comes_in_parts_and_stays_equal(
    pages: LivePages, feed: FeedServer, wait_until: Callable[..., None]
) -> None:
    live = the(pages).live_map
    first = live.revision
    wait_until(lambda: live.revision > first + 10)
    geometry = live.geometry()
    assert (geometry.worker_id, geometry.page_count, geometry.page_size) == (WORKER_ID, COUNT, 16)
    assert sum(live.counts().values()) == COUNT
    feed.stand_still()
    wait_until(lambda: live.page_map.revision.number == feed.pool.number)
    for name, plane in feed.pool.planes.items():
        assert (live.planes([name])[name] == plane).all(), name


@pytest.mark.parametrize("limit", [60.0, pytest.param(BACK_SECONDS, marks=pytest.mark.slow)])
def test_a_service_that_dies_is_noticed_and_comes_back_by_itself(
    pages: LivePages,
    feed: FeedServer,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
) -> None:
    """B119: an endpoint that is down is shown, not raised."""
    follower, watch, tries = the(pages), pages.source.watch, list[str]()

    def try_again(worker_id: str, resume_after: pb.Revision | None) -> Any:
        tries.append(worker_id)
        return watch(worker_id, resume_after)

    monkeypatch.setattr(pages.source, "watch", try_again)
    feed.stop()
    wait_until(lambda: follower.status.kind in ("no_service", "stale"), "a word of it")
    assert follower.live_map.is_whole, "the last map stays"
    wait_until(lambda: pages.failure, "the roster's word of it")
    wait_until(lambda: len(tries) >= 4, "tries in vain, and waits that have grown")
    feed.pool.epoch += 1  # another life
    feed.start()
    began = time.monotonic()
    wait_until(lambda: follower.status.kind == "live", "a live map")
    assert time.monotonic() - began < limit
    assert follower.live_map.geometry().epoch == feed.pool.epoch
    assert len(follower.live_map.history.restarts) == 1
    assert follower.faults == 0
    wait_until(lambda: not pages.failure, "the roster")


def test_a_delta_that_continues_nothing_is_a_fault_and_never_a_wrong_map(
    pages: LivePages, feed: FeedServer, wait_until: Callable[..., None]
) -> None:
    follower = the(pages)
    feed.pool.number += 5  # as if a message had been lost on the way
    wait_until(lambda: follower.faults >= 1)
    wait_until(lambda: follower.status.kind == "live")
    before = follower.live_map.revision
    wait_until(lambda: follower.live_map.revision > before + 3)
    assert follower.live_map.page_map.revision.number <= feed.pool.number
    assert sum(follower.live_map.counts().values()) == COUNT


def test_nothing_runs_after_the_end(feed: FeedServer, wait_until: Callable[..., None]) -> None:
    before = {thread.name for thread in threading.enumerate()}
    pages = LivePages(ServiceSource(feed.address)).start()
    wait_until(lambda: (one := pages.follower("")) is not None and one.live_map.is_whole)
    pages.stop()
    left = {thread.name for thread in threading.enumerate()} - before
    assert not {name for name in left if name.startswith("pages-")}


def test_the_token_goes_with_every_call(feed: FeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    tokens = iter(["first", "second", ""])
    source = ServiceSource(feed.address, lambda: next(tokens))
    stub = source._server()

    def note(request: Any, timeout: float, metadata: list[tuple[str, str]]) -> Any:
        seen.append(("server", dict(metadata).get("authorization", "")))
        return stub.GetServerInfo(request, timeout=timeout, metadata=metadata)

    class Noting:
        GetServerInfo = staticmethod(note)

    monkeypatch.setattr(source, "_server", lambda: Noting)
    for _ in range(3):
        assert source.server().version == "synthetic"
    source.close()
    assert seen == [("server", "Bearer first"), ("server", "Bearer second"), ("server", "")]


def test_a_refusal_is_told_and_tried_again_without_haste(
    feed: FeedServer, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at once nor after the second in which a service that is down is tried again."""
    source = ServiceSource(feed.address)
    tries: list[float] = []
    monkeypatch.setattr(live_pages, "LAST_BACKOFF_SECONDS", 1.5)

    def refuse(worker_id: str, resume_after: pb.Revision | None) -> Any:
        tries.append(time.monotonic())
        raise PermissionDenied("the scope cache.read is missing", reason="MISSING_SCOPE")

    monkeypatch.setattr(source, "watch", refuse)
    pages = LivePages(source).start()
    try:
        wait_until(lambda: (one := pages.follower("")) is not None and one.status.kind == "denied")
        assert "cache.read" in the(pages).status.reason
        wait_until(lambda: len(tries) == 2, "the second try")
        assert tries[1] - tries[0] >= 1.5
    finally:
        pages.stop()


def test_the_copy_equals_the_service_after_real_requests(
    fake_server: Any, wait_until: Callable[..., None]
) -> None:
    pages = LivePages(ServiceSource(fake_server.address)).start()
    try:
        wait_until(lambda: (one := pages.follower("")) is not None and one.status.kind == "live")
        live = the(pages).live_map
        with Client(fake_server.address) as client:
            for number in range(12):
                prompt = [1 + (number % 3 * 31 + at) % 200 for at in range(40 + 9 * number)]
                client.generate(prompt, max_tokens=20, ignore_eos=True)
            found: list[PageMap] = []

            def is_same() -> bool:
                theirs = client.page_map()
                counts = theirs.counts()
                with live.locked() as mine:
                    is_behind = mine.revision.number != theirs.revision.number
                    if is_behind or counts["active"] or not counts["cached"]:
                        return False
                    for name, plane in theirs.planes.items():
                        assert (mine.planes[name] == plane).all(), name
                found.append(theirs)
                return True

            wait_until(is_same, "the same map at the same revision, with nothing running")
            theirs = found[0]
            assert live.sequences() == []
            page = int(np.flatnonzero(theirs["states"] == pb.PAGE_STATE_CACHED)[0])
            facts = pages.source.page("", page)
            assert (facts.page_id, facts.state, facts.is_sealed) == (page, "cached", True)
            assert [event.kind for event in facts.events][-1] == "cached"
            tokens = pages.source.tokenize("the same words")
            assert "".join(tokens.pieces) == tokens.text
    finally:
        pages.stop()


def test_a_leak_that_the_audit_finds_is_on_the_screen(
    start_server: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    server = start_server(
        "--runner",
        "fake",
        "--model",
        "random:tiny",
        "--num-pages",
        "63",
        "--set-worker",
        "debug_faults=page_leak",
    )
    pages = LivePages(ServiceSource(server.address)).start()
    try:
        wait_until(lambda: (one := pages.follower("")) is not None and one.status.kind == "live")
        with Client(server.address) as client:
            for number in range(8):
                client.generate([1 + number, *range(2, 60)], max_tokens=8, ignore_eos=True)
        wait_until(lambda: the(pages).live_map.violations, "a violation with the feed")
        facts = pages.source.integrity("")
        failed = {check.name for check in facts.checks if check.fail_count}
        assert failed
        told = the(pages).live_map.violations[-1]
        assert told.check in failed
        assert told.expected != told.found
    finally:
        pages.stop()


def test_a_token_file_that_cannot_be_read_is_told(feed: FeedServer, wait_until: Callable[..., None]) -> None:
    def fail() -> str:
        raise PermissionError(13, "Permission denied", "/run/secrets/token")

    pages = LivePages(ServiceSource(feed.address, fail)).start()
    try:
        wait_until(lambda: pages.failure)
        assert pages.failure_kind == "denied"
        assert "/run/secrets/token" in pages.failure
    finally:
        pages.stop()


def test_a_worker_that_is_gone_is_shown_for_a_while_and_then_forgotten(
    feed: FeedServer, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    pages = LivePages(ServiceSource(feed.address), history_seconds=60, clock=lambda: now[0])
    pages.start()
    try:
        wait_until(lambda: (one := pages.follower("")) is not None and one.live_map.is_whole)
        follower = the(pages)
        known = pages.server
        assert known is not None
        without = replace(known, workers=())
        monkeypatch.setattr(pages.source, "server", lambda: without)
        feed.stand_still()
        wait_until(lambda: follower.gone_at is not None)
        now[0] += 30
        wait_until(lambda: follower.status.kind == "gone")
        assert pages.followers() == [follower]
        assert sum(follower.live_map.counts().values()) == COUNT
        now[0] += 61
        wait_until(lambda: pages.followers() == [])
        wait_until(lambda: not follower._thread.is_alive())
    finally:
        pages.stop()


def test_the_last_minutes_are_saved_as_a_recording_that_replays(
    start_server: Callable[..., Any], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    server = start_server("--runner", "fake", "--model", "random:tiny", "--num-pages", "63")
    with Client(server.address) as client:
        for number in range(4):
            client.generate([1 + number, *range(2, 60)], max_tokens=8, ignore_eos=True)
        wait_until(lambda: not client.page_pool().stats.active_pages, "the last request's end")
    path = tmp_path / "saved.kvrec"
    path.write_bytes(save_past(server.facts["admin_address"], "", 300))
    command = [sys.executable, "-m", "kvatlas.cli", "replay", str(path), "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept = sum(json.loads(done.stdout)["kinds"].values())
    with Client(server.address) as client:  # whose map follows the worker by a fraction of a second
        wait_until(lambda: client.page_map().revision.number == kept, "the recording's last event")
