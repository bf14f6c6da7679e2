"""The page map from the pool to the client: a real worker (fake runner), a real service, real watches.

Readers follow WatchPageMap under random load, with one that stalls, over a killed worker; in the end every
copy equals the pool, and rows of the page table equal the page lists.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvatlas.client.page_map import PageMap
from kvatlas.models.resolve import resolve_model
from kvatlas.models.vocabulary import tokenizer_digest
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import cache_pb2_grpc, generation_pb2, generation_pb2_grpc
from service.config import ServiceConfig
from service.server import Service
from service.testing import loop_thread
from service.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
MODEL = "random:tiny"
PAGE_SIZE, NUM_PAGES = 4, 120
WAIT_SECONDS = 60.0  # only ends a test that hangs


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, "not so in time"
        time.sleep(0.01)


class Stack:
    """One worker process and one service in this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.loads: list[Load] = []
        self.worker = self._start_worker()
        files = resolve_model(MODEL)
        config = ServiceConfig(
            address="127.0.0.1:0",
            metrics_address="127.0.0.1:0",
            model=MODEL,
            workers=(f"ipc://{folder}/engine",),
            instance_id="watched-service",
            drain_listen=0.0,
            grace=2.0,
        )

        async def start() -> Service:
            service = Service(config, Tokenizer.load(files), tokenizer_digest(files), files.model_id)
            await service.start()
            return service

        self.service = loop_thread().run(start())
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.service.port}")
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.cache: Any = cache_pb2_grpc.CacheServiceStub(self.channel)
        self.wait_until_ready()

    def _start_worker(self) -> "subprocess.Popen[bytes]":
        flags = {
            "runner": "fake",
            "model": MODEL,
            "page-size": PAGE_SIZE,
            "num-pages": NUM_PAGES,
            "max-running": 8,
            "metrics-port": -1,
            "fake-step-ms": 2,
            "engine-address": f"ipc://{self._folder}/engine",
            "pages-address": f"ipc://{self._folder}/pages",
        }
        command = [sys.executable, "-m", "worker", *[f"--{name}={value}" for name, value in flags.items()]]
        path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})

    def wait_until_ready(self) -> None:
        until(lambda: bool(self.service.backstage.pool.usable) and self._has_map())

    def _has_map(self) -> bool:
        try:
            self.cache.GetPagePool(pb.GetPagePoolRequest(), timeout=WAIT_SECONDS)
        except grpc.RpcError:
            return False
        return True

    def kill_worker(self) -> None:
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait(WAIT_SECONDS)

    def restart_worker(self) -> None:
        self.worker = self._start_worker()

    @property
    def number(self) -> int:
        number: int = self.cache.GetPagePool(pb.GetPagePoolRequest(), timeout=WAIT_SECONDS).revision.number
        return number

    def settle(self) -> None:
        """Waits until the worker itself, in two heartbeats from now on, is idle where the mirror stands."""
        link = self.service.backstage.pool.links[0]
        for _ in range(2):
            before = link.beat_time
            until(lambda before=before: link.beat_time > before)
            until(lambda: link.beat is not None and self._is_at_rest(link.beat))

    def _is_at_rest(self, beat: Any) -> bool:
        pool = self.cache.GetPagePool(pb.GetPagePoolRequest(), timeout=WAIT_SECONDS)
        live = self.cache.ListSequences(pb.ListSequencesRequest(), timeout=WAIT_SECONDS).total_count
        same = beat.revision.number == pool.revision.number and beat.revision.epoch == pool.revision.epoch
        return bool(
            same and not (beat.running_sequences or beat.waiting_requests or live or pool.stats.active_pages)
        )

    def close(self) -> None:
        for load in self.loads:
            load.stop()
        self.channel.close()
        self.service.hurry()
        loop_thread().run(self.service.drain())
        self.worker.terminate()
        try:
            self.worker.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.worker.kill()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    try:
        yield running
    finally:
        running.close()


class Watcher:
    """A client that follows a watch on a thread; `gate` closed, it reads nothing."""

    def __init__(self, stack: Stack, **fields: Any) -> None:
        self.copy = PageMap()
        self.gate = threading.Event()
        self.gate.set()
        self.messages: list[pb.WatchPageMapResponse] = []
        self.failure: BaseException | None = None
        request = pb.WatchPageMapRequest(**fields)
        self._is_followed = request.mode != pb.WATCH_MODE_EVENTS  # the copy follows states only
        request.min_interval.FromMilliseconds(50)
        self._call = stack.cache.WatchPageMap(request, timeout=600)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for message in self._call:
                self.gate.wait(600)
                self.messages.append(message)
                if self._is_followed:
                    self.copy.apply(message)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:  # type: ignore[attr-defined]
                self.failure = error
        except BaseException as error:
            self.failure = error

    @property
    def num_deltas(self) -> int:
        return sum(message.HasField("delta") for message in list(self.messages))

    @property
    def causes(self) -> list[int]:
        return [
            m.snapshot.cause
            for m in list(self.messages)
            if m.HasField("snapshot") and not m.snapshot.chunks_left
        ]

    def close(self) -> None:
        self.gate.set()
        self._call.cancel()
        self._thread.join(WAIT_SECONDS)
        assert self.failure is None, self.failure


