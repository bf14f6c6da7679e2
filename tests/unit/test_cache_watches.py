"""Watches of the page map: snapshots, merged deltas, violations, bounds, and what is left when they end."""

import asyncio
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.client.page_map import PageMap
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service.fleet.mirrors import KeptMirror
from service.fleet.page_mirror import Standing
from service.handlers import cache, cache_messages
from service.request import LostReason
from service.testing_cache import (
    ACTIVE,
    CACHED,
    FREE,
    PAGES,
    CacheStage,
    ScriptedContext,
    ScriptedLink,
    paths,
    refused,
    until,
)


async def watched(
    link: ScriptedLink, **options: Any
) -> tuple[CacheStage, ScriptedContext, asyncio.Task[None]]:
    """A service before a worker, and a watch of its map that has begun."""
    stage, context = CacheStage(link), ScriptedContext()
    await stage.welcome()
    return stage, context, await stage.watch(context, **options)


def follow(messages: list[Any]) -> PageMap:
    """What the client library makes of a watch."""
    copy = PageMap()
    for message in messages:
        copy.apply(message)
    return copy


def assert_equal(copy: PageMap, link: ScriptedLink) -> None:
    assert copy.revision.number == link.number
    for name, plane in link.planes.items():
        assert (copy[name] == plane).all(), name
    held = {owner: each.page_ids.tolist() for owner, each in copy.sequences.items()}
    assert held == {
        owner: np.frombuffer(info.page_ids, "<u4").tolist() for owner, info in link.sequences.items()
    }


def test_a_watch_is_a_snapshot_in_parts_and_then_merged_deltas() -> None:
    async def work() -> None:
        link = ScriptedLink()
        link.touch(5, ACTIVE, owner=1)
        link.sequence(1, [5])
        stage, context, task = await watched(link)
        assert context.has_metadata
        await until(lambda: len(context.written) == 3)
        parts = [message.snapshot for message in context.written]
        assert [part.chunks_left for part in parts] == [2, 1, 0]
        assert [part.page_count for part in parts] == [65_536, PAGES - 65_536, 0]
        assert {part.cause for part in parts} == {pb.SNAPSHOT_CAUSE_INITIAL}
        assert [part.geometry.page_count for part in parts] == [PAGES, 0, 0]
        assert [each.token_count for each in parts[2].sequences] == [16]
        for page in (6, 69_999):
            link.touch(page, ACTIVE, owner=1)
        link.sequence(1, [5, 6, 69_999])
        stage.feed(link)
        await until(lambda: len(context.written) == 4)
        delta = context.written[3]
        assert [message.stats.active_pages for message in context.written] == [1, 1, 1, 3]
        assert {message.observe_time.seconds for message in context.written} == {1010}
        assert (delta.base_number, delta.revision.number, delta.delta.merged_events) == (1, 3, 2)
        assert np.frombuffer(delta.delta.page_ids, "<u4").tolist() == [6, 69_999]
        assert_equal(follow(context.written), link)
        task.cancel()

    asyncio.run(work())


def test_a_watcher_that_reads_slowly_gets_one_message_for_all_that_happened() -> None:
    """Nothing is queued for it: the next message is made when the last one was taken."""

    async def work() -> None:
        link = ScriptedLink(page_count=1000)
        stage, context, task = await watched(link)
        await until(lambda: len(context.written) == 1)
        context.gate = asyncio.Event()
        link.touch(1, ACTIVE)
        stage.feed(link)
        await until(lambda: len(context.written) == 2)
        for round_ in range(200):
            link.touch(round_ % 7, ACTIVE if round_ % 2 else CACHED, owner=round_)
            stage.feed(link)
        await asyncio.sleep(0)
        assert len(context.written) == 2
        gate, context.gate = context.gate, None
        gate.set()
        await until(lambda: len(context.written) == 3)
        merged = context.written[2].delta
        assert merged.merged_events == 200
        assert np.frombuffer(merged.page_ids, "<u4").tolist() == list(range(7))
        assert_equal(follow(context.written), link)
        task.cancel()

    asyncio.run(work())


