"""Promises of CacheService against a scripted link: windows, watches, pages, lists, and what is refused."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvatlas.client.page_map import PageMap
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service.admission import Admission
from service.errors import Failure
from service.fleet import mirrors
from service.fleet.feed import PLANES
from service.fleet.link import CommandFailed
from service.fleet.mirrors import PageMirrors
from service.fleet.page_mirror import Standing
from service.handlers.cache import CacheServicer
from service.handlers.cache_messages import Viewer
from service.health import HealthBoard
from service.metrics import ServiceMetrics
from service.request import Call, LostReason, current_call

PAGES = 70_000  # two parts of a snapshot
FREE, ACTIVE, CACHED = 1, 2, 3


class ScriptedLink:
    """A link whose worker is a few arrays: says what the test makes it say."""

    def __init__(self, worker_id: str = "w0", page_count: int = PAGES) -> None:
        self.worker_id = self.address = worker_id
        self.is_up = True
        self.beat = SimpleNamespace(state=2, running_sequences=1, waiting_requests=0)
        self.epoch, self.number, self.base = 1, 0, 0
        self.planes = {name: np.zeros(page_count, kind) for name, kind in PLANES.items()}
        self.planes["states"][:] = FREE
        self.planes["parent_page_ids"][:] = 0xFFFFFFFF
        self.sequences: dict[int, pb.SequenceInfo] = {}  # by owner
        self.topics: set[bytes] = set()
        self.commands: list[str] = []
        self.events: list[tuple[int, int, int]] = []  # type, page, owner
        self.fails_with: worker_pb2.CommandReply | None = None
        self.replay_gate: asyncio.Event | None = None
        self._dirty: set[int] = set()
        self._changed: set[int] = set()

    @property
    def facts(self) -> Any:
        geometry = pb.PoolGeometry(
            worker_id=self.worker_id, epoch=self.epoch, page_count=len(self.planes["states"])
        )
        geometry.start_time.FromSeconds(1000)
        return SimpleNamespace(
            worker_id=self.worker_id, epoch=self.epoch, page_count=geometry.page_count, geometry=geometry
        )

    def subscribe(self, topic: bytes) -> None:
        self.topics.add(topic)

    def unsubscribe(self, topic: bytes) -> None:
        self.topics.discard(topic)

    # what happens

    def touch(self, page: int, state: int, owner: int = 0, refs: int = 1, kind: int = 1) -> None:
        self.number += 1
        for name, value in {"states": state, "owners": owner, "ref_counts": refs}.items():
            self.planes[name][page] = value
        self.events.append((kind, page, owner))
        self._dirty.add(page)

    def sequence(self, owner: int, pages: list[int], *, tenant: str = "acme", received: int = 0) -> None:
        info = pb.SequenceInfo(request_id=f"r{owner}", owner=owner, row=owner, state=3, tenant=tenant)
        info.page_ids = array("I", pages).tobytes()
        info.receive_time.FromSeconds(received or owner)
        info.labels["team"] = "x"
        info.token_count = 16 * len(pages)
        self.sequences[owner] = info
        self._changed.add(owner)

    def restart(self) -> None:
        self.__init__(self.worker_id, len(self.planes["states"]))  # type: ignore[misc]
        self.epoch = 2

    # what it says

    def revision(self) -> pb.Revision:
        return pb.Revision(epoch=self.epoch, number=self.number, step=self.number)

    def stats(self) -> pb.PoolStats:
        counts = np.bincount(self.planes["states"], minlength=4)
        return pb.PoolStats(free_pages=counts[FREE], active_pages=counts[ACTIVE], cached_pages=counts[CACHED])

    def delta(self) -> bytes:
        pages = np.array(sorted(self._dirty), np.uint32)
        feed = worker_pb2.PageFeed(revision=self.revision(), base_number=self.base, stats=self.stats())
        feed.publish_time.FromSeconds(1010)
        feed.delta.page_ids = pages.tobytes()
        for name, plane in self.planes.items():
            setattr(feed.delta.pages, name, plane[pages].tobytes())
        feed.delta.sequences.extend(self.sequences[owner] for owner in sorted(self._changed))
        self.base = self.number
        self._dirty, self._changed = set(), set()
        return feed.SerializeToString()

    def event_batch(self, after: int) -> pb.PageEventBatch:
        kinds, pages, owners = zip(*self.events[after:], strict=True) if self.events[after:] else ((), (), ())
        count = len(kinds)
        batch = pb.PageEventBatch(first_number=after + 1, first_step=after + 1, types=bytes(kinds))
        batch.first_time.FromSeconds(1001)
        batch.page_ids, batch.owners = array("I", pages).tobytes(), array("H", owners).tobytes()
        batch.ref_counts = bytes(2 * count)
        batch.step_offsets = array("I", range(count)).tobytes()
        batch.time_offsets_us, batch.other_page_ids = bytes(4 * count), b"\xff" * 4 * count
        batch.fingerprints = bytes(8 * count)
        return batch

    def event_feed(self, after: int) -> bytes:
        feed = worker_pb2.PageFeed(revision=self.revision(), events=self.event_batch(after))
        return feed.SerializeToString()

    async def command(
        self, command: worker_pb2.Command, *, timeout: float
    ) -> AsyncIterator[worker_pb2.CommandReply]:
        kind = command.WhichOneof("command") or ""
        self.commands.append(kind)
        await asyncio.sleep(0)
        if self.fails_with is not None:
            raise CommandFailed(self.fails_with)
        if kind == "snapshot":
            self.delta()  # a snapshot lies on a delta
            for part in self._snapshot():
                yield worker_pb2.CommandReply(snapshot=part)
        elif kind == "replay":
            if self.replay_gate is not None:
                await self.replay_gate.wait()
            yield worker_pb2.CommandReply(events=self.event_batch(command.replay.after_number))
        elif kind == "page_table":
            for owner, info in self.sequences.items():
                row = pb.GetPageTableResponse(row=owner, owner=owner, request_id=info.request_id)
                yield worker_pb2.CommandReply(page_table=row)
        elif kind == "check_integrity":
            yield worker_pb2.CommandReply(check_integrity=pb.RunIntegrityCheckResponse(checked_pages=7))

    def _snapshot(self) -> list[worker_pb2.SnapshotReply]:
        total = len(self.planes["states"])
        starts = list(range(0, total, 65_536))
        parts = []
        for place, start in enumerate(starts):
            chunk = pb.SnapshotChunk(first_page_id=start, chunks_left=len(starts) - place)
            chunk.page_count = min(65_536, total - start)
            for name, plane in self.planes.items():
                setattr(chunk.pages, name, plane[start : start + 65_536].tobytes())
            parts.append(worker_pb2.SnapshotReply(revision=self.revision(), chunk=chunk))
        last = pb.SnapshotChunk(sequences=self.sequences.values())
        parts.append(worker_pb2.SnapshotReply(revision=self.revision(), chunk=last, stats=self.stats()))
        return parts


@dataclass
class Context:
    """A call's context: keeps what is written; a gate makes the reader slow."""

    written: list[Any] = field(default_factory=list)
    gate: asyncio.Event | None = None
    has_metadata: bool = False

    async def write(self, message: Any) -> None:
        self.written.append(message)
        if self.gate is not None:
            await self.gate.wait()

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.has_metadata = True


