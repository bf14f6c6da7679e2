"""Addresses of workers: as configured, or by DNS; they come and go while the service runs."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc
from service.fleet.names import MAX_ADDRESSES, WorkerNames, look_up
from service.testing import RunningService, running_service
from service.testing_worker import ScriptedWorker, WorkerScript

CALL_SECONDS = 600.0  # only ends a test that hangs


class Directory:
    """A name server of a test; a list of hosts, or what it fails with."""

    def __init__(self) -> None:
        self.hosts: dict[str, list[str] | OSError] = {}
        self.num_looks = 0

    async def look_up(self, name: str, port: int) -> list[str]:
        self.num_looks += 1
        found = self.hosts[name]
        if isinstance(found, OSError):
            raise found
        return found


def told(entries: Sequence[str], directory: Directory, changes: Sequence[Callable[[], None]]) -> list[Any]:
    """What is told at the start and after each change."""

    async def follow() -> list[Any]:
        seen: list[Any] = []
        names = WorkerNames(entries, lambda found: seen.append(found), lookup=directory.look_up, seconds=0.01)
        names.start()
        for change in changes:
            looks = directory.num_looks
            while directory.num_looks < looks + 2:
                await asyncio.sleep(0.005)
            change()
        looks = directory.num_looks
        while changes and directory.num_looks < looks + 2:
            await asyncio.sleep(0.005)
        names.close()
        return seen

    return asyncio.run(follow())


def test_addresses_that_stand_there_are_told_once_and_nothing_is_looked_up() -> None:
    directory = Directory()
    assert told(["ipc://a", "tcp://b:1"], directory, []) == [("ipc://a", "tcp://b:1")]
    assert directory.num_looks == 0


def test_a_name_is_all_its_addresses_and_follows_them() -> None:
    directory = Directory()
    directory.hosts["worker"] = ["10.0.0.1", "10.0.0.2"]
    more = lambda: directory.hosts.update(worker=["10.0.0.2", "fd00::3"])  # noqa: E731
    assert told(["ipc://a", "dns://worker:5555"], directory, [more]) == [
        ("ipc://a",),
        ("ipc://a", "tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"),
        ("ipc://a", "tcp://10.0.0.2:5555", "tcp://[fd00::3]:5555"),
    ]


def test_a_name_server_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory()
    directory.hosts["worker"] = ["10.0.0.1"]
    fail = lambda: directory.hosts.update(worker=OSError("no such name"))  # noqa: E731
    assert told(["dns://worker:5555"], directory, [fail]) == [("tcp://10.0.0.1:5555",)]
    assert "event=name_not_found name=worker why='no such name'" in caplog.text


@pytest.mark.parametrize("name", ["a..b", "x" * 70])
def test_a_name_that_cannot_be_one_does_not_end_the_looking(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its UnicodeError ended the task without a word, and no other name was ever looked up again."""

    async def looked_up(asked: str, port: int) -> list[str]:
        directory.num_looks += 1
        return await look_up(asked, port) if asked == name else ["10.0.0.1"]

    directory = Directory()
    directory.look_up = looked_up  # type: ignore[method-assign]
    found = told([f"dns://{name}:1", "dns://worker:5555"], directory, [lambda: None])
    assert found == [("tcp://10.0.0.1:5555",)]
    assert f"event=name_not_found name={name}" in caplog.text


