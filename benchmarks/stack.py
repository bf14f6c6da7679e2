"""One worker and some services as processes of their own, for benchmarks of the served path.

Owns the processes, their sockets' folder and their ports. The services share the worker; clients are spread
over the services' addresses.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, TypeAlias

import grpc

from kvatlas.free_ports import free_ports
from kvatlas.v1 import server_pb2, server_pb2_grpc

END_SECONDS = 20.0
Process: TypeAlias = "subprocess.Popen[bytes]"


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    addresses: list[str]  # gRPC, one per service
    service_pids: list[int]
    worker_pid: int
    began: float  # monotonic clock, before the first process was started
    ready_seconds: float  # until every service had a warm worker


class StackDied(Exception):
    """A process ended, or nothing was ready in time; the text is for the user."""


@contextlib.contextmanager
def run_stack(
    model: str,
    worker_settings: Mapping[str, object],
    *,
    services: int = 1,
    ready_seconds: float = 120.0,
    worker_environment: Mapping[str, str] = MappingProxyType({}),
    service_environment: Mapping[str, str] = MappingProxyType({}),
    logs: Path | None = None,
    through: Sequence[str] = (),
) -> Iterator[Stack]:
    """Starts, waits until every service has a warm worker, and ends all of it. Raises StackDied.

    `logs`: a folder, for worker.log, service-0.log and so on, of level info; without one, warnings go to this
    process's errors. `through`: a module that starts the processes, and its arguments, instead of
    `python -m worker` and `python -m service`.
    """
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as name, contextlib.ExitStack() as stack:
        folder, began = Path(name), time.monotonic()
        engine, level = f"ipc://{folder}/engine", "warning" if logs is None else "info"

        def start(module: str, flags: Mapping[str, object], number: int | None = None) -> "Process":
            name = f"{module}.log" if number is None else f"{module}-{number}.log"
            log = stack.enter_context((logs / name).open("wb")) if logs is not None else None
            environment = worker_environment if module == "worker" else service_environment
            return stack.enter_context(_process([*through, module], flags, environment, log))

        flags: dict[str, object] = {
            "model": model,
            "engine-address": engine,
            "pages-address": f"ipc://{folder}/pages",
            "metrics-port": -1,
            "log-level": level,
            **worker_settings,
        }
        worker = start("worker", flags)
        addresses, processes = [], [worker]
        for number in range(services):
            addresses.append(f"127.0.0.1:{free_ports(1)[0]}")
            flags = {"address": addresses[-1], "workers": engine, "model": model, "metrics-address": ""}
            flags |= {"log-level": level, "no-access-log": None, "drain-listen": 0}
            processes.append(start("service", flags, number))
        for address in addresses:
            _wait_until_serving(address, processes, began + ready_seconds)
        pids = [process.pid for process in processes[1:]]
        yield Stack(addresses, pids, worker.pid, began, time.monotonic() - began)


@contextlib.contextmanager
def _process(
    module: Sequence[str],
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    log: BinaryIO | None,
) -> Iterator["Process"]:
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    command += [sys.executable, "-m", *module, "--parent-watch", str(os.getpid())]  # however we end
    for name, value in flags.items():
        command += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    with ending(subprocess.Popen(command, stderr=log)) as process:
        yield process


@contextlib.contextmanager
def ending(process: "Process", seconds: float = END_SECONDS) -> Iterator["Process"]:
    """Ends a process with the block; one that does not end within so many seconds is killed."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_serving(address: str, processes: "list[Process]", deadline: float) -> None:
    # Without waits between attempts that would look like a slow start.
    options = [(f"grpc.{name}_reconnect_backoff_ms", 50) for name in ("initial", "min", "max")]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                info = stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=2)
                if any(worker.state == server_pb2.SERVER_STATE_SERVING for worker in info.workers):
                    return
            if any(process.poll() is not None for process in processes):
                raise StackDied("a process of the stack ended before it was ready")
            if time.monotonic() > deadline:
                raise StackDied(f"{address} has no warm worker")
            time.sleep(0.02)
