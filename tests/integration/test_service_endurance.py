"""What only time and numbers show: memory over many cancels, silence with keepalive, many streams."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc
from service.testing import ScriptedWorker, WorkerScript, loop_thread, running_service

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


class Process:
    """`python -m service` beside a scripted worker of this process."""

    def __init__(self, folder: Path) -> None:
        self.worker = ScriptedWorker(f"ipc://{folder}/engine", script=WorkerScript(step_ms=5)).start()
        self.address = f"unix:{folder}/public.sock"
        command = [sys.executable, "-m", "service", "--address", self.address, "--model", "random:tiny"]
        command += ["--workers", self.worker.address, "--metrics-address", "", "--no-access-log"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self.usage = psutil.Process(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.worker.stop()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.end()


def spec_of(max_tokens: int, **labels: str) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(text="abcdef", stop=pb.StopCriteria(max_tokens=max_tokens))
    spec.labels.update({f"fake.{name}": value for name, value in labels.items()})
    return spec


@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_cancelled_streams(process: Process, wait_until: Any) -> None:
    """20 000 of them: less than 0.5 kB a call after the warm-up, and no thread or descriptor more."""
    request = pb.StreamGenerateRequest(spec=spec_of(4000))

    async def cancel_many(count: int) -> None:
        async with grpc.aio.insecure_channel(process.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            gate = asyncio.Semaphore(32)

            async def one() -> None:
                async with gate:
                    call = stub.StreamGenerate(request, timeout=60, wait_for_ready=True)
                    await call.read()
                    call.cancel()

            await asyncio.gather(*(one() for _ in range(count)))

    def run(count: int) -> int:
        loop_thread().run(cancel_many(count), seconds=240)
        wait_until(lambda: process.worker.live_sequences == 0, "the aborts")
        return int(process.usage.memory_info().rss)

    run(5_000)
    before, threads, descriptors = run(2_000), process.usage.num_threads(), process.usage.num_fds()
    after = run(13_000)
    assert (after - before) / 13_000 < 512
    assert process.usage.num_threads() <= threads
    assert process.usage.num_fds() <= descriptors + 2


@pytest.mark.timeout(150)
def test_a_pinging_client_is_not_sent_away_in_a_minute_of_silence(process: Process) -> None:
    """Keepalive of 10 s: no GOAWAY, the same connection answers afterwards."""
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(process.address, options) as channel:
        info = server_pb2_grpc.ServerServiceStub(channel)
        info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=30, wait_for_ready=True)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.StreamGenerateRequest(spec=spec_of(5, wait_ms="60000"))
        messages = list(stub.StreamGenerate(request, timeout=100, wait_for_ready=True))
        assert messages[-1].WhichOneof("event") == "summary"


@pytest.mark.timeout(120)
def test_256_streams_at_once_end_whole_and_in_order(tmp_path: Path, wait_until: Any) -> None:
    """Merged or not: every token once, in order, and nothing left."""
    with running_service(tmp_path, script=WorkerScript(step_ms=20)) as running:

        async def read_all() -> list[int]:
            async with grpc.aio.insecure_channel(running.address) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)

                async def one(number: int) -> int:
                    total = 0
                    async for message in stub.StreamGenerate(
                        pb.StreamGenerateRequest(spec=spec_of(60 + number % 7)), timeout=100
                    ):
                        if message.WhichOneof("event") == "delta":
                            assert message.delta.token_offset == total
                            total += message.delta.token_count
                    return total

                return await asyncio.gather(*(one(number) for number in range(256)))

        totals = loop_thread().run(read_all(), seconds=100)
        assert totals == [60 + number % 7 for number in range(256)]
        wait_until(lambda: running.is_idle, "idle service and worker")