def test_a_reader_of_addresses_that_fails_is_told_them_again(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong with the workers of one look, the next look comes."""
    directory = Directory()
    directory.hosts["worker"] = ["10.0.0.1"]
    seen: list[Any] = []

    def on_change(found: Sequence[str]) -> None:
        seen.append(found)
        if found and len(seen) < 3:
            raise ValueError("not now")

    async def follow() -> None:
        names = WorkerNames(["dns://worker:1"], on_change, lookup=directory.look_up, seconds=0.01)
        names.start()
        while len(seen) < 3:
            await asyncio.sleep(0.005)
        names.close()

    asyncio.run(asyncio.wait_for(follow(), CALL_SECONDS))
    assert seen == [("tcp://10.0.0.1:1",)] * 3
    assert caplog.text.count("event=look_failed") == 2


def test_a_name_with_too_many_addresses_is_cut_and_told(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory()
    directory.hosts["worker"] = [f"10.0.{number // 256}.{number % 256}" for number in range(300)]
    (found,) = told(["dns://worker:5555"], directory, [lambda: None])
    assert len(found) == MAX_ADDRESSES
    assert "event=too_many_addresses name=worker count=300" in caplog.text


def test_a_real_name_has_addresses_of_one_family() -> None:
    hosts = asyncio.run(look_up("localhost", 5555))
    assert hosts
    assert len({":" in host for host in hosts}) == 1


# With a service


def generate(running: RunningService) -> str:
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        spec = pb.GenerationSpec(text="abc", stop=pb.StopCriteria(max_tokens=4))
        return str(stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).worker_id)


def worker_ids(running: RunningService) -> list[str]:
    with grpc.insecure_channel(running.address) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        info = stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS)
        return [worker.worker_id for worker in info.workers]


def test_workers_of_a_name_come_and_go_while_the_service_runs(
    tmp_path: Path, free_port: Callable[[], int], wait_until: Callable[..., None]
) -> None:
    """A worker whose address is gone keeps what it has until it is lost, and is then forgotten."""
    port = free_port()
    workers = [ScriptedWorker(f"tcp://127.0.0.{number}:{port}", f"w{number}") for number in (1, 2)]
    settings: dict[str, Any] = {"workers": (f"dns://localhost:{port}",), "insecure": True}
    with running_service(tmp_path, num_workers=0, ready=False, **settings) as running:
        pool = running.service.backstage.pool
        names, directory = pool._names, Directory()
        names._lookup, names._seconds = directory.look_up, 0.02

        def resolves_to(*hosts: str) -> None:
            directory.hosts["localhost"] = list(hosts)

        resolves_to("127.0.0.1")
        workers[0].start()
        try:
            wait_until(lambda: [link.worker_id for link in pool.usable] == ["w1"], "the first worker")
            assert generate(running) == "w1"
            workers[1].start()
            resolves_to("127.0.0.1", "127.0.0.2")
            wait_until(lambda: len(pool.usable) == 2, "the second worker")
            resolves_to("127.0.0.2")
            looks = directory.num_looks
            wait_until(lambda: directory.num_looks > looks + 2, "the change to be known")
            assert sorted(worker_ids(running)) == ["w1", "w2"]  # it is still there
            workers[0].stop()
            wait_until(lambda: worker_ids(running) == ["w2"], "the first to be forgotten")
            assert generate(running) == "w2"
            assert [kept.mirror.worker_id for kept in running.service._mirrors.kept] == ["w2"]
        finally:
            for worker in workers:
                worker.stop()


def test_one_worker_under_two_addresses_is_used_by_one(
    tmp_path: Path, free_port: Callable[[], int], wait_until: Callable[..., None]
) -> None:
    """Two connections under the service's one name would take its session from each other for ever."""
    port = free_port()
    worker = ScriptedWorker(f"tcp://127.0.0.1:{port}", script=WorkerScript()).start()
    addresses = (f"tcp://127.0.0.1:{port}", f"tcp://localhost:{port}")
    try:
        with running_service(tmp_path, num_workers=0, ready=False, workers=addresses) as running:
            pool = running.service.backstage.pool
            wait_until(lambda: any(link._is_closed for link in pool.links), "one of them to be given up")
            wait_until(lambda: len(pool.usable) == 1, "the other to serve")
            # Its session may be the other's until it is heard to be silent; from then on it is its own.
            assert generate(running) == "worker-0"
            hellos = len(worker.hellos)
            for _ in range(20):
                assert generate(running) == "worker-0"
            assert len(worker.hellos) == hellos
            assert worker_ids(running) == ["worker-0"]
    finally:
        worker.stop()


def test_two_workers_of_one_name_are_not_both_used(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    workers = [ScriptedWorker(f"ipc://{tmp_path}/engine-{number}", "twin").start() for number in range(2)]
    addresses = tuple(worker.address for worker in workers)
    with running_service(tmp_path, num_workers=0, ready=False, workers=addresses) as running:
        pool = running.service.backstage.pool
        try:
            # The loop takes one up and then judges it; this thread may look in between.
            wait_until(lambda: all(link.is_up for link in pool.links) and len(pool.usable) == 1, "both")
            (used,) = pool.usable
            assert generate(running) == "twin"
            next(worker for worker in workers if worker.address == used.address).stop()
            wait_until(lambda: [link for link in pool.usable if link is not used], "the other to be taken")
            assert generate(running) == "twin"
        finally:
            for worker in workers:
                with suppress(Exception):
                    worker.stop()
