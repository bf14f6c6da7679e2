"""Services are restarted one after the other, behind a client that balances: no stream fails.

The client is what examples/service_config.json makes of any gRPC client that knows several addresses.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.testing import RunningService, loop_thread, running_service
from service.testing_worker import WorkerScript

ROOT = Path(__file__).resolve().parents[2]
CONFIG = json.loads((ROOT / "examples/service_config.json").read_text())
CALL_SECONDS = 600.0  # only ends a test that hangs


def request_of(request_id: str, **labels: str) -> pb.StreamGenerateRequest:
    spec = pb.GenerationSpec(text="abcdef", stop=pb.StopCriteria(max_tokens=60), request_id=request_id)
    spec.labels.update({f"fake.{name}": value for name, value in labels.items()})
    return pb.StreamGenerateRequest(spec=spec)


class Callers:
    """Calls without end, one after the other, on a few threads; what failed is kept."""

    def __init__(self, stub: Any, count: int = 3) -> None:
        self._stub = stub
        self._stopping = threading.Event()
        self.num_done = 0
        self.failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(str(n),), daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            try:
                messages = list(
                    self._stub.StreamGenerate(request_of(f"caller-{name}-{number}"), timeout=CALL_SECONDS)
                )
                assert messages[-1].WhichOneof("event") == "summary"
                self.num_done += 1
            except BaseException as error:
                self.failures.append(error)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(CALL_SECONDS)


class Rolling:
    """Services at fixed ports, before one scripted worker that each of them has for itself."""

    def __init__(self, folder: Path, stack: ExitStack, ports: list[int]) -> None:
        self._folder = folder
        self._stack = stack
        self.ports = ports
        self.services = [self._start(number, 0) for number in range(len(ports))]

    def _start(self, number: int, life: int) -> RunningService:
        folder = self._folder / f"service-{number}-{life}"
        folder.mkdir()
        address = f"127.0.0.1:{self.ports[number]}"
        script = WorkerScript(step_ms=1)
        settings: dict[str, Any] = {"address": address, "instance_id": f"service-{number}", "grace": 600.0}
        return self._stack.enter_context(running_service(folder, script=script, **settings))

    def begin_drain(self, number: int) -> "Future[None]":
        service = self.services[number].service
        return asyncio.run_coroutine_threadsafe(service.drain(), loop_thread().loop)

    def start_again(self, number: int) -> None:
        self.services[number] = self._start(number, 1)


@pytest.fixture
def rolling(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Rolling]:
    with ExitStack() as stack:
        yield Rolling(tmp_path, stack, [free_port(), free_port()])


def test_services_are_restarted_one_by_one_without_a_failed_stream(
    rolling: Rolling, wait_until: Callable[..., None]
) -> None:
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in rolling.ports)
    with grpc.insecure_channel(target, [("grpc.service_config", json.dumps(CONFIG))]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        callers = Callers(stub)
        try:
            for number in range(len(rolling.ports)):
                restart(rolling, number, stub, callers, wait_until)
        finally:
            callers.stop()
        assert callers.failures == []


def restart(
    rolling: Rolling, number: int, stub: Any, callers: Callers, wait_until: Callable[..., None]
) -> None:
    """While it drains, streams of old run at both services and new ones come all the time."""
    wait_until(lambda: all(service.worker.adds for service in rolling.services), "calls at both")
    old = rolling.services[number]
    held: list[Any] = []
    seen: list[list[Any]] = []
    while not any(add.request_id.startswith(f"held-{number}") for add in old.worker.adds):
        for _ in range(4):
            request = request_of(f"held-{number}-{len(held)}", hold_at="10")
            held.append(stub.StreamGenerate(request, timeout=CALL_SECONDS))
            seen.append([next(held[-1])])
    drained, before = rolling.begin_drain(number), callers.num_done
    wait_until(lambda: callers.num_done > before + 20, "calls during the drain")
    assert not drained.done(), "streams are held there"
    for service in rolling.services:
        service.worker.let_go()
    for call, messages in zip(held, seen, strict=True):
        assert [*messages, *call][-1].WhichOneof("event") == "summary"
    drained.result(CALL_SECONDS)
    assert old.is_idle
    rolling.start_again(number)