class Stage:
    """A servicer on scripted links."""

    def __init__(self, *links: ScriptedLink, viewer: Viewer | None = None, max_watches: int = 64) -> None:
        self.links = links
        self.board = HealthBoard(asyncio.get_running_loop())
        self.mirrors = PageMirrors()
        self.metrics = ServiceMetrics(CollectorRegistry(), version="1", commit="c")
        backstage = SimpleNamespace(
            board=self.board,
            watches=Admission(max_watches),
            config=SimpleNamespace(max_watches=max_watches),
            refuse_if_draining=lambda: None,
            metrics=self.metrics,
        )
        chosen = viewer or Viewer(is_admin=True)
        self.servicer = CacheServicer(cast(Any, backstage), self.mirrors, lambda call: chosen)
        self.watches = backstage.watches
        current_call.set(Call("/kvatlas.v1.CacheService/Any"))

    async def welcome(self) -> None:
        for link in self.links:
            self.mirrors.link_welcomed(cast(Any, link))
        await until(lambda: all(kept.mirror.standing.value == "current" for kept in self.mirrors.kept))

    def feed(self, link: ScriptedLink) -> None:
        self.mirrors.link_fed(cast(Any, link), b"d", link.delta())

    async def watch(self, context: Context, **fields: Any) -> "asyncio.Task[None]":
        request = pb.WatchPageMapRequest(**fields)
        request.min_interval.FromMilliseconds(50)
        task = asyncio.ensure_future(self.servicer.WatchPageMap(request, context))
        await until(lambda: bool(context.written) or task.done())
        return task


