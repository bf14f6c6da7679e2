"""Page events through CacheService: each once and in order; what the mirror does without them."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import cache_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service.fleet import mirrors
from service.fleet.feed import NO_PAGE
from service.fleet.page_mirror import Standing
from service.handlers import watch
from service.handlers.cache_messages import page_event
from service.request import LostReason
from service.testing_cache import (
    ACTIVE,
    CACHED,
    CacheStage,
    ScriptedContext,
    ScriptedLink,
    refused,
    until,
)


def test_every_event_comes_once_and_in_order_and_a_reader_that_lags_starts_over() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        for page in range(10):
            link.touch(page, ACTIVE, owner=1)
        link.delta()
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        task = await stage.watch(context, mode=pb.WATCH_MODE_EVENTS)
        assert context.written[0].snapshot.cause == pb.SNAPSHOT_CAUSE_INITIAL
        assert b"e" in link.topics
        for page in range(10, 40):
            before = link.number
            link.touch(page, ACTIVE, owner=2)
            stage.feed(link)
            stage.mirrors.link_fed(cast(Any, link), b"e", link.event_feed(before))
        await until(lambda: sum(len(m.events.types) for m in context.written) == 30)
        at = context.written[0].revision.number
        for message in context.written[1:]:
            if message.WhichOneof("event") == "events":
                assert (message.base_number, message.events.first_number) == (at, at + 1)
                at += len(message.events.types)
                assert message.revision.number == at
        # A gap in the events: what the ring lost cannot be told, so the map is told anew.
        before = link.number + 1
        for page in (1, 2, 3):
            link.touch(page, CACHED)
        stage.feed(link)
        count = len(context.written)
        stage.mirrors.link_fed(cast(Any, link), b"e", link.event_feed(before))
        await until(lambda: len(context.written) > count)
        assert context.written[-1].snapshot.cause == pb.SNAPSHOT_CAUSE_LAGGED
        assert stage.metrics.registry.get_sample_value("kvatlas_page_watch_lagged_total") == 1
        task.cancel()

    asyncio.run(work())


def test_a_watch_of_events_goes_on_behind_the_one_it_has_where_they_are_still_there() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        for page in range(3):
            link.touch(page, ACTIVE, owner=1)
        stage = CacheStage(link)
        await stage.welcome()
        at = pb.Revision(epoch=1, number=2, step=2)
        context = ScriptedContext()
        task = await stage.watch(
            context, mode=pb.WATCH_MODE_EVENTS, resume_after=pb.Revision(epoch=1, number=3)
        )
        link.touch(7, ACTIVE, owner=1)
        stage.feed(link)
        stage.mirrors.link_fed(cast(Any, link), b"e", link.event_feed(3))
        await until(lambda: context.written[-1].WhichOneof("event") == "events")
        assert [message.WhichOneof("event") for message in context.written[:-1]] in ([], ["heartbeat"])
        assert (context.written[-1].base_number, context.written[-1].events.first_number) == (3, 4)
        task.cancel()
        stage.mirrors.kept[0].ring.restart(4)
        for after, cause in (
            (at, pb.SNAPSHOT_CAUSE_LAGGED),
            (pb.Revision(epoch=9, number=4), pb.SNAPSHOT_CAUSE_EPOCH_CHANGED),
        ):
            context = ScriptedContext()
            task = await stage.watch(context, mode=pb.WATCH_MODE_EVENTS, resume_after=after)
            assert context.written[0].snapshot.cause == cause
            task.cancel()
        lagged = stage.metrics.registry.get_sample_value("kvatlas_page_watch_lagged_total")
        assert lagged == 0, "it was told so before it read anything"

    asyncio.run(work())


def test_many_events_come_in_parts_and_none_before_its_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVENTS_PER_MESSAGE", 4)

    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        task = await stage.watch(context, mode=pb.WATCH_MODE_EVENTS, heartbeat_interval=Duration(seconds=60))
        for page in range(10):
            link.touch(page, ACTIVE, owner=1)
        delta = link.delta()
        link.touch(11, ACTIVE, owner=1)
        stage.mirrors.link_fed(cast(Any, link), b"e", link.event_feed(0))
        stage.mirrors.link_fed(cast(Any, link), b"d", delta)
        await until(lambda: len(context.written) == 4, limit=50)
        assert [len(message.events.types) for message in context.written] == [0, 4, 4, 2]
        assert [message.base_number for message in context.written[1:]] == [0, 4, 8]
        assert [message.revision.step for message in context.written[1:]] == [4, 8, 10]
        assert all(message.stats.active_pages == 10 for message in context.written[1:])
        assert {message.observe_time.seconds for message in context.written} == {1010}
        stage.feed(link)
        await until(lambda: len(context.written) == 5, limit=50)
        task.cancel()

    asyncio.run(work())


def test_an_event_that_comes_behind_its_map_wakes_who_waits_for_it() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        task = await stage.watch(context, mode=pb.WATCH_MODE_EVENTS, heartbeat_interval=Duration(seconds=60))
        (wake,) = stage.mirrors.kept[0].event_watchers
        link.touch(1, ACTIVE, owner=1)
        stage.feed(link)
        news = cast(Any, wake).__self__
        await until(lambda: not news.is_set())  # it has looked, and there was none
        assert len(context.written) == 1
        stage.mirrors.link_fed(cast(Any, link), b"e", link.event_feed(0))
        await until(lambda: len(context.written) == 2, limit=50)  # not with the next heartbeat
        assert context.written[1].WhichOneof("event") == "events"
        task.cancel()

    asyncio.run(work())


def test_events_that_come_during_the_replay_are_not_lost_and_callers_may_leave() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        link.touch(7, ACTIVE, owner=1)
        stage = CacheStage(link)
        await stage.welcome()
        link.replay_gate = asyncio.Event()
        request = pb.GetPageRequest(page_id=7, event_limit=10)
        leaving, staying = (asyncio.ensure_future(stage.servicer.GetPage(request, None)) for _ in range(2))
        await until(lambda: "replay" in link.commands)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        link.touch(7, CACHED, kind=5)
        stage.mirrors.link_fed(cast(Any, link), b"e", link.event_feed(1))
        link.events, told = link.events[:1], link.events  # the worker answered before the last event
        link.replay_gate.set()
        stage.feed(link)
        page = await staying
        link.events = told
        assert [(event.number, event.type) for event in page.events] == [(1, 1), (2, 5)]

    asyncio.run(work())


def test_a_map_that_is_lost_while_a_watch_waits_for_events_is_waited_for() -> None:
    """It was taken for whole still: the watch ended as a bug of ours."""

    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        task = await stage.watch(context, mode=pb.WATCH_MODE_EVENTS)
        stage.mirrors.link_lost(cast(Any, link), LostReason.CRASH)
        link.restart()
        link.replay_gate = asyncio.Event()
        link.touch(1, ACTIVE)
        await stage.welcome()
        await until(lambda: len(context.written) == 2)  # the new life's map
        link.touch(2, ACTIVE)
        stage.feed(link)
        await until(lambda: "replay" in link.commands)
        link.touch(3, ACTIVE)
        stage.mirrors.link_fed(cast(Any, link), b"e", link.event_feed(2))  # that of 2 is lost
        stage.feed(link)
        link.fails_with = worker_pb2.CommandReply()
        link.touch(4, ACTIVE)
        link.delta()  # lost
        link.touch(5, ACTIVE)
        stage.feed(link)
        assert stage.mirrors.kept[0].mirror.standing is not Standing.CURRENT
        link.events, told = link.events[:1], link.events
        link.replay_gate.set()
        await until(lambda: stage.mirrors.kept[0].ring.last_number == 3)
        for _ in range(9):
            await asyncio.sleep(0)
        assert not task.done()
        link.events, link.fails_with = told, None
        await until(lambda: len(context.written) > 2 or task.done())
        assert context.written[-1].WhichOneof("event") == "snapshot"
        assert not task.done()
        task.cancel()

    asyncio.run(work())


def test_a_page_that_a_worker_no_longer_has_when_its_past_is_there_is_refused() -> None:
    """It was looked for before only: the answer was a bug of ours."""

    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage = CacheStage(link)
        await stage.welcome()
        gate = link.replay_gate = asyncio.Event()
        request = pb.GetPageRequest(page_id=49, event_limit=10)
        asking = asyncio.ensure_future(stage.servicer.GetPage(request, None))
        await until(lambda: "replay" in link.commands)
        link.restart(page_count=10)
        stage.mirrors.link_welcomed(cast(Any, link))
        await until(lambda: stage.mirrors.kept[0].mirror.page_count == 10)
        gate.set()
        failure = await refused(cast(Any, asking))
        assert "no page 49, only 10" in failure.message

    asyncio.run(work())


def test_the_map_of_a_life_that_is_over_is_told_by_its_own_clock_and_geometry() -> None:
    """While the next one loads its model: pages were 49 days old, and more than the pool had."""

    async def work() -> None:
        link = ScriptedLink(page_count=50)
        link.planes["born_ms"][7] = 4000
        link.touch(7, ACTIVE, owner=1)
        stage = CacheStage(link)
        await stage.welcome()
        link.restart(page_count=10, start_seconds=2000)
        link.fails_with = worker_pb2.CommandReply()
        stage.mirrors.link_welcomed(cast(Any, link))
        page = await stage.servicer.GetPage(pb.GetPageRequest(page_id=7), None)
        assert page.age.seconds == 6
        pool = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(), None)
        assert (pool.revision.epoch, pool.geometry.epoch, pool.geometry.page_count) == (1, 1, 50)
        link.fails_with = None
        await until(lambda: stage.mirrors.kept[0].mirror.page_count == 10)
        pool = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(), None)
        assert (pool.revision.epoch, pool.geometry.epoch, pool.geometry.page_count) == (2, 2, 10)

    asyncio.run(work())


def test_a_new_life_begins_a_new_ring_of_events() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        for _ in range(30):
            link.touch(7, ACTIVE, owner=1)
        stage = CacheStage(link)
        await stage.welcome()
        request = pb.GetPageRequest(page_id=7, event_limit=100)
        assert len((await stage.servicer.GetPage(request, None)).events) == 30
        stage.mirrors.link_lost(cast(Any, link), LostReason.CRASH)
        link.restart()
        link.touch(7, ACTIVE, owner=1)
        stage.mirrors.link_welcomed(cast(Any, link))
        await stage.servicer.GetPage(request, None)  # while the new map is not there yet
        await stage.welcome()
        page = await stage.servicer.GetPage(request, None)
        assert [event.number for event in page.events] == [1]

    asyncio.run(work())


def test_a_feed_that_falls_silent_costs_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "SILENCE_SECONDS", 3600.0)

    async def work() -> None:
        link = ScriptedLink(page_count=10)
        stage = CacheStage(link)
        await stage.welcome()
        (kept,) = stage.mirrors.kept
        stage.mirrors.link_beat(cast(Any, link))
        assert (kept.is_live, kept.mirror.standing) == (True, Standing.CURRENT)
        kept.fed_time -= mirrors.SILENCE_SECONDS
        assert not kept.is_live
        stage.mirrors.link_beat(cast(Any, link))
        assert kept.mirror.standing is Standing.BEHIND
        await until(lambda: kept.is_live)
        assert link.commands == ["snapshot", "snapshot"]

    asyncio.run(work())


def test_events_are_followed_for_a_while_after_their_last_use() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=10)
        link.touch(7, ACTIVE, owner=1)
        stage = CacheStage(link)
        await stage.welcome()
        (kept,) = stage.mirrors.kept
        request = pb.GetPageRequest(page_id=7, event_limit=10)
        await stage.servicer.GetPage(request, None)
        stage.mirrors.link_beat(cast(Any, link))
        assert b"e" in link.topics
        kept._events_used -= mirrors.EVENTS_KEPT_SECONDS + 1
        stage.mirrors.link_beat(cast(Any, link))
        assert b"e" not in link.topics
        await stage.servicer.GetPage(request, None)
        assert b"e" in link.topics
        assert link.commands.count("replay") == 2

    asyncio.run(work())


@pytest.mark.parametrize("end", ["lost", "closed", "removed"])
def test_nothing_is_asked_any_more_of_a_worker_that_is_gone(end: str) -> None:
    """Who waits for its events gets what is there."""

    async def work() -> None:
        link = ScriptedLink(page_count=10)
        stage = CacheStage(link)
        await stage.welcome()
        (kept,) = stage.mirrors.kept
        link.replay_gate = asyncio.Event()
        before = asyncio.all_tasks()
        waiting = asyncio.ensure_future(kept.events())
        await until(lambda: "replay" in link.commands)
        if end == "lost":
            stage.mirrors.link_lost(cast(Any, link), LostReason.CRASH)
        elif end == "closed":
            stage.mirrors.close()
        else:
            stage.mirrors.link_removed(cast(Any, link))
            assert kept.is_gone
        assert await waiting is kept.ring
        assert asyncio.all_tasks() <= before

    asyncio.run(work())


def test_sequences_that_the_worker_no_longer_has_do_not_stay() -> None:
    """A worker that says twice that it is idle ended what the mirror still holds."""

    async def work() -> None:
        link = ScriptedLink(page_count=10)
        link.sequence(1, [1])
        stage = CacheStage(link)
        await stage.welcome()
        link.sequences.clear()
        link.beat = SimpleNamespace(state=2, running_sequences=0, waiting_requests=0)
        for _ in range(2):
            stage.mirrors.link_beat(cast(Any, link))
        await until(lambda: not len(stage.mirrors.kept[0].mirror.sequences))

    asyncio.run(work())


def test_a_refused_snapshot_is_asked_for_again_as_soon_as_the_workers_state_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that loads its model refuses; its first heartbeat as a serving one ends the pause."""
    monkeypatch.setattr(mirrors, "MIN_RETRY_SECONDS", 3600.0)

    async def work() -> None:
        link = ScriptedLink(page_count=10)
        link.fails_with = worker_pb2.CommandReply(code=14, message="the worker is loading its model")
        stage = CacheStage(link)
        stage.mirrors.link_welcomed(cast(Any, link))
        await until(lambda: link.commands == ["snapshot"])
        link.fails_with = None
        link.beat = SimpleNamespace(state=3, running_sequences=0, waiting_requests=0)
        stage.mirrors.link_beat(cast(Any, link))
        await until(lambda: stage.mirrors.kept[0].mirror.standing is Standing.CURRENT)
        assert link.commands == ["snapshot", "snapshot"]

    asyncio.run(work())


