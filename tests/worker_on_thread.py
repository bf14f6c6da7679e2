"""A whole worker on a thread of the test, over real sockets, and services for it."""

import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from worker.config import WorkerConfig
from worker.description import WorkerState
from worker.devices import FakeDevice
from worker.link.testing import WAIT_SECONDS, TestService
from worker.link.testing_bench import until
from worker.process import WorkerProcess

BASE = WorkerConfig(
    runner="fake",
    model="random:tiny",
    metrics_port=0,
    page_size=4,
    num_pages=64,
    max_running=8,
    drain_grace=10.0,
)


class Running:
    """A worker on a thread of the test, and services for it."""

    def __init__(self, config: WorkerConfig, device: FakeDevice | None = None) -> None:
        self.worker = WorkerProcess(config, device or FakeDevice())
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.services: list[TestService] = []

    def _run(self) -> None:
        self.status = self.worker.run()

    def service(self, name: str = "a", epoch: int = 1) -> TestService:
        made = TestService(self.worker.link.address, name, epoch)
        self.services.append(made)
        return made

    def ready_service(self, name: str = "a") -> TestService:
        service = self.service(name)
        until(lambda: self.worker.board.state is not WorkerState.STARTING)
        service.hello()
        return service

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = self.get("/metrics")[1]
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics()[name, tuple(sorted(labels.items()))]

    def get(self, path: str) -> tuple[int, str]:
        assert self.worker.http is not None
        url = f"http://127.0.0.1:{self.worker.http.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for service in self.services:
            service.close()
        self.worker.stop()
        self.worker.stop()
        self.thread.join(WAIT_SECONDS)
        self.worker.close()
        assert not self.thread.is_alive()


def settled(running: Running) -> int:
    """Waits until nothing runs and the observer has seen it all; the revision then."""
    ring = running.worker.ring
    until(lambda: running.worker.observer.metrics.pool.revision == ring.number)
    assert running.metric("kvatlas_pages", state="active") == 0
    return ring.number


def config_in(folder: Path, **changes: object) -> WorkerConfig:
    addresses = {"engine_address": f"ipc://{folder}/e", "pages_address": f"ipc://{folder}/p"}
    return replace(BASE, **{**addresses, **changes})  # type: ignore[arg-type]
