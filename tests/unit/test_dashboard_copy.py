"""The dashboard's copy of a worker's pages: checks of it, its download, its age, and its worker's restart."""

import asyncio
import io
import json

import numpy as np
import pytest

from dashboard import demo_messages, frames
from dashboard.demo_pool import DemoPool
from dashboard.demo_source import DemoSource
from dashboard.live_pages import STALE_SECONDS, Follower, LivePages, Status
from dashboard.mirror_checks import check_mirror
from dashboard.viewer import Viewer
from kvatlas.v1 import cache_pb2 as pb
from tests.demo_map import live_map


@pytest.mark.parametrize(
    ("check", "plane", "wanted", "value"),
    [
        ("sum", "states", pb.PAGE_STATE_ACTIVE, 0),
        ("references", "ref_counts", pb.PAGE_STATE_ACTIVE, 999),
        ("owners", "owners", pb.PAGE_STATE_FREE, 3),
        ("parents", "flags", pb.PAGE_STATE_CACHED, 0),
    ],
)
def test_each_check_of_the_copy_finds_its_fault(check: str, plane: str, wanted: int, value: int) -> None:
    pool = DemoPool(800, seed=5).run(8)
    live = live_map(pool)
    assert [each.name for each in check_mirror(live.page_map) if each.num_faults] == []
    planes = live.page_map.planes
    pages = np.flatnonzero(planes["states"] == wanted)
    if check == "parents":  # one that is another's parent
        pages = np.intersect1d(pages, planes["parent_page_ids"])
    planes[plane][pages[0]] = value
    faults = {each.name: each for each in check_mirror(live.page_map) if each.num_faults}
    assert check in faults
    if check != "parents":
        assert pages[0] in faults[check].pages


def test_a_snapshot_can_be_read_by_numpy() -> None:
    live = live_map(DemoPool(128, seed=1).run(3))
    packed = io.BytesIO(live.snapshot_bytes())
    told = np.load(packed)
    assert (told["states"] == live.page_map.planes["states"]).all()
    assert told["revision"].tolist() == [live.page_map.revision.epoch, live.page_map.revision.number]


def shown_by(viewer: Viewer) -> list[str]:
    """What a browser gets at one look: kinds of text, and of maps whether they are of now."""

    async def take() -> list[str]:
        found = []
        async for frame in viewer.frames():
            if isinstance(frame, str):
                found.append(str(json.loads(frame)["type"]))
            else:
                kind, _, flags, *_ = frames.HEADER.unpack(frame[: frames.HEADER.size])
                assert kind == frames.SNAPSHOT
                found.append("past" if flags & frames.PAST else "now")
        return [what for what in found if what not in ("status", "tick")]

    return asyncio.run(take())


@pytest.mark.parametrize(("pages", "what"), [(128, "past"), (64, "now")])
def test_who_looks_at_the_past_of_a_worker_that_starts_again_sees_a_map(pages: int, what: str) -> None:
    """The browser forgets its map with hello; a past of another size is none of this pool's."""
    subscriber = LivePages(DemoSource(64, is_frozen=True))
    follower = Follower(subscriber.source, "w", 600, lambda: 0.0)
    subscriber._followers["w"] = follower
    pool = DemoPool(128, seed=1).run(3)
    for message in demo_messages.snapshot(pool):
        follower.live_map.apply(message)
    viewer = Viewer(subscriber, {})
    assert shown_by(viewer) == ["hello", "now"]
    viewer.take_wish({"at": pool.now_ms})
    assert shown_by(viewer) == ["past"]
    assert shown_by(viewer) == [], "it stands still"
    again = DemoPool(pages, seed=2).run(3)
    again.epoch, again.now_ms = again.epoch + 1, pool.now_ms + 1000
    for message in demo_messages.snapshot(again):
        follower.live_map.apply(message)
    seen = shown_by(viewer)
    assert seen[0] == "hello"
    assert [*seen[1:], *shown_by(viewer)] == [what]


def test_a_worker_that_the_service_has_lost_is_stale_before_its_silence_is() -> None:
    now = [0.0]
    follower = Follower(DemoSource(64), "w", 60, lambda: now[0])
    follower._status = Status("live")
    now[0], follower.lost_at = 0.2, 0.1
    assert (follower.status.kind, follower.status.reason) == ("stale", "the service has lost the worker")
    follower._fresh_at = 0.15
    assert follower.status.kind == "live", "news from after that word"
    follower.lost_at = None
    now[0] += STALE_SECONDS
    assert (follower.status.kind, follower.status.reason[:16]) == ("stale", "nothing is heard")
