"""A worker starts, is reached at its address, fails or ends, and leaves nothing behind."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from tests.worker_on_thread import Running, config_in
from worker.config import WorkerConfig
from worker.devices import DeviceFacts, FakeDevice
from worker.engine import EXIT_BUG
from worker.execution.runner import Runner
from worker.link.addresses import AddressError
from worker.link.testing import WAIT_SECONDS
from worker.process import WorkerProcess


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(config_in(tmp_path)) as made:
        yield made


class GatedDevice(FakeDevice):
    """Loads only when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def build(self, config: WorkerConfig) -> Runner:
        assert self.gate.wait(WAIT_SECONDS)
        return super().build(config)


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
