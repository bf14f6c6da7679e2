"""A service that is nothing but a feed: for tests and benchmarks of large pools.

Speaks the real gRPC, so that all of the dashboard is under test; its pool is random and of any size. Its
messages come at a fixed rate and each changes a fixed share of the pages.
"""

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

from dashboard.frames import PAGES_PER_PART
from kvatlas.client.page_map import PLANES
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import cache_pb2_grpc, server_pb2, server_pb2_grpc

WORKER_ID = "synthetic-0"
PAGE_SIZE = 16
FREE, ACTIVE, CACHED, RESERVED = 1, 2, 3, 5


class SyntheticPool:
    """Random pages, changed at random. One watcher at a time."""

    def __init__(self, page_count: int, changed_share: float, seed: int = 1) -> None:
        self.random = np.random.default_rng(seed)
        self.page_count = page_count
        self.num_changed = max(1, round(page_count * changed_share))
        self.epoch = time.time_ns()
        self.number = 1
        self.planes = {name: np.zeros(page_count, kind) for name, kind in PLANES.items()}
        self.planes["parent_page_ids"][:] = 0xFFFFFFFF
        self._draw(np.arange(page_count))
        self.planes["states"][-1] = RESERVED

    @property
    def uptime_ms(self) -> int:
        """Since the start."""
        return (time.time_ns() - self.epoch) // 1_000_000

    def change(self) -> np.ndarray:
        """Changes some pages; their ids."""
        ids = np.unique(self.random.integers(0, self.page_count - 1, self.num_changed))
        self._draw(ids)
        self.number += len(ids)
        return ids

    def _draw(self, ids: np.ndarray) -> None:
        states = self.random.choice([FREE, ACTIVE, CACHED], len(ids), p=[0.3, 0.45, 0.25]).astype(np.uint8)
        is_active = states == ACTIVE
        self.planes["states"][ids] = states
        self.planes["owners"][ids] = np.where(is_active, self.random.integers(1, 400, len(ids)), 0)
        self.planes["ref_counts"][ids] = np.where(is_active, self.random.integers(1, 5, len(ids)), 0)
        self.planes["filled_slots"][ids] = np.where(states == FREE, 0, PAGE_SIZE)
        self.planes["used_ms"][ids] = self.uptime_ms
        # Prefixes of a bounded set: some that leave come back.
        prints = self.random.integers(1, 4 * self.page_count + 1, len(ids)).astype(np.uint64)
        self.planes["fingerprints"][ids] = np.where(states == CACHED, prints, 0)

    def counts(self) -> np.ndarray:
        """Pages by state."""
        return np.bincount(self.planes["states"], minlength=6)