class Load:
    """Random requests on a few threads: shared prefixes, samples, cancels."""

    def __init__(self, stack: Stack, seed: int, num_threads: int = 6) -> None:
        self._stack = stack
        self._stopping = threading.Event()
        self.num_done = 0
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),), daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        stack.loads.append(self)

    def _run(self, draw: random.Random) -> None:
        while not self._stopping.is_set():
            text = "shared prefix " * draw.randint(0, 3) + "".join(draw.choices("abc", k=draw.randint(1, 30)))
            spec = generation_pb2.GenerationSpec(text=text)
            spec.sampling.n = draw.choice([1, 1, 1, 2, 3])
            spec.stop.max_tokens = draw.randint(1, 40)
            call = self._stack.generation.StreamGenerate(
                generation_pb2.StreamGenerateRequest(spec=spec), timeout=600
            )
            stop_after = draw.choice([None, None, 0, 3])
            try:
                for number, _ in enumerate(call):
                    if number == stop_after:
                        call.cancel()
            except grpc.RpcError:
                pass  # cancelled, or the worker was killed
            self.num_done += 1

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


def assert_copies_equal(stack: Stack, *watchers: Watcher) -> None:
    """At rest every copy has the revision of the pool and the same planes; the worker says the same."""
    stack.settle()
    until(lambda: all(watcher.copy.revision.number == stack.number for watcher in watchers))
    window = stack.cache.GetPageMap(pb.GetPageMapRequest(), timeout=WAIT_SECONDS)
    fresh = Watcher(stack)
    until(lambda: not fresh.copy.is_stale)
    for watcher in (*watchers, fresh):
        counts = watcher.copy.counts()
        assert sum(counts.values()) == NUM_PAGES + 1
        assert (counts["active"], counts["reserved"]) == (0, 1)
        for name, plane in watcher.copy.planes.items():
            assert plane.tobytes() == getattr(window.pages, name), name
        assert not watcher.copy.sequences
    fresh.close()


def test_every_watcher_equals_the_pool_after_random_load(stack: Stack) -> None:
    """B111 too: closed watches are gone from the service."""
    watchers = [Watcher(stack), Watcher(stack, planes=list(PageMapNames)), Watcher(stack)]
    stalled = watchers[2]
    until(lambda: all(not watcher.copy.is_stale for watcher in watchers))
    stalled.gate.clear()
    load = Load(stack, seed=1)
    # A slow reader gets changes merged: the load goes on until enough of them have come.
    until(lambda: load.num_done > 60 and stack.number > 1500 and watchers[0].num_deltas > 5)
    assert_sums_hold(stack)
    load.stop()
    stalled.gate.set()
    assert_copies_equal(stack, *watchers)
    assert watchers[0].causes[0] == pb.SNAPSHOT_CAUSE_INITIAL
    for watcher in watchers:
        watcher.close()
    until(lambda: stack.service.backstage.watches.active == 0)


PageMapNames = ("states", "flags", "ref_counts", "filled_slots", "owners", "parent_page_ids", "fingerprints")


def assert_sums_hold(stack: Stack) -> None:
    """States add up in every answer, whatever happens meanwhile."""
    for _ in range(20):
        stats = stack.cache.GetPagePool(pb.GetPagePoolRequest(), timeout=WAIT_SECONDS).stats
        total = stats.free_pages + stats.active_pages + stats.cached_pages
        assert total + stats.pinned_pages + stats.reserved_pages == NUM_PAGES + 1