async def until(is_so: Callable[[], bool], limit: float = 60.0) -> None:
    async with asyncio.timeout(limit):
        while not is_so():
            await asyncio.sleep(0.002)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def refused(work: Coroutine[Any, Any, Any]) -> Failure:
    with pytest.raises(Failure) as caught:
        await work
    return caught.value


def paths(failure: Failure) -> list[str]:
    return [violation.path for violation in failure.violations]


# -- pool and windows --------------------------------------------------------------------------------------


def test_windows_show_the_planes_that_are_asked_for() -> None:
    async def work() -> None:
        link = ScriptedLink()
        link.touch(65_540, ACTIVE, owner=3)
        stage = Stage(link)
        await stage.welcome()
        answer = await stage.servicer.GetPageMap(
            pb.GetPageMapRequest(planes=["states", "owners"], first_page_id=65_536, page_limit=10), None
        )
        assert np.frombuffer(answer.pages.states, "u1").tolist() == [FREE] * 4 + [ACTIVE] + [FREE] * 5
        assert np.frombuffer(answer.pages.owners, "<u2")[4] == 3
        assert answer.pages.flags == b""
        assert (answer.first_page_id, answer.page_count, answer.revision.number) == (65_536, 10, 1)
        whole = await stage.servicer.GetPageMap(pb.GetPageMapRequest(), None)
        assert (whole.page_count, len(whole.pages.fingerprints)) == (65_536, 8 * 65_536)
        pool = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(worker_id="w0"), None)
        assert pool.geometry.page_count == PAGES
        assert (pool.stats.free_pages, pool.stats.active_pages) == (PAGES - 1, 1)

    run(work())


def test_what_cannot_be_shown_is_refused_with_every_violation() -> None:
    async def work() -> None:
        empty = Stage()
        assert (
            await refused(empty.servicer.GetPagePool(pb.GetPagePoolRequest(), None))
        ).reason == "NOT_READY"
        stage = Stage(ScriptedLink(page_count=100))
        stage.mirrors.link_welcomed(cast(Any, stage.links[0]))
        early = await refused(stage.servicer.GetPageMap(pb.GetPageMapRequest(), None))
        assert (early.reason, early.retry_ms) == ("NOT_READY", 1000)
        await stage.welcome()
        bad = pb.GetPageMapRequest(planes=["states", "nonsense"], page_limit=65_537)
        assert paths(await refused(stage.servicer.GetPageMap(bad, None))) == ["planes[1]", "page_limit"]
        for request in (pb.GetPageMapRequest(first_page_id=100), pb.GetPageMapRequest(worker_id="who")):
            failure = await refused(stage.servicer.GetPageMap(request, None))
            assert (failure.status, failure.reason) == (grpc.StatusCode.NOT_FOUND, "WORKER_NOT_FOUND")
        wrong = pb.EstimateCacheRequest(
            pool_slots=range(1, 34), page_sizes=range(1, 10), eviction_policies=["lru"]
        )
        wrong.window.FromSeconds(0)
        estimate = await refused(stage.servicer.EstimateCache(wrong, None))
        assert paths(estimate) == ["pool_slots", "page_sizes", "pool_slots", "window"]

    run(work())