class FeedServer:
    """The pool on a port of the loopback. `stop()` is a crash, `start()` another life on the same port.

    `beside`: another worker of the same service, which is not started by itself.
    """

    def __init__(
        self,
        page_count: int,
        *,
        changed_share: float = 0.002,
        hz: float = 10.0,
        port: int = 0,
        worker_id: str = WORKER_ID,
        beside: "FeedServer | None" = None,
    ) -> None:
        self.pool = SyntheticPool(page_count, changed_share)
        self.workers: dict[str, FeedServer] = {worker_id: self}
        if beside is not None:
            self.workers |= beside.workers
        self.worker_id = worker_id
        self.port = port
        self.sent_at: dict[int, float] = {}  # by number: wall time in ms of the newest message that has it
        self._interval = 1.0 / hz
        self._ended = threading.Event()
        self._changing = threading.Lock()
        self._server: Any = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> "FeedServer":
        """Listens."""
        self._ended.clear()
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        cache_pb2_grpc.add_CacheServiceServicer_to_server(_Cache(self), self._server)  # type: ignore[no-untyped-call]
        server_pb2_grpc.add_ServerServiceServicer_to_server(_Server(self), self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(self.address)
        self._server.start()
        return self

    def stop(self) -> None:
        """Ends all calls at once."""
        for each in self.workers.values():
            each._ended.set()
        self._server.stop(0).wait()

    def stand_still(self) -> None:
        """No page changes any more; when it returns the last change is done."""
        self._ended.set()
        with self._changing:
            return

    def messages(self) -> Iterator[pb.WatchPageMapResponse]:
        """Snapshot, then changes."""
        pool = self.pool
        count = -(-pool.page_count // PAGES_PER_PART)
        for part in range(count):
            yield self._part(part, count)
        due = time.monotonic()
        while not self._ended.is_set():
            due += self._interval
            self._ended.wait(max(0.0, due - time.monotonic()))
            message = self._message(base_number=pool.number)
            with self._changing:
                if self._ended.is_set():
                    return
                ids = pool.change()
            message.revision.number = pool.number
            message.delta.page_ids = ids.astype("<u4").tobytes()
            for name, plane in pool.planes.items():
                setattr(message.delta.pages, name, plane[ids].tobytes())
            self._count(message)
            self.sent_at = {pool.number: time.time_ns() / 1e6}
            yield message

    def _part(self, part: int, count: int) -> pb.WatchPageMapResponse:
        message = self._message()
        first = part * PAGES_PER_PART
        end = min(first + PAGES_PER_PART, self.pool.page_count)
        chunk = message.snapshot
        chunk.first_page_id, chunk.page_count, chunk.chunks_left = first, end - first, count - 1 - part
        if not part:
            chunk.geometry.worker_id, chunk.geometry.epoch = self.worker_id, self.pool.epoch
            chunk.geometry.page_count, chunk.geometry.page_size = self.pool.page_count, PAGE_SIZE
            chunk.geometry.start_time.FromNanoseconds(self.pool.epoch)
        for name, plane in self.pool.planes.items():
            setattr(chunk.pages, name, plane[first:end].tobytes())
        return message

    def _message(self, base_number: int = 0) -> pb.WatchPageMapResponse:
        message = pb.WatchPageMapResponse(base_number=base_number)
        message.revision.epoch, message.revision.number = self.pool.epoch, self.pool.number
        message.observe_time.GetCurrentTime()
        self._count(message)
        return message

    def _count(self, message: pb.WatchPageMapResponse) -> None:
        counts = self.pool.counts()
        stats = message.stats
        stats.free_pages, stats.active_pages, stats.cached_pages = map(int, counts[1:4])
        stats.reserved_pages = int(counts[RESERVED])


class _Cache(cache_pb2_grpc.CacheServiceServicer):
    """The calls that the map makes."""

    def __init__(self, feed: FeedServer) -> None:
        self._feed = feed

    def WatchPageMap(
        self, request: pb.WatchPageMapRequest, context: Any
    ) -> Iterator[pb.WatchPageMapResponse]:
        """The feed."""
        yield from self._feed.workers[request.worker_id].messages()

    def GetPage(self, request: pb.GetPageRequest, context: Any) -> pb.GetPageResponse:
        """One page."""
        pool = self._feed.workers[request.worker_id].pool
        value = {name: int(plane[request.page_id]) for name, plane in pool.planes.items()}
        return pb.GetPageResponse(
            state=value["states"],  # type: ignore[arg-type]
            ref_count=value["ref_counts"],
            filled_slots=value["filled_slots"],
        )


class _Server(server_pb2_grpc.ServerServiceServicer):
    """Who is there."""

    def __init__(self, feed: FeedServer) -> None:
        self._feed = feed

    def GetServerInfo(self, request: Any, context: Any) -> server_pb2.GetServerInfoResponse:
        """All workers."""
        workers = [
            server_pb2.WorkerInfo(worker_id=name, epoch=feed.pool.epoch)
            for name, feed in self._feed.workers.items()
        ]
        return server_pb2.GetServerInfoResponse(version="synthetic", workers=workers)

    def GetLoad(self, request: Any, context: Any) -> server_pb2.GetLoadResponse:
        """Nothing runs."""
        loads = [server_pb2.WorkerLoad(worker_id=name) for name in self._feed.workers]
        return server_pb2.GetLoadResponse(load=server_pb2.Load(workers=loads))
