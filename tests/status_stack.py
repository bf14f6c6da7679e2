"""The stack on which rows of docs/errors.md are shown: a row's status, reason, details, and idle afterwards.

Everything here is real but the model's weights: two principals' tokens, an operator's listener, a pool of 64
pages, two rows and a queue of twelve. A prompt of SLOW makes every step of the worker take half a second for
as long as it runs, so what is to be seen can be seen on any machine. Rows that take another worker or its
death are in test_worker_failures.py and test_lost_workers.py; docs/errors.md says which test shows which.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.v1 import generation_pb2 as pb
from service.testing import RunningService, running_service
from service.testing_callers import Caller, Told
from service.testing_fleet import FAULTY_TOKENS, WorkerProcess, wait_for

FIVE_ATTEMPTS: dict[str, Any] = {
    "maxAttempts": 5,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.01s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
"""A client's retryPolicy (gRFC A6) that asks again at once."""

PAGES, ROWS, QUEUE = 64, 2, 12
CONTEXT = PAGES * 16
SLOW = chr(FAULTY_TOKENS["slow_steps"]) * 8
TOKENS = {
    "user": "user-a1",
    "other": "other-b2",
    "capped": "capped-c3",
    "looker": "looker-d4",
    "root": "root-e5",
}

SCOPES = {
    "user": '["generate", "cache.read"]',
    "other": '["generate", "cache.read"]',
    "capped": '["generate"]\nmax_active_requests = 2\nmax_queued_requests = 1',
    "looker": '["cache.read"]',
    "root": '["generate", "cache.read", "priority", "admin"]',
}


class Stack:
    """One worker and the services before it."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        self.folder = folder
        self._cleanup = cleanup
        self._count = 0
        auth = folder / "auth.toml"
        auth.touch(mode=0o600)
        auth.write_text("\n".join(_entry(name) for name in TOKENS))
        self._auth = str(auth)
        flags: tuple[str, ...] = (
            "--num-pages",
            str(PAGES),
            "--max-running",
            str(ROWS),
            "--max-queued",
            str(QUEUE),
        )
        flags += ("--debug-faults", "requests", "--recordings", str(folder / "recordings"))
        self.worker = WorkerProcess(folder, "worker-0", *flags, "--profiles", str(folder / "profiles"))
        self.worker.start()
        cleanup.callback(self.worker.kill)
        self.running, self.channel, self.admin = self.service(max_watches=2)
        wait_for(lambda: self.running.service.backstage.pool.usable, "the worker", [self.worker])
        self.user, self.other, self.root = self.caller("user"), self.caller("other"), self.caller("root")
        wait_for(self.has_map, "the page map", [self.worker])

    def service(self, **settings: Any) -> tuple[RunningService, grpc.Channel, grpc.Channel]:
        """Another service before the worker, with channels to both of its listeners."""
        self._count += 1
        settings.setdefault("workers", (self.worker.address,))
        running = self._cleanup.enter_context(
            running_service(
                self.folder,
                num_workers=0,
                ready=False,
                instance_id=f"service-{self._count}",
                auth_file=self._auth,
                admin_address="127.0.0.1:0",
                **settings,
            )
        )
        channels = [
            self._cleanup.enter_context(grpc.insecure_channel(address))
            for address in (running.address, f"127.0.0.1:{running.service.admin_port}")
        ]
        return running, channels[0], channels[1]

    def caller(self, name: str) -> Caller:
        return Caller(self.channel, self.admin, TOKENS.get(name, ""))

    def has_map(self) -> bool:
        try:
            self.root.GetPagePool(cache_pb2.GetPagePoolRequest())
        except grpc.RpcError:
            return False
        return True

    def worker_load(self) -> server_pb2.WorkerLoad:
        load: server_pb2.WorkerLoad = self.root.GetLoad(server_pb2.GetLoadRequest()).load.workers[0]
        return load

    # What is held, so that others wait

    @contextmanager
    def busy(self, queued: int = 0) -> Iterator[list[Any]]:
        """All rows taken by streams that run on slowly, and so many that wait behind them."""
        calls = [self.root.stream(slow(CONTEXT - 8), queue_updates=True) for _ in range(ROWS)]
        try:
            for call in calls:
                while next(call).WhichOneof("event") != "started":
                    pass
            # The worker looks at what has come between two slow steps: all of them at once.
            waiting = [self.root.stream(spec_of("waits"), queue_updates=True) for _ in range(queued)]
            calls += waiting
            positions = [next(call).queued.position for call in waiting]
            assert sorted(positions) == list(range(queued)), "each is told its own place"
            yield calls
        finally:
            for call in calls:
                call.cancel()

    def is_idle(self) -> bool:
        if not self.running.is_idle:
            return False
        pool = self.root.GetPagePool(cache_pb2.GetPagePoolRequest())
        load = self.worker_load()
        return not (pool.stats.active_pages or load.waiting_requests or load.running_sequences)

    def steps_since_release(self) -> int:
        """Engine steps after the one at whose boundary the last page came back."""
        (row,) = self.root.GetPageTable(cache_pb2.GetPageTableRequest(rows=[0]))
        pool = self.root.GetPagePool(cache_pb2.GetPagePoolRequest())
        return int(row.step) - 1 - int(pool.revision.step)


def _entry(name: str) -> str:
    digest = hashlib.sha256(TOKENS[name].encode()).hexdigest()
    head = f'[[principal]]\nname = "{name}"\ntenant = "{name}"\ntoken_sha256 = ["{digest}"]'
    return f"{head}\nscopes = {SCOPES[name]}\n"


def spec_of(text: str = "abc", max_tokens: int = 4, **more: Any) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(text=text, sampling=pb.SamplingParams(temperature=0), **more)
    spec.stop.ignore_eos = True
    spec.stop.max_tokens = max_tokens
    return spec


def slow(max_tokens: int, **more: Any) -> pb.GenerationSpec:
    return spec_of(SLOW, max_tokens, **more)


@dataclass(frozen=True)
class Row:
    """What the table says of a situation."""

    act: Callable[[Stack], Told]
    status: str
    reason: str = ""
    keys: tuple[str, ...] = ()  # of ErrorInfo's metadata
    paths: tuple[str, ...] = ()  # of BadRequest, at least these
    retry_ms: int | None = None  # of RetryInfo
    pushback: str | None = None
    quota: str = ""
    is_slow: bool = False


def cases_of(rows: Iterable[Row]) -> list[Any]:
    """One case of a parametrized test for each, by the name of its situation."""
    return [
        pytest.param(row, id=row.act.__name__, marks=[pytest.mark.slow] if row.is_slow else [])
        for row in rows
    ]


def check_row(stack: Stack, row: Row) -> None:
    """Makes the situation, compares what the caller was told, and waits until nothing is left."""
    got = row.act(stack)
    assert (got.status, got.reason) == (row.status, row.reason)
    assert set(row.keys) <= set(got.metadata), got.metadata
    assert set(row.paths) <= set(got.paths), got.paths
    assert got.quota == row.quota
    if row.retry_ms is not None:
        assert got.retry_ms == row.retry_ms
    if row.pushback is not None:
        assert got.pushback == row.pushback
    wait_for(stack.is_idle, "idle service and worker", [stack.worker])
    # The map follows a moment later; then no step may have been made after the last page came back.
    wait_for(lambda: stack.steps_since_release() <= 1, "pages that came back in time", [stack.worker])
