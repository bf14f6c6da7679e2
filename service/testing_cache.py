"""What tests of CacheService share: the servicer on links whose workers are a few arrays.

The arrays are what a test says they are; snapshots, deltas and events are made of them as by a worker.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry

from kvatlas.v1 import cache_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service.admission import Admission
from service.errors import Failure
from service.fleet.feed import PLANES
from service.fleet.link import CommandFailed
from service.fleet.mirrors import PageMirrors
from service.handlers.cache import CacheServicer
from service.handlers.cache_messages import Viewer
from service.health import HealthBoard
from service.metrics import ServiceMetrics
from service.request import Call, current_call

PAGES = 70_000  # two parts of a snapshot
FREE, ACTIVE, CACHED = 1, 2, 3


class ScriptedLink:
    """A link whose worker is a few arrays: says what the test makes it say."""

    def __init__(self, worker_id: str = "w0", page_count: int = PAGES) -> None:
        self.worker_id = self.address = worker_id
        self.start_seconds = 1000  # its clock when this life began
        self.is_up = True
        self.beat_time = 0.0
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
        """As a worker introduces itself."""
        geometry = pb.PoolGeometry(
            worker_id=self.worker_id, epoch=self.epoch, page_count=len(self.planes["states"])
        )
        geometry.start_time.FromSeconds(self.start_seconds)
        return SimpleNamespace(
            worker_id=self.worker_id, epoch=self.epoch, page_count=geometry.page_count, geometry=geometry
        )

    def subscribe(self, topic: bytes) -> None:
        """See WorkerLink."""
        self.topics.add(topic)

    def unsubscribe(self, topic: bytes) -> None:
        """See WorkerLink."""
        self.topics.discard(topic)

    # what happens

    def touch(self, page: int, state: int, owner: int = 0, refs: int = 1, kind: int = 1) -> None:
        """A page changes, with an event."""
        self.number += 1
        for name, value in {"states": state, "owners": owner, "ref_counts": refs}.items():
            self.planes[name][page] = value
        self.events.append((kind, page, owner))
        self._dirty.add(page)

    def sequence(self, owner: int, pages: list[int], *, tenant: str = "acme", received: int = 0) -> None:
        """A sequence is there, or has other pages."""
        info = pb.SequenceInfo(request_id=f"r{owner}", owner=owner, row=owner, tenant=tenant)
        info.state = pb.SEQUENCE_STATE_DECODE
        info.page_ids = array("I", pages).tobytes()
        info.receive_time.FromSeconds(received or owner)
        info.labels["team"] = "x"
        info.token_count = 16 * len(pages)
        self.sequences[owner] = info
        self._changed.add(owner)

    def restart(self, page_count: int = 0, start_seconds: int = 1000) -> None:
        """Another life of the worker: another epoch, an empty pool, of the same size if none is given."""
        self.__init__(self.worker_id, page_count or len(self.planes["states"]))  # type: ignore[misc]
        self.epoch, self.start_seconds = 2, start_seconds

    # what it says

    def revision(self) -> pb.Revision:
        """As of the last event."""
        return pb.Revision(epoch=self.epoch, number=self.number, step=self.number)

    def stats(self) -> pb.PoolStats:
        """Totals of the pool."""
        counts = np.bincount(self.planes["states"], minlength=4)
        return pb.PoolStats(free_pages=counts[FREE], active_pages=counts[ACTIVE], cached_pages=counts[CACHED])

    def delta(self) -> bytes:
        """What has changed since the last one, as the feed has it."""
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
        """Events after a number."""
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
        """The same as the feed has it."""
        feed = worker_pb2.PageFeed(revision=self.revision(), events=self.event_batch(after))
        return feed.SerializeToString()

    async def command(
        self, command: worker_pb2.Command, *, timeout: float
    ) -> AsyncIterator[worker_pb2.CommandReply]:
        """Its replies."""
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
        for part in parts:
            part.publish_time.FromSeconds(1010)
        return parts


@dataclass
class ScriptedContext:
    """A call's context: keeps what is written; a gate makes the reader slow."""

    written: list[Any] = field(default_factory=list)
    gate: asyncio.Event | None = None
    has_metadata: bool = False

    async def write(self, message: Any) -> None:
        """As gRPC does."""
        self.written.append(message)
        if self.gate is not None:
            await self.gate.wait()

    async def send_initial_metadata(self, metadata: Any) -> None:
        """As gRPC does."""
        self.has_metadata = True


class CacheStage:
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
        """The workers introduce themselves; their maps are whole."""
        for link in self.links:
            self.mirrors.link_welcomed(cast(Any, link))
        await until(lambda: all(kept.mirror.standing.value == "current" for kept in self.mirrors.kept))

    def feed(self, link: ScriptedLink) -> None:
        """What has changed at a worker comes in."""
        self.mirrors.link_fed(cast(Any, link), b"d", link.delta())

    async def watch(self, context: ScriptedContext, **fields: Any) -> "asyncio.Task[None]":
        """A watch under way that has said something, or has ended."""
        request = pb.WatchPageMapRequest(**fields)
        request.min_interval.FromMilliseconds(50)
        task = asyncio.ensure_future(self.servicer.WatchPageMap(request, context))
        await until(lambda: bool(context.written) or task.done())
        return task


async def until(is_so: Callable[[], bool], limit: float = 60.0) -> None:
    """Waits for a condition; the limit only ends a test that hangs."""
    async with asyncio.timeout(limit):
        while not is_so():
            await asyncio.sleep(0.002)


async def refused(work: Coroutine[Any, Any, Any]) -> Failure:
    """What a call is refused with."""
    try:
        await work
    except Failure as failure:
        return failure
    raise AssertionError("nothing was refused")


def paths(failure: Failure) -> list[str]:
    """Fields that a refusal names."""
    return [violation.path for violation in failure.violations]