def test_of_several_workers_one_must_be_named() -> None:
    async def work() -> None:
        stage = Stage(ScriptedLink("a", 10), ScriptedLink("b", 20))
        await stage.welcome()
        failure = await refused(stage.servicer.GetPagePool(pb.GetPagePoolRequest(), None))
        assert (failure.reason, failure.metadata) == ("WORKER_ID_REQUIRED", {"worker_ids": "a,b"})
        answer = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(worker_id="b"), None)
        assert answer.geometry.page_count == 20

    run(work())


# -- watching ----------------------------------------------------------------------------------------------


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
        stage, context = Stage(link), Context()
        await stage.welcome()
        task = await stage.watch(context)
        assert context.has_metadata
        await until(lambda: len(context.written) == 3)
        parts = [message.snapshot for message in context.written]
        assert [part.chunks_left for part in parts] == [2, 1, 0]
        assert [part.page_count for part in parts] == [65_536, PAGES - 65_536, 0]
        assert {part.cause for part in parts} == {pb.SNAPSHOT_CAUSE_INITIAL}
        assert parts[0].geometry.page_count == PAGES
        for page in (6, 69_999):
            link.touch(page, ACTIVE, owner=1)
        link.sequence(1, [5, 6, 69_999])
        stage.feed(link)
        await until(lambda: len(context.written) == 4)
        delta = context.written[3]
        assert (delta.base_number, delta.revision.number, delta.delta.merged_events) == (1, 3, 2)
        assert np.frombuffer(delta.delta.page_ids, "<u4").tolist() == [6, 69_999]
        assert_equal(follow(context.written), link)
        task.cancel()

    run(work())


def test_a_watcher_that_reads_slowly_gets_one_message_for_all_that_happened() -> None:
    """Nothing is queued for it: the next message is made when the last one was taken."""

    async def work() -> None:
        link = ScriptedLink(page_count=1000)
        stage, context = Stage(link), Context()
        await stage.welcome()
        task = await stage.watch(context)
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

    run(work())


def test_a_slow_snapshot_shows_one_moment_and_the_delta_after_it_the_rest() -> None:
    async def work() -> None:
        link = ScriptedLink()
        stage, context = Stage(link), Context(gate=asyncio.Event())
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
        assert context.written[1].revision.number == 0
        assert np.frombuffer(context.written[2].delta.page_ids, "<u4").tolist() == [3, 69_000]
        assert_equal(follow(context.written), link)
        task.cancel()

    run(work())


def test_a_lost_delta_and_a_new_life_give_new_snapshots_with_their_cause() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, context = Stage(link), Context()
        await stage.welcome()
        task = await stage.watch(context)
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

    run(work())


def test_a_watch_goes_on_after_the_revision_it_has() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        stage, first = Stage(link), Context()
        await stage.welcome()
        task = await stage.watch(first)
        link.touch(1, ACTIVE)
        stage.feed(link)
        await until(lambda: len(first.written) == 2)
        task.cancel()
        link.touch(2, ACTIVE)
        link.touch(1, CACHED)
        link.sequence(4, [2])
        stage.feed(link)
        second = Context()
        task = await stage.watch(second, resume_after=first.written[1].revision)
        message = second.written[0]
        assert (message.WhichOneof("event"), message.base_number) == ("delta", 1)
        assert_equal(follow(first.written + second.written), link)
        task.cancel()
        third = Context()
        task = await stage.watch(third, resume_after=message.revision)
        assert third.written[0].WhichOneof("event") in ("heartbeat", "delta")
        assert_equal(follow(first.written + second.written + third.written), link)
        task.cancel()
        for at, cause in (
            (pb.Revision(epoch=7, number=1), pb.SNAPSHOT_CAUSE_EPOCH_CHANGED),
            (pb.Revision(epoch=1, number=99), pb.SNAPSHOT_CAUSE_LAGGED),
        ):
            context = Context()
            task = await stage.watch(context, resume_after=at)
            assert context.written[0].snapshot.cause == cause
            task.cancel()

    run(work())