def test_a_slow_snapshot_shows_one_moment_and_the_delta_after_it_the_rest() -> None:
    async def work() -> None:
        link = ScriptedLink()
        stage, context = CacheStage(link), ScriptedContext(gate=asyncio.Event())
        await stage.welcome()
        task = await stage.watch(context)
        await until(lambda: len(context.written) == 1)
        link.touch(3, ACTIVE)  # in the part that is out
        link.touch(69_000, ACTIVE)  # in the part that is not
        stage.feed(link)
        gate, context.gate = context.gate, None
        assert gate is not None
        gate.set()
        await until(lambda: len(context.written) == 3)
        second = context.written[1].snapshot
        assert np.frombuffer(second.pages.states, "u1")[69_000 - 65_536] == FREE
        assert (context.written[1].revision.number, context.written[1].stats.active_pages) == (0, 0)
        assert np.frombuffer(context.written[2].delta.page_ids, "<u4").tolist() == [3, 69_000]
        assert_equal(follow(context.written), link)
        task.cancel()

    asyncio.run(work())


def test_a_lost_delta_and_a_new_life_give_new_snapshots_with_their_cause() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, context, task = await watched(link)
        link.touch(1, ACTIVE)
        link.delta()  # lost
        link.touch(2, ACTIVE)
        stage.feed(link)
        await until(lambda: len(context.written) == 2)
        assert context.written[1].snapshot.cause == pb.SNAPSHOT_CAUSE_RESYNCED
        assert_equal(follow(context.written), link)
        stage.mirrors.link_lost(cast(Any, link), LostReason.CRASH)
        link.restart()
        await stage.welcome()
        await until(lambda: len(context.written) == 3)
        assert context.written[2].snapshot.cause == pb.SNAPSHOT_CAUSE_EPOCH_CHANGED
        assert context.written[2].revision.epoch == 2
        assert_equal(follow(context.written), link)
        assert dict(stage.mirrors.kept[0].resyncs) == {"initial": 1, "gap": 1, "epoch": 1}
        task.cancel()

    asyncio.run(work())


def test_a_map_that_was_lost_again_while_a_watch_wrote_is_not_told() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, context, task = await watched(link)
        gate = context.gate = asyncio.Event()
        link.touch(1, ACTIVE)
        stage.feed(link)
        await until(lambda: len(context.written) == 2)  # and is not taken
        kept = stage.mirrors.kept[0]
        for _ in range(2):
            link.touch(2, ACTIVE)
            link.delta()  # lost
            link.touch(3, ACTIVE)
            stage.feed(link)
            link.fails_with = worker_pb2.CommandReply() if kept.resyncs["gap"] else None
            await until(lambda: kept.resyncs["gap"] == 1)
        assert kept.mirror.standing is Standing.BEHIND
        gate.set()
        await until(lambda: not kept.mirror.readers[0]._wake.__self__.is_set())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert (len(context.written), task.done()) == (2, False)
        link.fails_with = None
        await until(lambda: len(context.written) == 3 or task.done())
        assert context.written[2].snapshot.cause == pb.SNAPSHOT_CAUSE_RESYNCED
        assert_equal(follow(context.written), link)
        task.cancel()

    asyncio.run(work())


