"""What tests of the service share: a service of this process, its scripted workers, what its client sees."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import uvloop
from google.rpc import error_details_pb2, status_pb2

from kvatlas.models.vocabulary import tokenizer_digest
from service.config import ServiceConfig
from service.server import Service
from service.testing_worker import TOY, ScriptedWorker, WorkerScript
from service.text.tokenizer import Tokenizer

T = TypeVar("T")

OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
"""Option of a channel. Without it channels of a process to one address share a connection: to a server that
was killed and started again a new channel goes by the dead one's, until that is found broken.
"""


# What a client sees


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status of ours, taken apart."""

    code: str
    message: str
    reason: str
    metadata: Mapping[str, str]
    paths: tuple[str, ...]  # of BadRequest
    retry_ms: int | None  # of RetryInfo
    pushback: str | None  # trailer

    @classmethod
    def of(cls, error: grpc.RpcError) -> "Refusal":
        """Of what a stub raised; without details (gRPC's core made it) the reason is empty."""
        call: Any = error
        trailers = dict(call.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        has_retry = False
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(bad)
            has_retry = detail.Unpack(retry) or has_retry
        assert not status.details or info.domain == "kvatlas.v1", info
        return cls(
            call.code().name,
            call.details(),
            info.reason,
            dict(info.metadata),
            tuple(violation.field for violation in bad.field_violations),
            retry.retry_delay.ToMilliseconds() if has_retry else None,
            trailers.get("grpc-retry-pushback-ms"),
        )


# A service in this process


class _LoopThread:
    """The one event loop of this process for services under test (grpc/grpc#42357), on a thread."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="service-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
        """The result of a coroutine, computed on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)


_loop_thread: list[_LoopThread] = []


def loop_thread() -> _LoopThread:
    """Made with the first use, kept to the end of the process."""
    if not _loop_thread:
        _loop_thread.append(_LoopThread())
    return _loop_thread[0]


class RunningService:
    """A service on the loop thread with its scripted workers."""

    def __init__(self, service: Service, workers: list[ScriptedWorker]) -> None:
        self.service = service
        self.workers = workers
        self.address = f"127.0.0.1:{service.port}"
        self.metrics_url = f"http://127.0.0.1:{service.metrics_port}"

    @property
    def worker(self) -> ScriptedWorker:
        """The first one."""
        return self.workers[0]

    def value(self, name: str, **labels: str) -> float:
        """A sample of the service's own registry; 0 if there is none."""
        return self.service.backstage.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request, here and on the workers."""
        backstage = self.service.backstage
        sequences = sum(link.live_sequences for link in backstage.pool.links)
        on_workers = sum(worker.live_sequences for worker in self.workers)
        return not (len(backstage.live) or backstage.admission.active or sequences or on_workers)


@contextmanager
def running_service(
    folder: Path,
    *,
    num_workers: int = 1,
    script: WorkerScript | None = None,
    ready: bool = True,
    model_id: str = TOY.model_id,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Iterator[RunningService]:
    """A service on a free port of the loopback; `ready` waits until it has a worker."""
    workers = [
        ScriptedWorker(f"ipc://{folder}/engine-{number}", f"worker-{number}", script).start()
        for number in range(num_workers)
    ]
    config = ServiceConfig(
        **{
            "address": "127.0.0.1:0",
            "metrics_address": "127.0.0.1:0",
            "instance_id": "service-under-test",
            "workers": tuple(worker.address for worker in workers) or (f"ipc://{folder}/nobody",),
            "drain_listen": 0.0,
            "grace": 5.0,
            **settings,
        },
    )
    thread = loop_thread()

    async def start() -> Service:
        service = Service(config, tokenizer or Tokenizer.toy(), tokenizer_digest(TOY), model_id)
        await service.start()
        while ready and len(service.backstage.pool.usable) < num_workers:
            await asyncio.sleep(0.005)
        return service

    running = RunningService(thread.run(start()), workers)
    try:
        yield running
    finally:
        running.service.hurry()
        thread.run(running.service.drain())
        for worker in workers:
            worker.stop()