def test_why_there_is_no_snapshot_is_said_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that loads a model for a minute was in the log thirty times."""
    reasons = ("it loads its model", "it warms up")
    monkeypatch.setattr(mirrors, "MIN_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(mirrors, "MAX_RETRY_SECONDS", 0.001)

    async def work() -> None:
        link = ScriptedLink(page_count=10)
        stage = CacheStage(link)
        for number, why in enumerate(reasons):
            link.fails_with = worker_pb2.CommandReply(code=14, message=why)
            if not number:
                stage.mirrors.link_welcomed(cast(Any, link))
            asked = len(link.commands)
            await until(lambda asked=asked: len(link.commands) >= asked + 5)
        link.fails_with = None
        await until(lambda: stage.mirrors.kept[0].mirror.standing is Standing.CURRENT)

    with caplog.at_level(logging.INFO, "service.mirror"):
        asyncio.run(work())
    told = [record.getMessage() for record in caplog.records if "event=no_snapshot" in record.getMessage()]
    assert told == [f"event=no_snapshot worker=w0 why='code 14: {why}'" for why in reasons]


def test_an_event_in_words_says_all_that_its_columns_say() -> None:
    columns = {
        "types": 8,
        "steps": 5,
        "times_us": 2_000_000,
        "owners": 9,
        "ref_counts": 2,
        "other_page_ids": 3,
    }
    told = page_event(4, columns, "r")
    assert told == pb.PageEvent(
        number=4,
        type=pb.PAGE_EVENT_TYPE_COPIED,
        step=5,
        time={"seconds": 2},
        owner=9,
        request_id="r",
        ref_count=2,
        other_page_id=3,
    )
    assert not page_event(4, columns | {"other_page_ids": NO_PAGE}, "").HasField("other_page_id")