def test_a_watch_goes_on_after_the_revision_it_has() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, first, task = await watched(link)
        link.touch(1, ACTIVE)
        stage.feed(link)
        await until(lambda: len(first.written) == 2)
        task.cancel()
        link.touch(2, ACTIVE)
        link.touch(1, CACHED)
        link.sequence(4, [2])
        stage.feed(link)
        second = ScriptedContext()
        task = await stage.watch(second, resume_after=first.written[1].revision)
        message = second.written[0]
        assert (message.WhichOneof("event"), message.base_number) == ("delta", 1)
        assert_equal(follow(first.written + second.written), link)
        task.cancel()
        third = ScriptedContext()
        task = await stage.watch(third, resume_after=message.revision)
        life = third.written[0]
        assert life.WhichOneof("event") in ("heartbeat", "delta")
        assert life.base_number == life.revision.number == message.revision.number
        assert_equal(follow(first.written + second.written + third.written), link)
        link.touch(3, ACTIVE)
        link.delta()  # lost
        link.touch(2, ACTIVE)
        stage.feed(link)
        await until(lambda: third.written[-1].WhichOneof("event") == "snapshot")
        assert third.written[-1].snapshot.cause == pb.SNAPSHOT_CAUSE_RESYNCED
        task.cancel()
        for at, cause in (
            (pb.Revision(epoch=7, number=1), pb.SNAPSHOT_CAUSE_EPOCH_CHANGED),
            (pb.Revision(epoch=1, number=99), pb.SNAPSHOT_CAUSE_LAGGED),
        ):
            context = ScriptedContext()
            task = await stage.watch(context, resume_after=at)
            assert context.written[0].snapshot.cause == cause
            task.cancel()

    asyncio.run(work())


def test_heartbeats_come_while_the_feed_lives_and_stop_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher sees by the silence that nobody knows how the pool stands."""
    monkeypatch.setattr(cache, "MIN_HEARTBEAT_SECONDS", 0.1)
    looks: list[bool] = []
    is_live = vars(KeptMirror)["is_live"].fget
    monkeypatch.setattr(
        KeptMirror, "is_live", property(lambda kept: looks.append(is_live(kept)) or looks[-1])
    )

    async def work() -> None:
        link = ScriptedLink(page_count=5)
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        request = pb.WatchPageMapRequest()
        request.heartbeat_interval.FromMilliseconds(100)
        task = asyncio.ensure_future(stage.servicer.WatchPageMap(request, context))
        await until(lambda: len(context.written) >= 2)
        beat = context.written[1]
        assert (beat.WhichOneof("event"), beat.base_number, beat.revision.number) == ("heartbeat", 0, 0)
        link.touch(1, ACTIVE)
        stage.feed(link)
        await until(lambda: [m.WhichOneof("event") for m in context.written[-2:]] == ["delta", "heartbeat"])
        assert (context.written[-1].base_number, context.written[-1].revision.number) == (1, 1)
        assert all(m.HasField("stats") and m.observe_time.seconds == 1010 for m in context.written)
        link.is_up, count = False, len(context.written)
        await asyncio.sleep(0.8)
        assert len(context.written) == count
        assert 0 < looks.count(False) < 20, "thousands where it does not rest"
        task.cancel()

    asyncio.run(work())


def test_planes_and_sequences_are_left_out_on_request() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=5)
        link.sequence(1, [2])
        stage, context, task = await watched(link, planes=["states"], include_sequences=False)
        link.touch(2, ACTIVE)
        link.sequence(1, [2, 3])
        stage.feed(link)
        await until(lambda: len(context.written) == 2)
        snapshot, delta = context.written[0].snapshot, context.written[1].delta
        assert (snapshot.chunks_left, len(snapshot.pages.states), snapshot.pages.owners) == (0, 5, b"")
        assert (delta.pages.states, delta.pages.flags, len(delta.sequences)) == (bytes([ACTIVE]), b"", 0)
        task.cancel()

    asyncio.run(work())


@pytest.mark.parametrize("with_sequences", [True, False])
def test_what_a_watch_does_not_show_is_no_news_and_a_revision_without_any_is_told(
    with_sequences: bool,
) -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=5)
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        rarely = Duration(seconds=60)
        task = await stage.watch(context, include_sequences=with_sequences, heartbeat_interval=rarely)
        news = cast(Any, stage.mirrors.kept[0].mirror.readers[0])._wake.__self__
        link.sequence(1, [2])
        stage.feed(link)
        await until(lambda: not news.is_set())
        assert [len(each.delta.sequences) for each in context.written[1:]] == [1] * with_sequences
        link.number += 1
        stage.feed(link)
        await until(lambda: len(context.written) == 2 + with_sequences)
        last = context.written[-1]
        assert (last.base_number, last.revision.number, last.delta.merged_events) == (0, 1, 1)
        task.cancel()

    asyncio.run(work())


def test_a_change_that_no_message_holds_is_told_as_a_snapshot_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_messages, "MAX_DELTA_BYTES", 10)

    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, context, task = await watched(link)
        link.touch(1, ACTIVE)
        stage.feed(link)
        await until(lambda: len(context.written) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        (told,) = context.written[1:]
        assert told.snapshot.cause == pb.SNAPSHOT_CAUSE_LAGGED
        assert_equal(follow(context.written), link)
        task.cancel()

    asyncio.run(work())


def test_watches_are_bounded_and_end_with_the_drain() -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink(page_count=5), max_watches=2)
        await stage.welcome()
        rarely = Duration(seconds=60)  # a watch that hears of the drain by its heartbeats alone is too late
        tasks = [await stage.watch(ScriptedContext(), heartbeat_interval=rarely) for _ in range(2)]
        failure = await refused(stage.servicer.WatchPageMap(pb.WatchPageMapRequest(), ScriptedContext()))
        assert (failure.status, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCH_LIMIT")
        stage.board.set_draining(True)
        done, _ = await asyncio.wait(tasks, timeout=50)
        assert len(done) == 2
        assert {getattr(task.exception(), "reason", None) for task in done} == {"DRAINING"}
        assert stage.watches.active == 0
        assert not stage.mirrors.kept[0].mirror.readers

    asyncio.run(work())


def test_a_watch_that_may_not_speak_yet_hears_of_the_drain_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten seconds later the server is gone: it was told so by a connection that broke."""

    async def work() -> None:
        monkeypatch.setattr(cache, "MAX_INTERVAL_SECONDS", 600.0)
        link = ScriptedLink(page_count=5)
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        request = pb.WatchPageMapRequest(min_interval=Duration(seconds=600))
        task = asyncio.ensure_future(stage.servicer.WatchPageMap(request, context))
        await until(lambda: bool(context.written))
        link.touch(1, ACTIVE)
        stage.feed(link)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(context.written) == 1, "it may not speak yet"
        stage.board.set_draining(True)
        assert (await refused(asyncio.wait_for(task, 60))).reason == "DRAINING"

    asyncio.run(work())