def test_heartbeats_come_while_the_feed_lives_and_stop_with_it() -> None:
    """A watcher sees by the silence that nobody knows how the pool stands."""

    async def work() -> None:
        link = ScriptedLink(page_count=5)
        stage, context = Stage(link), Context()
        await stage.welcome()
        request = pb.WatchPageMapRequest()
        request.heartbeat_interval.FromSeconds(1)
        task = asyncio.ensure_future(stage.servicer.WatchPageMap(request, context))
        await until(lambda: len(context.written) >= 2)
        beat = context.written[1]
        assert (beat.WhichOneof("event"), beat.base_number, beat.revision.number) == ("heartbeat", 0, 0)
        link.is_up, count = False, len(context.written)
        await asyncio.sleep(1.3)
        assert len(context.written) == count
        task.cancel()

    run(work())


def test_planes_and_sequences_are_left_out_on_request() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=5)
        link.sequence(1, [2])
        stage, context = Stage(link), Context()
        await stage.welcome()
        task = await stage.watch(context, planes=["states"], include_sequences=False)
        link.touch(2, ACTIVE)
        link.sequence(1, [2, 3])
        stage.feed(link)
        await until(lambda: len(context.written) == 2)
        snapshot, delta = context.written[0].snapshot, context.written[1].delta
        assert (snapshot.chunks_left, len(snapshot.pages.states), snapshot.pages.owners) == (0, 5, b"")
        assert (delta.pages.states, delta.pages.flags, len(delta.sequences)) == (bytes([ACTIVE]), b"", 0)
        task.cancel()

    run(work())


