"""A whole worker over real sockets: it serves, is seen, and leaves nothing behind."""

import os
import threading
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.config import WorkerConfig
from worker.description import WorkerState
from worker.devices import DeviceFacts, FakeDevice
from worker.engine import EXIT_BUG
from worker.execution.runner import Runner
from worker.link.addresses import AddressError
from worker.link.testing import WAIT_SECONDS, TestService
from worker.process import WorkerProcess

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}

BASE = WorkerConfig(
    runner="fake",
    model="random:tiny",
    metrics_port=0,
    page_size=4,
    num_pages=64,
    max_running=8,
    drain_grace=10.0,
)


class GatedDevice(FakeDevice):
    """Loads only when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def build(self, config: WorkerConfig) -> Runner:
        assert self.gate.wait(WAIT_SECONDS)
        return super().build(config)


class Running:
    """A worker on a thread of the test, and services for it."""

    def __init__(self, config: WorkerConfig, device: FakeDevice | None = None) -> None:
        self.worker = WorkerProcess(config, device or FakeDevice())
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.services: list[TestService] = []

    def _run(self) -> None:
        self.status = self.worker.run()

    def service(self, name: str = "a", epoch: int = 1) -> TestService:
        made = TestService(self.worker.link.address, name, epoch)
        self.services.append(made)
        return made

    def ready_service(self, name: str = "a") -> TestService:
        service = self.service(name)
        until(lambda: self.worker.board.state is not WorkerState.STARTING)
        service.hello()
        return service

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = self.get("/metrics")[1]
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics()[name, tuple(sorted(labels.items()))]

    def get(self, path: str) -> tuple[int, str]:
        assert self.worker.http is not None
        url = f"http://127.0.0.1:{self.worker.http.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def close(self) -> None:
        for service in self.services:
            service.close()
        self.worker.stop()
        self.worker.stop()
        self.thread.join(WAIT_SECONDS)
        self.worker.close()
        assert not self.thread.is_alive()


def until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_done():
        assert time.monotonic() < end, "not so in time"
        threading.Event().wait(0.01)


def settled(running: Running) -> int:
    """Waits until nothing runs and the observer has seen it all; the revision then."""
    ring = running.worker.ring
    until(lambda: running.worker.observer.metrics.pool.revision == ring.number)
    assert running.metric("kvatlas_pages", state="active") == 0
    return ring.number


def config_in(folder: Path, **changes: object) -> WorkerConfig:
    addresses = {"engine_address": f"ipc://{folder}/e", "pages_address": f"ipc://{folder}/p"}
    return replace(BASE, **{**addresses, **changes})  # type: ignore[arg-type]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(config_in(tmp_path))
    yield made
    made.close()


def test_a_worker_starts_and_stops_and_leaves_nothing(tmp_path: Path) -> None:
    process = psutil.Process()
    threads = set(threading.enumerate())
    children = process.children()  # servers that other tests share
    warm = Running(config_in(tmp_path))  # whatever libraries open once is open now
    warm.close()
    descriptors = process.num_fds()
    for _ in range(3):
        running = Running(config_in(tmp_path / "made"))
        service = running.ready_service()
        service.subscribe(b"d", b"e")
        service.finish(service.add([1, 2, 3]))
        assert running.get("/readyz")[0] == 200
        running.close()
        running.worker.close()  # twice is fine
        assert running.status == 0
    assert set(threading.enumerate()) <= threads
    assert process.num_fds() <= descriptors
    assert process.children() == children
    assert list(tmp_path.iterdir()) == [], "sockets, locks and the folder that was made are gone"


def test_hello_is_answered_while_the_model_loads_and_requests_are_not_taken(tmp_path: Path) -> None:
    device = GatedDevice()
    running = Running(config_in(tmp_path), device)
    try:
        service = running.service()
        assert service.hello().worker.state == server_pb2.SERVER_STATE_STARTING
        early = service.add([1, 2])
        service.wait(lambda: early in service.results)
        assert service.results[early].status == worker_pb2.ADD_STATUS_NOT_READY
        assert running.get("/readyz") == (503, "starting\n")
        assert running.get("/healthz")[0] == 200
        device.gate.set()
        serving = server_pb2.SERVER_STATE_SERVING
        service.wait(lambda: bool(service.heartbeats) and service.heartbeats[-1].load.state == serving)
        assert service.finish(service.add([1, 2]))[0].code == worker_pb2.FINISH_CODE_MAX_TOKENS
    finally:
        device.gate.set()
        running.close()


def test_a_runner_that_fails_its_warm_up_never_becomes_ready(tmp_path: Path) -> None:
    class Broken(FakeDevice):
        def build(self, config: WorkerConfig) -> Runner:
            raise RuntimeError("no such kernel")

    worker = WorkerProcess(config_in(tmp_path), Broken())
    with pytest.raises(RuntimeError, match="no such kernel"), worker:
        worker.run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_stopped", [False, True])
def test_a_thread_that_dies_while_the_model_loads_is_no_orderly_end(
    tmp_path: Path, has_stopped: bool
) -> None:
    class Slow(FakeDevice):
        def build(self, config: WorkerConfig) -> Runner:
            if not has_stopped:
                let_the_observer_die()
            return super().build(config)

    def let_the_observer_die() -> None:
        worker.observations.put("no observation")  # type: ignore[arg-type]
        worker.observer.wake()
        worker.observer.thread.join(WAIT_SECONDS)

    with WorkerProcess(config_in(tmp_path), Slow()) as worker:
        if has_stopped:
            let_the_observer_die()
        assert worker.run() == EXIT_BUG


def test_facts_that_cannot_be_read_leave_nothing_behind(tmp_path: Path) -> None:
    class Broken(FakeDevice):
        def facts(self, config: WorkerConfig) -> DeviceFacts:
            raise OSError("unreadable")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="unreadable"):
        WorkerProcess(config_in(tmp_path), Broken())
    assert set(threading.enumerate()) == before


def test_a_second_worker_at_the_same_address_is_refused_and_the_first_goes_on(
    running: Running, tmp_path: Path
) -> None:
    service = running.ready_service()
    with pytest.raises(AddressError):
        WorkerProcess(config_in(tmp_path), FakeDevice())
    assert service.finish(service.add([1, 2]))[0].code


def test_tcp_with_any_free_port(tmp_path: Path) -> None:
    running = Running(
        config_in(tmp_path, engine_address="tcp://127.0.0.1:0", pages_address="tcp://127.0.0.1:*")
    )
    try:
        assert running.worker.link.address.startswith("tcp://127.0.0.1:")
        service = running.ready_service()
        assert service.config is not None
        assert not service.config.pages_address.endswith((":0", ":*"))
        service.subscribe(b"d")
        service.wait(lambda: bool(service.feeds))
    finally:
        running.close()


def test_two_services_at_once_with_equal_ids(running: Running) -> None:
    """M-32: the processes meet over sockets alone; what one service counts never meets another's."""
    services = [running.ready_service("a"), running.ready_service("b")]
    alone = running.ready_service("c")
    expected = [alone.finish(alone.add([number, number + 1]))[0].tokens for number in range(20)]
    for number in range(20):
        for at, service in enumerate(services):
            assert service.add([(number + at) % 20, (number + at) % 20 + 1]) == number + 1
    for at, service in enumerate(services):
        answers = service.finish(*range(1, 21))
        assert [answer.tokens for answer in answers] == [expected[(number + at) % 20] for number in range(20)]