@pytest.mark.parametrize("mode", [pb.WATCH_MODE_STATE, pb.WATCH_MODE_EVENTS])
def test_who_watches_a_worker_that_is_removed_is_told_at_once(mode: Any) -> None:
    """It kept its place among the watches until its next heartbeat was due, up to a minute."""

    async def work() -> None:
        link = ScriptedLink(page_count=5)
        stage = CacheStage(link)
        await stage.welcome()
        rarely, loop = Duration(seconds=60), cast(Any, asyncio.get_running_loop())
        task = await stage.watch(ScriptedContext(), mode=mode, heartbeat_interval=rarely)
        far = loop.time() + 30
        await until(lambda: any(t.when() > far and not t.cancelled() for t in loop._scheduled), limit=20)
        link.is_up = False
        stage.mirrors.link_lost(cast(Any, link), LostReason.CRASH)
        stage.mirrors.link_removed(cast(Any, link))
        failure = await refused(asyncio.wait_for(task, 50))
        assert (failure.reason, "gone for good" in failure.message) == ("WORKER_NOT_FOUND", True)
        assert all(timer.cancelled() for timer in loop._scheduled), "each turn left one, for a minute"
        assert stage.watches.active == 0

    asyncio.run(work())


@pytest.mark.parametrize("mode", [pb.WATCH_MODE_STATE, pb.WATCH_MODE_EVENTS])
def test_a_cancelled_watch_leaves_nothing_behind(mode: Any) -> None:
    """B111: whoever goes away, the mirror forgets him."""

    async def work() -> None:
        link = ScriptedLink()
        stage, context = CacheStage(link), ScriptedContext(gate=asyncio.Event())
        await stage.welcome()
        task = await stage.watch(context, mode=mode)
        kept = stage.mirrors.kept[0]
        assert len(kept.event_watchers) == (mode == pb.WATCH_MODE_EVENTS)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: len(asyncio.all_tasks()) == 1)
        assert (stage.watches.active, kept.mirror.readers, kept.mirror._frozen) == (0, [], [])
        assert not kept.event_watchers, "or events would be followed for ever"

    asyncio.run(work())


