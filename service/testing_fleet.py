"""What tests share that put a service before real workers: processes, how they die, and the cable between.

Imports nothing of the worker: it is a program here, started as an operator would.
"""

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from kvatlas.cli.config import child_environment
from kvatlas.free_ports import free_ports
from kvatlas.v1 import cache_pb2, cache_pb2_grpc, generation_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service.testing import RunningService, running_service

MODEL = "random:tiny"
PAGE_SIZE = 16
READY_SECONDS = 90.0
FAULTY_TOKENS = {"breaks_step": 1, "out_of_memory": 2, "kills_worker": 3, "slow_steps": 4}
"""Of worker/faults.py: a prompt of eight of them does that to a worker with `--debug-faults requests`."""


class WorkerProcess:
    """`python -m worker` at one address; `start` again after an end is a new life."""

    def __init__(
        self, folder: Path, worker_id: str = "worker-0", *flags: str, cable: "Cable | None" = None
    ) -> None:
        self.worker_id = worker_id
        self.cable = cable  # between it and its services; None: they share a socket file
        self._engine = (
            f"tcp://127.0.0.1:{cable.worker_port}" if cable else f"ipc://{folder}/{worker_id}.engine"
        )
        self.address = f"tcp://127.0.0.1:{cable.port}" if cable else self._engine  # for services
        self._pages = f"ipc://{folder}/{worker_id}.pages"
        self._flags = ("--model", MODEL, "--threads", "1", "--page-size", str(PAGE_SIZE), *flags)
        self.log_path = folder / f"{worker_id}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more_flags: str) -> None:
        """Begins a life, with these settings as well; returns at once."""
        assert self.process is None or self.process.poll() is not None, "it lives"
        command = [sys.executable, "-m", "worker", "--parent-watch", "--worker-id", self.worker_id]
        command += [
            "--metrics-port",
            "-1",
            "--engine-address",
            self._engine,
            "--pages-address",
            self._pages,
            *self._flags,
            *more_flags,
        ]
        environment = {**child_environment(), "OMP_NUM_THREADS": "1"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        """Sends it one."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit status; negative: the signal that ended it."""
        assert self.process is not None
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Ends it at once, also while it is stopped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Cable:
    """What lies between service and worker, and can be cut: then nothing passes, and nobody is told.

    Bytes that wait while it is cut arrive when it is mended, as with a real network.
    """

    def __init__(self) -> None:
        self.worker_port = free_ports(1)[0]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._is_closed = False
        self._wakeup, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="cable", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Nothing passes from now on."""
        self._whole.clear()
        self._waker.send(b"\0")

    def mend(self) -> None:
        """Everything passes again, what waited first."""
        self._whole.set()

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._is_closed = True
        self._whole.set()
        self._waker.send(b"\0")
        self._thread.join()
        for each in (self._listener, self._wakeup, self._waker, *self._pairs):
            each.close()

    def _run(self) -> None:
        while not self._is_closed:
            ready, _, _ = select.select([self._listener, self._wakeup, *self._pairs], [], [])
            self._whole.wait()
            for each in ready:
                if each is self._listener:
                    self._join(self._listener.accept()[0])
                elif each is self._wakeup:
                    self._wakeup.recv(64)
                elif each in self._pairs:
                    self._pass_on(each)

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self.worker_port))
        except OSError:
            near.close()
            return
        self._pairs[near], self._pairs[far] = far, near

    def _pass_on(self, near: socket.socket) -> None:
        far = self._pairs[near]
        data = b""
        with suppress(OSError):
            data = near.recv(65536)
            if data:
                far.sendall(data)
        if not data:
            for each in (near, far):
                del self._pairs[each]
                each.close()


class Fleet:
    """A service of this process, its workers, and stubs."""

    def __init__(
        self, running: RunningService, workers: Sequence[WorkerProcess], channel: grpc.Channel
    ) -> None:
        self.running = running
        self.workers = list(workers)
        make: Any = generation_pb2_grpc.GenerationServiceStub
        self.generation = make(channel)
        make = cache_pb2_grpc.CacheServiceStub
        self.cache = make(channel)

    @property
    def usable(self) -> list[str]:
        """Names of the workers that take requests now."""
        return sorted(link.worker_id for link in self.running.service.backstage.pool.usable)

    def active_pages(self, worker_id: str) -> int:
        """Pages that sequences hold there, as the mirror shows them; -1: it has no map of this worker yet."""
        request = cache_pb2.GetPagePoolRequest(worker_id=worker_id)
        try:
            return int(self.cache.GetPagePool(request, timeout=60).stats.active_pages)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return -1

    @property
    def is_whole(self) -> bool:
        """Whether all workers take requests and have a map: a snapshot comes a moment after the link."""
        return len(self.usable) == len(self.workers) and all(
            self.active_pages(worker.worker_id) >= 0 for worker in self.workers
        )

    def stream(self, spec: pb.GenerationSpec, timeout: float = 300.0) -> Any:
        """A stream that runs."""
        return self.generation.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=timeout)

    def slow(self, max_tokens: int = 1000) -> Any:
        """A stream that makes every step of its worker slow until it is cancelled; it has started."""
        call = self.stream(spec_of(chr(FAULTY_TOKENS["slow_steps"]) * 8, max_tokens))
        assert next(call).WhichOneof("event") == "started"
        return call


@contextmanager
def running_fleet(
    folder: Path,
    *flags: str,
    count: int = 2,
    more_flags: Mapping[str, Sequence[str]] | None = None,
    has_cables: bool = False,
    **settings: Any,
) -> Iterator[Fleet]:
    """A service and `count` workers on the CPU that are there, or one for each name in `more_flags`.

    `has_cables`: each worker is behind one of its own.
    """
    with ExitStack() as cleanup:
        workers = []
        for name, more in (more_flags or {f"worker-{number}": () for number in range(count)}).items():
            cable = cleanup.enter_context(closing(Cable())) if has_cables else None
            worker = WorkerProcess(folder, name, *flags, *more, cable=cable)
            cleanup.callback(worker.kill)
            worker.start()
            workers.append(worker)
        addresses = tuple(worker.address for worker in workers)
        running = cleanup.enter_context(
            running_service(folder, num_workers=0, ready=False, model_id=MODEL, workers=addresses, **settings)
        )
        fleet = Fleet(running, workers, cleanup.enter_context(grpc.insecure_channel(running.address)))
        wait_for(lambda: fleet.is_whole, "the workers", workers)
        yield fleet


def wait_for(condition: Callable[[], object], what: str, workers: Sequence[WorkerProcess] = ()) -> None:
    """Waits until it is so; AssertionError with the end of the workers' logs if that takes READY_SECONDS."""
    pause = threading.Event()
    for _ in range(int(READY_SECONDS / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    logs = "".join(worker.log_path.read_text()[-2000:] for worker in workers if worker.log_path.exists())
    raise AssertionError(f"{what}: not within {READY_SECONDS:g} s\n{logs}")


def spec_of(text: str, max_tokens: int = 32, **more: Any) -> pb.GenerationSpec:
    """A greedy request for token ids that goes on to its limit."""
    spec = pb.GenerationSpec(text=text, sampling=pb.SamplingParams(temperature=0), **more)
    spec.stop.ignore_eos = True
    spec.stop.max_tokens = max_tokens
    spec.output.format = pb.OUTPUT_FORMAT_TOKEN_IDS
    return spec


def tokens_of(messages: Sequence[pb.StreamGenerateResponse]) -> list[int]:
    """All tokens of a stream, each once and in its place: AssertionError otherwise, and without a summary."""
    ids: list[int] = []
    for message in messages:
        if message.WhichOneof("event") == "delta":
            assert message.delta.token_offset == len(ids), (message.delta.token_offset, len(ids))
            assert message.delta.token_count == len(message.delta.token_ids)
            ids += message.delta.token_ids
    assert messages[-1].WhichOneof("event") == "summary", messages[-1]
    assert messages[-1].summary.usage.completion_tokens == len(ids)
    return ids