@pytest.mark.parametrize("limit", [WAIT_SECONDS, pytest.param(2.0, marks=pytest.mark.slow)])
def test_gauges_fall_to_idle_though_no_further_step_runs(tmp_path: Path, limit: float) -> None:
    """All requests end at once: nobody steps any more, the gauges must not freeze (observability.md 4).

    On a quiet machine that takes less than two seconds.
    """
    running = Running(config_in(tmp_path, fake_step_ms=100.0, num_pages=1200))
    try:
        service = running.ready_service()
        ids = [service.add([number] * 9, max_tokens=700) for number in range(6)]
        service.wait(lambda: all(service.answers[number].tokens for number in ids))
        until(lambda: running.metric("kvatlas_requests_running") == 6)
        assert running.metric("kvatlas_pages", state="active") > 0
        service.abort(*ids)
        ended = time.monotonic()
        service.finish(*ids)
        until(lambda: running.metric("kvatlas_pages", state="active") == 0)
        until(lambda: running.metric("kvatlas_requests_running") == 0)
        assert running.metric("kvatlas_page_table_rows", state="used") == 0
        assert time.monotonic() - ended < limit
    finally:
        running.close()


def test_numbers_add_up_in_every_scrape_and_counters_never_fall(tmp_path: Path) -> None:
    running = Running(config_in(tmp_path, num_pages=24, fake_step_ms=1.0, audit_interval=0.05))
    try:
        service = running.ready_service()
        before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        sent = []
        for number in range(40):
            prompt = [number % 5] * 8 + [number] * 3
            sent.append((len(prompt), service.add(prompt, max_tokens=6)))
            if number % 7 == 0:
                service.abort(sent[-1][1])
            if number % 4 == 0:
                now = running.metrics()
                check_sums(now)
                for key, value in before.items():
                    if key[0].endswith(("_total", "_count", "_bucket")):
                        assert now[key] >= value, key
                before = now
        service.finish(*[first for _, first in sent])
        settled(running)
        looked_up = {start.sequence_id: start.prefix for start in service.starts if start.HasField("prefix")}
        now = running.metrics()
        for result in ("hit", "miss_cold", "miss_evicted", "unaligned"):
            name = f"{result}_tokens"
            total = sum(getattr(prefix, name) for prefix in looked_up.values())
            assert now["kvatlas_prefix_tokens_total", (("result", result),)] == total
        assert now["kvatlas_page_evictions_total", (("reason", "capacity"),)] > 0
        for check in ("state_sum", "refcount", "free_list", "page_table", "trie"):
            labels = (("check", check), ("result", "pass"))
            assert now["kvatlas_integrity_checks_total", labels] > 0
            assert now["kvatlas_integrity_checks_total", (("check", check), ("result", "fail"))] == 0
        assert now["kvatlas_integrity_last_success_timestamp_seconds", ()] > 1.6e9
    finally:
        running.close()