def test_every_bad_field_of_a_watch_is_named() -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink(page_count=5))
        await stage.welcome()
        request = pb.WatchPageMapRequest(planes=["x"], mode=cast(Any, 9))
        request.min_interval.FromMilliseconds(49)
        request.heartbeat_interval.FromSeconds(61)
        failure = await refused(stage.servicer.WatchPageMap(request, ScriptedContext()))
        assert paths(failure) == ["planes[0]", "mode", "min_interval", "heartbeat_interval"]
        ids = await refused(
            stage.servicer.WatchPageMap(pb.WatchPageMapRequest(include_token_ids=True), ScriptedContext())
        )
        assert ids.reason == "FEATURE_DISABLED"

    asyncio.run(work())


def violation(number: int) -> pb.IntegrityViolation:
    return pb.IntegrityViolation(check=pb.INTEGRITY_CHECK_TRIE, subject=f"page {number}", page_id=number)


@pytest.mark.parametrize("mode", [pb.WATCH_MODE_STATE, pb.WATCH_MODE_EVENTS])
def test_watchers_are_told_each_violation_once_though_no_page_changes(mode: Any) -> None:
    async def work() -> None:
        stage, context = CacheStage(ScriptedLink(page_count=10)), ScriptedContext()
        await stage.welcome()
        stage.mirrors.kept[0].violations.add([violation(1)])  # before the watch began
        rare = Duration(seconds=60)  # or what is told could have waited for the heartbeat
        task = await stage.watch(context, mode=mode, heartbeat_interval=rare)

        def said() -> list[int]:
            return [each.page_id for message in context.written for each in message.violations]

        for number in (2, 3):
            feed = worker_pb2.PageFeed.FromString(stage.links[0].delta())
            feed.violations.append(violation(number))
            stage.mirrors.link_fed(cast(Any, stage.links[0]), b"d", feed.SerializeToString())
            await until(lambda: len(said()) == number - 1, 30.0)  # noqa: B023
        assert said() == [2, 3]
        task.cancel()

    asyncio.run(work())


def test_of_many_violations_the_newest_are_kept() -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink(page_count=10))
        await stage.welcome()
        log = stage.mirrors.kept[0].violations
        log.add([violation(number) for number in range(250)])
        assert [each.page_id for each in log.after(248)] == [248, 249]
        assert [each.page_id for each in log.after(0)] == list(range(150, 250))
        assert log.after(250) == []

    asyncio.run(work())


def test_open_watches_are_counted_by_mode_and_no_longer_when_they_end() -> None:
    async def work() -> None:
        stage, first, second = CacheStage(ScriptedLink(page_count=10)), ScriptedContext(), ScriptedContext()
        await stage.welcome()

        def watchers() -> list[float | None]:
            names = ("state", "events")
            value = stage.metrics.registry.get_sample_value
            return [value("kvatlas_page_watchers", {"mode": mode}) for mode in names]

        assert watchers() == [0, 0]
        tasks = [await stage.watch(first), await stage.watch(second, mode=pb.WATCH_MODE_EVENTS)]
        assert watchers() == [1, 1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert watchers() == [0, 0]

    asyncio.run(work())
