"""What only time and numbers show: memory over many cancels, storms of them, silence, many streams at once.

A real service and a real worker on the CPU, each a process. Everything here is slow but what says it is not.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvatlas.cli.config import child_environment
from kvatlas.v1 import cache_pb2, cache_pb2_grpc, generation_pb2_grpc, server_pb2, server_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service import health_messages as health
from service.testing import loop_thread
from service.testing_fleet import WorkerProcess, spec_of, tokens_of, wait_for

CALL_SECONDS = 600.0  # only ends a test that hangs
FLAGS = ("--num-pages", "2000", "--max-running", "32", "--max-queued", "4096")


class Processes:
    """`python -m service` before `python -m worker`."""

    def __init__(self, folder: Path) -> None:
        self.worker = WorkerProcess(folder, "worker-0", *FLAGS)
        self.worker.start()
        self.address = f"unix:{folder}/public.sock"
        command = [sys.executable, "-m", "service", "--address", self.address, "--model", "random:tiny"]
        command += [
            "--workers",
            self.worker.address,
            "--metrics-address",
            "",
            "--no-access-log",
            "--parent-watch",
        ]
        self.service = subprocess.Popen(command, env=child_environment(), stderr=subprocess.DEVNULL)
        self._channel = grpc.insecure_channel(self.address)
        make: Any = server_pb2_grpc.ServerServiceStub
        self.info = make(self._channel)
        make = cache_pb2_grpc.CacheServiceStub
        self.cache = make(self._channel)
        wait_for(self._is_serving, "the service to serve", [self.worker])

    def _is_serving(self) -> bool:
        request = server_pb2.GetServerInfoRequest()
        info = self.info.GetServerInfo(request, timeout=CALL_SECONDS, wait_for_ready=True)
        return bool(info.state == server_pb2.SERVER_STATE_SERVING)

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits, here or there, and no page is held."""
        load = self.info.GetLoad(server_pb2.GetLoadRequest(), timeout=CALL_SECONDS).load
        (worker,) = load.workers
        if load.active_requests or worker.running_sequences or worker.waiting_requests:
            return False
        pool = self.cache.GetPagePool(cache_pb2.GetPagePoolRequest(), timeout=CALL_SECONDS)
        return bool(not pool.stats.active_pages)

    def usage(self) -> list[psutil.Process]:
        """Of the service and of the worker."""
        assert self.worker.process is not None
        return [psutil.Process(self.service.pid), psutil.Process(self.worker.process.pid)]

    def end(self) -> None:
        self._channel.close()
        self.service.kill()
        self.service.wait()
        self.worker.kill()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("endurance"))
    yield made
    made.end()


async def cancel_many(address: str, count: int) -> None:
    """Streams, 32 at a time, each cancelled when it has begun."""
    request = pb.StreamGenerateRequest(spec=spec_of("abcdef", 4000))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        gate = asyncio.Semaphore(32)

        async def one() -> None:
            async with gate:
                call = stub.StreamGenerate(request, timeout=CALL_SECONDS, wait_for_ready=True)
                await call.read()
                call.cancel()

        await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_cancelled_streams(
    processes: Processes, wait_until: Callable[..., None]
) -> None:
    """20 000 of them: less than 0.5 kB a call after the warm-up, and no thread or descriptor more.

    The warm-up is long since the worker keeps a history of fixed length, which some 12 000 calls fill.
    """

    def run(count: int) -> list[int]:
        loop_thread().run(cancel_many(processes.address, count), seconds=800)
        wait_until(lambda: processes.is_idle, "the aborts")
        return [int(one.memory_info().rss) for one in processes.usage()]

    run(15_000)
    before = run(1_000)
    threads = [one.num_threads() for one in processes.usage()]
    descriptors = [one.num_fds() for one in processes.usage()]
    after = run(20_000)
    slopes = [(late - early) / 20_000 for early, late in zip(before, after, strict=True)]
    print(f"bytes a call: service {slopes[0]:.0f}, worker {slopes[1]:.0f}")
    assert max(slopes) < 512
    for one, had_threads, had_descriptors in zip(processes.usage(), threads, descriptors, strict=True):
        assert one.num_threads() <= had_threads
        assert one.num_fds() <= had_descriptors + 2


def storm(processes: Processes, count: int) -> float:
    """So many streams at once, all cancelled at once; seconds until nothing is left."""
    began = 0.0

    async def blow() -> None:
        nonlocal began
        async with grpc.aio.insecure_channel(processes.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            specs = [spec_of(f"{number} in a storm", 4000) for number in range(count)]
            calls = [
                stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
                for spec in specs
            ]
            while processes.info.GetLoad(server_pb2.GetLoadRequest()).load.active_requests < count:
                await asyncio.sleep(0.02)
            began = time.monotonic()
            for call in calls:
                call.cancel()

    loop_thread().run(blow(), seconds=CALL_SECONDS)
    wait_for(lambda: processes.is_idle, "nothing to be left", [processes.worker])
    return time.monotonic() - began


def test_a_storm_of_cancels_leaves_nothing(processes: Processes) -> None:
    """In CI, without the clock."""
    storm(processes, 200)


@pytest.mark.slow
def test_a_storm_of_a_thousand_cancels_is_over_in_two_seconds(processes: Processes) -> None:
    storm(processes, 1000)
    seconds = storm(processes, 1000)
    print(f"1000 aborts: idle after {seconds:.2f} s")
    assert seconds < 2.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pinging_client_is_not_sent_away_in_a_minute_of_silence(processes: Processes) -> None:
    """Keepalive of 10 s beside a call on which nothing comes: no GOAWAY, the connection stays the same."""
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(processes.address, options) as channel:
        watch = channel.unary_stream(
            f"/{health.SERVICE}/Watch",
            request_serializer=health.HealthCheckRequest.SerializeToString,
            response_deserializer=health.HealthCheckResponse.FromString,
        )(health.HealthCheckRequest(), timeout=CALL_SECONDS)
        assert next(watch).status == health.SERVING
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        threading.Event().wait(60.0)
        assert not watch.done()
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.StreamGenerateRequest(spec=spec_of("still there?", 5))
        assert len(tokens_of(list(stub.StreamGenerate(request, timeout=CALL_SECONDS)))) == 5
        assert set(states) <= {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE}
        assert grpc.ChannelConnectivity.IDLE not in states[1:]
        watch.cancel()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_256_streams_at_once_end_whole_and_in_order(
    processes: Processes, wait_until: Callable[..., None]
) -> None:
    """Merged or not: every token once, in order, and nothing left."""

    async def read_all() -> list[int]:
        async with grpc.aio.insecure_channel(processes.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)

            async def one(number: int) -> int:
                spec = spec_of(f"{number} of many", 60 + number % 7)
                request = pb.StreamGenerateRequest(spec=spec)
                stream = stub.StreamGenerate(request, timeout=CALL_SECONDS)
                return len(tokens_of([message async for message in stream]))

            return await asyncio.gather(*(one(number) for number in range(256)))

    totals = loop_thread().run(read_all(), seconds=CALL_SECONDS)
    assert totals == [60 + number % 7 for number in range(256)]
    wait_until(lambda: processes.is_idle, "idle service and worker")