def check_sums(now: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> None:
    def total(name: str) -> float:
        return sum(value for (series, _), value in now.items() if series == name)

    assert total("kvatlas_pages") == now["kvatlas_pages_capacity", ()]
    events = {dict(labels)["event"]: v for (n, labels), v in now.items() if n == "kvatlas_page_events_total"}
    usable = now["kvatlas_pages_capacity", ()] - 1
    assert events["allocated"] - events["freed"] == usable - now["kvatlas_pages", (("state", "free"),)]
    assert events["evicted"] == total("kvatlas_page_evictions_total")
    assert total("kvatlas_token_slots") == 4 * now["kvatlas_pages", (("state", "active"),)]
    assert min(now.values()) >= 0


def test_every_series_is_there_at_zero_before_the_first_request(running: Running) -> None:
    from worker.readers.metric_table import TABLE

    until(lambda: running.get("/readyz")[0] == 200)
    now = running.metrics()
    for row in TABLE:
        sample = row.family + "_count" if row.buckets else row.exposed
        expected = 1
        for values in row.labels.values():
            expected *= len(values)
        assert sum(name == sample for name, _ in now) == expected, row.name
    assert sum(value for key, value in now.items() if key[0].endswith("_total")) < 60
    assert not [key for key in now if key[0].endswith("_created")]


def test_two_workers_in_one_process_never_meet_in_a_registry(tmp_path: Path) -> None:
    """B112: each has its own registry; one that is passed in is used."""
    mine = CollectorRegistry()
    with (
        WorkerProcess(config_in(tmp_path / "1"), FakeDevice(), registry=mine),
        WorkerProcess(config_in(tmp_path / "2"), FakeDevice()),
    ):
        assert mine.get_sample_value("kvatlas_pages", {"state": "free"}) == 64
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        WorkerProcess(config_in(tmp_path / "3"), FakeDevice(), registry=mine)


# The audit.


def test_a_planted_leak_is_counted_told_and_found_by_a_full_check(tmp_path: Path) -> None:
    """S1-35, S1-36: metrics, the feed and both calls tell of the same page; the worker goes on serving."""
    running = Running(config_in(tmp_path, debug_faults="page_leak", audit_interval=0.05, fake_step_ms=1.0))
    try:
        service = running.ready_service()
        service.subscribe(b"d")
        first = service.add(list(range(20)), max_tokens=30)
        service.finish(first)
        failed = {"check": "refcount", "result": "fail"}
        until(lambda: running.metric("kvatlas_integrity_checks_total", **failed) >= 2)
        until(lambda: running.metric("kvatlas_pages", state="active") == 1)
        until(lambda: running.metric("kvatlas_requests_running") == 0)
        service.wait(lambda: any(feed.violations for feed in service.feeds))
        told = next(feed.violations[0] for feed in service.feeds if feed.violations)
        assert told.check == cache_pb2.INTEGRITY_CHECK_REFCOUNT
        asked = worker_pb2.Command(integrity=cache_pb2.GetIntegrityRequest())
        (reply,) = service.command(asked)
        checks = {stats.check: stats for stats in reply.integrity.checks}
        assert len(checks) == 6
        assert checks[cache_pb2.INTEGRITY_CHECK_REFCOUNT].fail_count >= 2
        assert checks[cache_pb2.INTEGRITY_CHECK_TRIE].fail_count == 0
        assert checks[cache_pb2.INTEGRITY_CHECK_TRIE].pass_count >= 2
        assert not reply.integrity.HasField("last_success_time")
        pages = {v.page_id for v in reply.integrity.violations if v.HasField("page_id")}
        full = worker_pb2.Command(check_integrity=cache_pb2.RunIntegrityCheckRequest())
        (reply,) = service.command(full)
        report = reply.check_integrity
        assert (report.checked_pages, report.violations_total) == (64, len(report.violations))
        assert {v.page_id for v in report.violations if v.HasField("page_id")} == pages
        assert {(v.expected, v.found) for v in report.violations if v.HasField("page_id")} == {("0", "1")}
        service.finish(service.add(list(range(9)), max_tokens=3))
    finally:
        running.close()


def test_a_full_check_of_a_sound_worker_under_load_finds_nothing_and_compares_rows(tmp_path: Path) -> None:
    running = Running(config_in(tmp_path, fake_step_ms=50.0, num_pages=20_000))
    try:
        service = running.ready_service()
        ids = [service.add([number] * 10, max_tokens=1500) for number in range(4)]
        service.wait(lambda: all(service.answers[number].tokens for number in ids))
        full = worker_pb2.Command(check_integrity=cache_pb2.RunIntegrityCheckRequest())
        (reply,) = service.command(full)
        report = reply.check_integrity
        assert report.violations_total == 0
        assert (report.checked_pages, report.checked_rows, report.round_count) == (20_000, 4, 10)
        assert report.last_revision.number >= report.first_revision.number > 0
        assert report.engine_time.ToNanoseconds() > 0
    finally:
        running.close()


# The map.


def test_snapshot_feed_and_rows_tell_one_story(running: Running) -> None:
    service = running.ready_service()
    service.subscribe(b"d")
    first = service.add(list(range(20)), max_tokens=100, samples=2)
    service.wait(lambda: len(service.answers[first].tokens) == 100)
    service.finish(first, first + 1)
    settled(running)
    replies = service.command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    (reply,) = replies
    chunk, stats = reply.snapshot.chunk, reply.snapshot.stats
    states = list(chunk.pages.states)
    assert len(states) == 65
    assert [states.count(state) for state in (1, 2, 3, 4, 5)] == [
        stats.free_pages,
        stats.active_pages,
        stats.cached_pages,
        stats.pinned_pages,
        stats.reserved_pages,
    ]
    assert chunk.geometry.page_count == 65
    assert chunk.chunks_left == 0
    fingerprints = array("Q", chunk.pages.fingerprints)
    assert all((state == 3) == bool(print_) for state, print_ in zip(states, fingerprints, strict=True))
    number = reply.snapshot.revision.number
    service.wait(lambda: bool(service.feeds) and service.feeds[-1].revision.number == number)
    assert service.feeds[-1].stats == stats


@pytest.mark.parametrize("from_device", [False, True])
def test_rows_of_the_page_table_hold_the_slots_of_the_pages(tmp_path: Path, from_device: bool) -> None:
    """S1-04, S1-07: entries are slots, consecutive within a page; the dummy row is the dummy page (S1-27)."""
    running = Running(config_in(tmp_path, fake_step_ms=50.0, num_pages=1200))
    try:
        service = running.ready_service()
        ids = [service.add([number] * 10, max_tokens=1500) for number in range(3)]
        service.wait(lambda: all(service.answers[number].tokens for number in ids))
        asked = cache_pb2.GetPageTableRequest(from_device=from_device)
        replies = [reply.page_table for reply in service.command(worker_pb2.Command(page_table=asked))]
        assert [row.rows_left for row in replies] == [2, 1, 0]
        assert {row.request_id for row in replies} == {f"r{number}" for number in ids}
        for row in replies:
            slots = array("i", row.slots).tolist()
            assert len(slots) % 4 == 0
            assert len(slots) >= row.token_count > 0
            for at in range(0, len(slots), 4):
                assert slots[at] % 4 == 0
                assert slots[at : at + 4] == list(range(slots[at], slots[at] + 4))
        asked = cache_pb2.GetPageTableRequest(rows=[8, 7], from_device=from_device)
        replies = []
        while not replies or replies[0].code == 8:  # from the device: one call a second
            replies = service.command(worker_pb2.Command(page_table=asked))
        dummy, unused = [reply.page_table for reply in replies]
        assert set(array("i", dummy.slots)) == {1200 * 4}
        assert (dummy.owner, unused.owner, unused.slots) == (0, 0, b"")
        bad = cache_pb2.GetPageTableRequest(rows=[9])
        assert service.command(worker_pb2.Command(page_table=bad))[0].code == 3
    finally:
        running.close()


def test_events_come_without_gaps_and_can_be_had_again(tmp_path: Path) -> None:
    running = Running(config_in(tmp_path, fake_step_ms=5.0, num_pages=200))
    try:
        check_events(running)
    finally:
        running.close()


def check_events(running: Running) -> None:
    service = running.ready_service()
    service.subscribe(b"e")
    service.wait(lambda: b"e" in running.worker.feed.topics)
    ids = [service.add([number] * 9, samples=2, max_tokens=60) for number in range(5)]
    service.finish(*ids, *[number + 1 for number in ids])
    last = settled(running)
    service.wait(lambda: bool(service.feeds) and service.feeds[-1].revision.number == last)
    numbers = []
    for feed in service.feeds:
        assert feed.base_number + 1 == feed.events.first_number
        numbers += range(feed.events.first_number, feed.events.first_number + len(feed.events.types))
    assert numbers == list(range(1, last + 1))
    started = {info.request_id for feed in service.feeds for info in feed.events.started_sequences}
    assert started == {f"r{number}" for number in ids}
    request = worker_pb2.ReplayRequest(after_number=3, include_token_ids=True)
    replies = service.command(worker_pb2.Command(replay=request))
    assert sum(len(reply.events.types) for reply in replies) == last - 3
    assert replies[0].events.first_number == 4
    sealed = sum(reply.events.types.count(3) for reply in replies)
    assert sum(len(reply.events.token_ids) for reply in replies) == sealed * 4 * 4
    ahead = worker_pb2.ReplayRequest(after_number=last + 1)
    assert service.command(worker_pb2.Command(replay=ahead))[0].code == 11


def test_no_map_is_ahead_of_its_events(running: Running) -> None:
    """Else a page was told with the events of who had it before."""
    service = running.ready_service()
    service.subscribe(b"d", b"e")
    service.wait(lambda: running.worker.feed.topics == {b"d", b"e"})
    ids = [service.add([number] * 9, max_tokens=60) for number in range(5)]
    service.finish(*ids)
    last, told = settled(running), 0
    service.wait(
        lambda: any(
            feed.WhichOneof("feed") == "delta" and feed.revision.number == last for feed in service.feeds
        )
    )
    for feed in service.feeds:
        if feed.WhichOneof("feed") == "events":
            told = feed.revision.number
        else:
            assert told >= feed.revision.number
    assert told == last > 0


def test_nothing_is_encoded_without_a_subscriber_and_subscribers_come_and_go(running: Running) -> None:
    service = running.ready_service()
    assert running.worker.feed.topics == set()
    service.subscribe(b"d", b"e", b"x")
    until(lambda: running.worker.feed.topics == {b"d", b"e"})
    service.unsubscribe(b"e")
    until(lambda: running.worker.feed.topics == {b"d"})
    service.wait(lambda: len(service.feeds) >= 2)  # signs of life, though nothing happens
    assert {feed.WhichOneof("feed") for feed in service.feeds} == {"delta"}
    assert service.feeds[-1].base_number == service.feeds[-1].revision.number
    service.unsubscribe(b"d")
    until(lambda: running.worker.feed.topics == set())


def test_flush_and_pins_over_the_seam(running: Running) -> None:
    service = running.ready_service()
    service.finish(service.add([7] * 12))
    pin = worker_pb2.PinPrefix(
        name="p", token_ids=array("I", [9] * 10).tobytes(), cache_salt=b"tenant\0", ttl_ms=60_000
    )
    (pinned,) = service.command(worker_pb2.Command(pin=pin))
    assert (pinned.pin.pinned_pages, pinned.pin.pinned_tokens, pinned.pin.tenant) == (2, 8, "tenant")
    assert pinned.pin.HasField("expire_time")
    until(lambda: running.metric("kvatlas_pages", state="pinned") == 2)
    (other,) = service.command(worker_pb2.Command(flush=server_pb2.FlushPrefixCacheRequest(tenant="x")))
    assert other.flush.freed_pages == 0
    (flushed,) = service.command(worker_pb2.Command(flush=server_pb2.FlushPrefixCacheRequest()))
    assert flushed.flush.freed_pages > 0
    (listed,) = service.command(worker_pb2.Command(list_pins=server_pb2.ListPinnedPrefixesRequest()))
    assert [entry.name for entry in listed.pins.pins] == ["p"]
    hit = service.add([9] * 10)
    service.finish(hit)
    start = next(start for start in service.starts if start.sequence_id == hit)
    assert start.prefix.hit_tokens == 8
    service.command(worker_pb2.Command(pin=worker_pb2.PinPrefix(name="p")))
    until(lambda: running.metric("kvatlas_pages", state="pinned") == 0)


# Its start.


class WatchingDevice(FakeDevice):
    """Its runner notes when it is told that the start is over, among its steps."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def build(self, config: WorkerConfig) -> Runner:
        runner: Any = super().build(config)
        launch = runner.launch
        runner.launch = lambda step: (self.told.append("step"), launch(step))[1]
        runner.watch_compilers = lambda: self.told.append("watch")
        return runner


def test_a_runner_watches_for_late_kernels_behind_its_first_steps(tmp_path: Path) -> None:
    device = WatchingDevice()
    running = Running(config_in(tmp_path), device)
    try:
        running.ready_service()
        assert device.told == ["step", "step", "watch"]
    finally:
        running.close()