def test_watches_are_bounded_and_end_with_the_drain() -> None:
    async def work() -> None:
        stage = Stage(ScriptedLink(page_count=5), max_watches=2)
        await stage.welcome()
        tasks = [await stage.watch(Context()) for _ in range(2)]
        failure = await refused(stage.servicer.WatchPageMap(pb.WatchPageMapRequest(), Context()))
        assert (failure.status, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCH_LIMIT")
        stage.board.set_draining(True)
        done, _ = await asyncio.wait(tasks, timeout=60)
        assert {getattr(task.exception(), "reason", None) for task in done} == {"DRAINING"}
        assert stage.watches.active == 0
        assert not stage.mirrors.kept[0].mirror.readers

    run(work())


def test_a_cancelled_watch_leaves_nothing_behind() -> None:
    """B111: whoever goes away, the mirror forgets him."""

    async def work() -> None:
        link = ScriptedLink()
        stage, context = Stage(link), Context(gate=asyncio.Event())
        await stage.welcome()
        task = await stage.watch(context)
        task.cancel()
        await asyncio.wait([task])
        mirror = stage.mirrors.kept[0].mirror
        assert (stage.watches.active, mirror.readers, mirror._frozen) == (0, [], [])

    run(work())


def test_every_bad_field_of_a_watch_is_named() -> None:
    async def work() -> None:
        stage = Stage(ScriptedLink(page_count=5))
        await stage.welcome()
        request = pb.WatchPageMapRequest(planes=["x"], mode=cast(Any, 9))
        request.min_interval.FromMilliseconds(49)
        request.heartbeat_interval.FromSeconds(61)
        failure = await refused(stage.servicer.WatchPageMap(request, Context()))
        assert paths(failure) == ["planes[0]", "mode", "min_interval", "heartbeat_interval"]
        ids = await refused(
            stage.servicer.WatchPageMap(pb.WatchPageMapRequest(include_token_ids=True), Context())
        )
        assert ids.reason == "FEATURE_DISABLED"

    run(work())


def test_every_event_comes_once_and_in_order_and_a_reader_that_lags_starts_over() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        for page in range(10):
            link.touch(page, ACTIVE, owner=1)
        link.delta()
        stage, context = Stage(link), Context()
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

    run(work())


# -- pages and sequences -----------------------------------------------------------------------------------


def test_a_page_is_told_with_its_sequences_children_and_last_events() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        link.touch(7, ACTIVE, owner=1)
        link.touch(7, ACTIVE, owner=1, refs=2, kind=2)
        link.touch(8, ACTIVE, owner=3)
        link.planes["parent_page_ids"][8] = 7
        link.planes["flags"][7] = pb.PAGE_FLAG_SEALED
        link.planes["born_ms"][7], link.planes["used_ms"][7] = 4_000, 9_000
        for owner, pages in ((1, [7]), (2, [7, 9]), (3, [8])):
            link.sequence(owner, pages)
        stage = Stage(link)
        await stage.welcome()
        stage.feed(link)
        page = await stage.servicer.GetPage(pb.GetPageRequest(page_id=7, event_limit=100), None)
        assert (page.state, page.sealed, page.pinned, page.ref_count) == (
            pb.PAGE_STATE_ACTIVE,
            True,
            False,
            2,
        )
        assert [each.request_id for each in page.sequences] == ["r1", "r2"]
        assert all(not each.page_ids for each in page.sequences)
        assert (page.HasField("parent_page_id"), list(page.child_page_ids)) == (False, [8])
        # Born 4 s and used 9 s after the start; the feed's clock stands at 10 s.
        assert (page.age.ToMilliseconds(), page.idle.ToMilliseconds()) == (6_000, 1_000)
        assert [(event.number, event.type) for event in page.events] == [(1, 1), (2, 2)]
        child = await stage.servicer.GetPage(pb.GetPageRequest(page_id=8), None)
        assert (child.parent_page_id, len(child.events)) == (7, 0)
        assert link.commands.count("replay") == 1
        await stage.servicer.GetPage(pb.GetPageRequest(page_id=8, event_limit=1), None)
        assert link.commands.count("replay") == 1
        bad = await refused(stage.servicer.GetPage(pb.GetPageRequest(page_id=8, event_limit=101), None))
        assert paths(bad) == ["event_limit"]
        assert (await refused(stage.servicer.GetPage(pb.GetPageRequest(page_id=50), None))).reason == (
            "WORKER_NOT_FOUND"
        )

    run(work())


def test_events_that_come_during_the_replay_are_not_lost_and_callers_may_leave() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        link.touch(7, ACTIVE, owner=1)
        stage = Stage(link)
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
        page = await staying
        link.events = told
        assert [(event.number, event.type) for event in page.events] == [(1, 1), (2, 5)]

    run(work())


def test_a_new_life_begins_a_new_ring_of_events() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        for _ in range(30):
            link.touch(7, ACTIVE, owner=1)
        stage = Stage(link)
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

    run(work())


def test_lists_are_paged_oldest_first_and_cursors_are_checked() -> None:
    async def work() -> None:
        link, other = ScriptedLink("a", 10), ScriptedLink("b", 10)
        for owner in range(1, 8):
            link.sequence(owner, [owner], received=100 - owner)
        stage = Stage(link, other)
        await stage.welcome()
        names: list[str] = []
        cursor = ""
        while True:
            request = pb.ListSequencesRequest(worker_id="a", max_results=3, cursor=cursor)
            answer = await stage.servicer.ListSequences(request, None)
            assert answer.total_count == 7
            names += [each.request_id for each in answer.sequences]
            cursor = answer.next_cursor
            if not cursor:
                break
            last = cursor
        assert names == [f"r{owner}" for owner in range(7, 0, -1)]
        for bad in (
            pb.ListSequencesRequest(worker_id="b", cursor=last),
            pb.ListSequencesRequest(worker_id="a", cursor="?"),
        ):
            assert paths(await refused(stage.servicer.ListSequences(bad, None))) == ["cursor"]
        few = pb.ListSequencesRequest(worker_id="a", states=[pb.SEQUENCE_STATE_WAITING])
        assert len((await stage.servicer.ListSequences(few, None)).sequences) == 0
        bare = pb.ListSequencesRequest(worker_id="a", omit_page_ids=True)
        assert not any(each.page_ids for each in (await stage.servicer.ListSequences(bare, None)).sequences)
        wrong = pb.ListSequencesRequest(worker_id="a", max_results=1001, states=[cast(Any, 0)])
        assert paths(await refused(stage.servicer.ListSequences(wrong, None))) == ["max_results", "states[0]"]

    run(work())


def test_one_sequence_is_found_by_its_request_on_any_worker() -> None:
    async def work() -> None:
        link = ScriptedLink("b", 10)
        link.sequence(5, [1, 2])
        stage = Stage(ScriptedLink("a", 10), link)
        await stage.welcome()
        answer = await stage.servicer.GetSequence(pb.GetSequenceRequest(request_id="r5"), None)
        assert (answer.worker_id, answer.sequence.owner) == ("b", 5)
        assert np.frombuffer(answer.sequence.page_ids, "<u4").tolist() == [1, 2]
        failure = await refused(stage.servicer.GetSequence(pb.GetSequenceRequest(request_id="r6"), None))
        assert failure.reason == "SEQUENCE_NOT_FOUND"

    run(work())


def test_rows_come_from_the_worker_and_its_no_is_passed_on() -> None:
    async def work() -> None:
        link, context = ScriptedLink(page_count=10), Context()
        link.sequence(1, [2])
        stage = Stage(link)
        await stage.welcome()
        await stage.servicer.GetPageTable(pb.GetPageTableRequest(), context)
        assert [(row.row, row.request_id) for row in context.written] == [(1, "r1")]
        many = await refused(stage.servicer.GetPageTable(pb.GetPageTableRequest(rows=range(65)), context))
        assert paths(many) == ["rows"]
        link.fails_with = worker_pb2.CommandReply(code=8, error_reason=cast(Any, 8), message="once a second")
        failure = await refused(
            stage.servicer.GetPageTable(pb.GetPageTableRequest(from_device=True), context)
        )
        assert (failure.status, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")

    run(work())


def test_other_tenants_requests_have_no_names_and_their_waiting_ones_are_not_watched() -> None:
    async def work() -> None:
        link, context, rows = ScriptedLink(page_count=10), Context(), Context()
        link.sequence(1, [1], tenant="acme")
        link.sequence(2, [2], tenant="other")
        link.sequence(3, [], tenant="other")
        link.sequences[3].owner, link.sequences[3].state = 0, pb.SEQUENCE_STATE_WAITING
        stage = Stage(link, viewer=Viewer("acme"))
        await stage.welcome()
        listed = (await stage.servicer.ListSequences(pb.ListSequencesRequest(), None)).sequences
        assert [each.request_id for each in listed] == ["r1", "", ""]
        assert not any(each.tenant or each.labels for each in listed)
        await stage.servicer.GetPageTable(pb.GetPageTableRequest(), rows)
        assert [row.request_id for row in rows.written] == ["r1", "", ""]
        assert (
            await refused(stage.servicer.GetSequence(pb.GetSequenceRequest(request_id="r2"), None))
        ).reason == ("SEQUENCE_NOT_FOUND")
        scope = await refused(stage.servicer.GetPageTable(pb.GetPageTableRequest(from_device=True), rows))
        assert (scope.status, scope.metadata) == (grpc.StatusCode.PERMISSION_DENIED, {"scope": "admin"})
        task = await stage.watch(context)
        await until(lambda: len(context.written) == 2)
        assert [each.owner for each in context.written[1].snapshot.sequences] == [1, 2]
        task.cancel()

    run(work())


def test_sequences_that_the_worker_no_longer_has_do_not_stay() -> None:
    """A worker that says twice that it is idle ended what the mirror still holds."""

    async def work() -> None:
        link = ScriptedLink(page_count=10)
        link.sequence(1, [1])
        stage = Stage(link)
        await stage.welcome()
        link.sequences.clear()
        link.beat = SimpleNamespace(state=2, running_sequences=0, waiting_requests=0)
        for _ in range(2):
            stage.mirrors.link_beat(cast(Any, link))
        await until(lambda: not len(stage.mirrors.kept[0].mirror.sequences))

    run(work())


def test_a_refused_snapshot_is_asked_for_again_as_soon_as_the_workers_state_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that loads its model refuses; its first heartbeat as a serving one ends the pause."""
    monkeypatch.setattr(mirrors, "MIN_RETRY_SECONDS", 3600.0)

    async def work() -> None:
        link = ScriptedLink(page_count=10)
        link.fails_with = worker_pb2.CommandReply(code=14, message="the worker is loading its model")
        stage = Stage(link)
        stage.mirrors.link_welcomed(cast(Any, link))
        await until(lambda: link.commands == ["snapshot"])
        link.fails_with = None
        link.beat = SimpleNamespace(state=3, running_sequences=0, waiting_requests=0)
        stage.mirrors.link_beat(cast(Any, link))
        await until(lambda: stage.mirrors.kept[0].mirror.standing is Standing.CURRENT)
        assert link.commands == ["snapshot", "snapshot"]

    run(work())


# -- the audit ---------------------------------------------------------------------------------------------


def violation(number: int) -> pb.IntegrityViolation:
    return pb.IntegrityViolation(check=pb.INTEGRITY_CHECK_TRIE, subject=f"page {number}", page_id=number)


def test_a_full_check_needs_the_admin_scope_and_a_worker_that_is_there() -> None:
    async def work() -> None:
        request = pb.RunIntegrityCheckRequest()
        stage = Stage(ScriptedLink(page_count=10), viewer=Viewer("acme", is_admin=False))
        await stage.welcome()
        assert (await refused(stage.servicer.RunIntegrityCheck(request, None))).reason == "MISSING_SCOPE"
        stage = Stage(ScriptedLink(page_count=10))
        await stage.welcome()
        assert (await stage.servicer.RunIntegrityCheck(request, None)).checked_pages == 7
        stage.links[0].fails_with = worker_pb2.CommandReply(code=8, error_reason=8, message="one a second")
        failure = await refused(stage.servicer.RunIntegrityCheck(request, None))
        assert (failure.status, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")

    run(work())


@pytest.mark.parametrize("mode", [pb.WATCH_MODE_STATE, pb.WATCH_MODE_EVENTS])
def test_watchers_are_told_each_violation_once_though_no_page_changes(mode: Any) -> None:
    async def work() -> None:
        stage, context = Stage(ScriptedLink(page_count=10)), Context()
        await stage.welcome()
        stage.mirrors.kept[0].violations.add([violation(1)])  # before the watch began
        task = await stage.watch(context, mode=mode)

        def said() -> list[int]:
            return [each.page_id for message in context.written for each in message.violations]

        for number in (2, 3):
            feed = worker_pb2.PageFeed.FromString(stage.links[0].delta())
            feed.violations.append(violation(number))
            stage.mirrors.link_fed(cast(Any, stage.links[0]), b"d", feed.SerializeToString())
            await until(lambda: len(said()) == number - 1, 0.5)  # noqa: B023  # sooner than a heartbeat
        assert said() == [2, 3]
        task.cancel()

    run(work())


def test_of_many_violations_the_newest_are_kept() -> None:
    async def work() -> None:
        stage = Stage(ScriptedLink(page_count=10))
        await stage.welcome()
        log = stage.mirrors.kept[0].violations
        log.add([violation(number) for number in range(250)])
        assert [each.page_id for each in log.after(248)] == [248, 249]
        assert [each.page_id for each in log.after(0)] == list(range(150, 250))
        assert log.after(250) == []

    run(work())


# -- series ------------------------------------------------------------------------------------------------


def test_open_watches_are_counted_by_mode_and_no_longer_when_they_end() -> None:
    async def work() -> None:
        stage, first, second = Stage(ScriptedLink(page_count=10)), Context(), Context()
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

    run(work())