def test_rows_of_the_page_table_are_the_pages_of_their_sequences(stack: Stack) -> None:
    """Slots are page * page_size + offset, in token order, for each row in use."""
    load = Load(stack, seed=7)
    seen = 0

    def compare() -> bool:
        nonlocal seen
        rows = list(stack.cache.GetPageTable(pb.GetPageTableRequest(), timeout=WAIT_SECONDS))
        later = stack.cache.ListSequences(
            pb.ListSequencesRequest(max_results=1000), timeout=WAIT_SECONDS
        ).sequences
        pages = {(each.request_id, each.choice_index): np.frombuffer(each.page_ids, "<u4") for each in later}
        for row in rows:
            slots = np.frombuffer(row.slots, "<i4")
            held = pages.get((row.request_id, row.choice_index))
            if not row.owner or held is None:
                continue
            own = slots[::PAGE_SIZE] // PAGE_SIZE
            # A row only grows, so what the worker read is the beginning of what the mirror has, or the other
            # way round: the mirror is up to 100 ms old. The last page may have been copied on write.
            shared = min(len(own), len(held)) - 1
            if shared > 0:
                assert own[:shared].tolist() == held[:shared].tolist(), (row.request_id, own, held)
                seen += 1
            assert (slots.reshape(-1, PAGE_SIZE) == own[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).all()
        return seen > 40

    until(compare)
    load.stop()


def test_every_event_is_told_once_and_leads_to_the_map(stack: Stack) -> None:
    events, states = Watcher(stack, mode=pb.WATCH_MODE_EVENTS), Watcher(stack)
    until(lambda: bool(events.messages))
    load = Load(stack, seed=3, num_threads=3)
    until(lambda: load.num_done > 20)
    load.stop()
    assert_copies_equal(stack, states)
    until(lambda: events.messages[-1].revision.number == stack.number)
    number = events.messages[0].revision.number
    references = np.frombuffer(events.messages[0].snapshot.pages.ref_counts, "<u2").copy()
    for message in events.messages[1:]:
        if message.WhichOneof("event") == "events":
            batch = message.events
            assert (message.base_number, batch.first_number) == (number, number + 1)
            number += len(batch.types)
            pages = np.frombuffer(batch.page_ids, "<u4")
            references[pages] = np.frombuffer(batch.ref_counts, "<u2")  # the last of each page counts
    assert number == stack.number > 100
    assert (references == states.copy["ref_counts"]).all()
    events.close()
    states.close()


def lose_deltas(stack: Stack, count: int) -> list[bytes]:
    """The next deltas of the feed never reach the mirror; the list holds those that were lost so far."""
    lost: list[bytes] = []
    mirrors = stack.service._mirrors
    take = mirrors.link_fed

    def lossy(link: Any, topic: bytes, payload: bytes) -> None:
        if topic == b"d" and len(lost) < count:
            lost.append(payload)
        else:
            take(link, topic, payload)

    mirrors.link_fed = lossy  # type: ignore[method-assign]
    return lost


def assert_no_gap(messages: list[pb.WatchPageMapResponse]) -> int:
    """Each batch begins where the one before it ended, or behind a whole new map; how many events."""
    number = count = 0
    for message in messages:
        if message.HasField("snapshot"):
            number = message.revision.number
        elif message.HasField("events"):
            batch = message.events
            assert (message.base_number, batch.first_number) == (number, number + 1)
            number += len(batch.types)
            count += len(batch.types)
    return count


def test_lost_deltas_a_stalled_reader_and_a_killed_worker_end_in_equal_maps(stack: Stack) -> None:
    """Under random load all the time. The killed worker is a stale map first, and then a new epoch."""
    watcher, stalled = Watcher(stack), Watcher(stack)
    events = Watcher(stack, mode=pb.WATCH_MODE_EVENTS)
    until(lambda: not watcher.copy.is_stale and not stalled.copy.is_stale)
    stalled.gate.clear()
    metric = "kvatlas_page_mirror_resyncs_total"

    def resyncs(cause: str) -> float:
        registry = stack.service.backstage.metrics.registry
        return registry.get_sample_value(metric, {"worker": "worker-0", "cause": cause}) or 0.0

    load = Load(stack, seed=5, num_threads=3)
    until(lambda: load.num_done > 10)
    gaps = resyncs("gap")
    lost = lose_deltas(stack, 3)
    until(lambda: len(lost) == 3 and resyncs("gap") > gaps)
    first = watcher.copy.revision.epoch
    stack.kill_worker()
    stack.restart_worker()
    until(lambda: watcher.causes[-1:] == [pb.SNAPSHOT_CAUSE_EPOCH_CHANGED])
    until(lambda: load.num_done > 25)
    load.stop()
    stalled.gate.set()
    assert watcher.copy.revision.epoch > first
    assert_copies_equal(stack, watcher, stalled)
    assert resyncs("epoch") == 1
    until(lambda: events.messages[-1].revision.number == stack.number)
    assert assert_no_gap(events.messages) > 100
    for each in (watcher, stalled, events):
        each.close()


def test_a_page_is_told_with_the_events_that_made_it(stack: Stack) -> None:
    spec = generation_pb2.GenerationSpec(text="never seen before, " * 2)
    spec.stop.max_tokens = 3
    stack.generation.Generate(generation_pb2.GenerateRequest(spec=spec), timeout=WAIT_SECONDS)
    stack.settle()
    window = stack.cache.GetPageMap(pb.GetPageMapRequest(planes=["states", "born_ms"]), timeout=WAIT_SECONDS)
    is_cached = np.frombuffer(window.pages.states, "u1") == pb.PAGE_STATE_CACHED
    born = np.frombuffer(window.pages.born_ms, "<u4")
    youngest = int(np.argmax(np.where(is_cached, born, 0)))
    page = stack.cache.GetPage(pb.GetPageRequest(page_id=youngest, event_limit=4), timeout=WAIT_SECONDS)
    assert (page.state, page.sealed, page.filled_slots) == (pb.PAGE_STATE_CACHED, True, PAGE_SIZE)
    assert [event.type for event in page.events] == [
        pb.PAGE_EVENT_TYPE_ALLOCATED,
        pb.PAGE_EVENT_TYPE_SEALED,
        pb.PAGE_EVENT_TYPE_RELEASED,
        pb.PAGE_EVENT_TYPE_CACHED,
    ]
    numbers = [event.number for event in page.events]
    assert numbers == sorted(numbers)
    assert page.idle.ToSeconds() <= page.age.ToSeconds() < 600
