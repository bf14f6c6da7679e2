"""/metrics, /healthz, /readyz: frozen numbers in both formats, bounded whoever connects."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from worker.description import ModelDescription, PoolDescription, WorkerDescription, WorkerState
from worker.link.addresses import AddressError
from worker.link.http import LIFE_SECONDS, MAX_CONNECTIONS, STALL_SECONDS, StatusServer
from worker.readers.metrics import WorkerCollector, first_view
from worker.stats import EngineCounts
from worker.status import StatusBoard, StepMark, first_board


class Served:
    """A status server on a free port, with a clock in the test's hands."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        pool = PoolDescription(8, 4, 2, 32, "lru")
        description = WorkerDescription("w", 1, ModelDescription("m", 9, 32), pool, 1, 32, 0, (), "", b"")
        self.now = 100.0
        self.board: StatusBoard = first_board(description, self.now)
        registry = CollectorRegistry()
        WorkerCollector(
            registry,
            description,
            view=lambda: first_view(self.board.load.pool),
            mismatches=lambda: 3,
            watermark_pages=2,
        )
        self.server = StatusServer(host, 0, registry=registry, board=self.board, clock=lambda: self.now)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()
        finally:
            connection.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()
    made.server.close()
    left = [thread.name for thread in threading.enumerate()]
    assert not [name for name in left if name == "kvatlas-http" or "process_request" in name]


def test_metrics_come_as_text_and_as_openmetrics(served: Served) -> None:
    status, kind, text = served.get("/metrics")
    assert (status, kind.startswith("text/plain")) == (200, True)
    assert 'kvatlas_pages{state="free"} 8.0' in text
    assert "kvatlas_link_sequence_mismatches_total 3.0" in text
    status, kind, text = served.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.startswith("application/openmetrics-text")) == (200, True)
    families = {family.name: family for family in openmetrics(text)}  # strict: refuses colliding names
    assert families["kvatlas_pages"].type == "gauge"
    assert families["kvatlas_page_events"].type == "counter"
    assert families["kvatlas_step_seconds"].type == "histogram"
    assert families["kvatlas_pool"].type == "info"


def test_an_accept_header_that_says_nothing_gets_plain_text(served: Served) -> None:
    for accept in ("application/openmetrics-text; version=x", "text/plain; version=1..0", ";=;,"):
        status, kind, _ = served.get("/metrics", Accept=accept)
        assert (status, kind.partition(";")[0]) == (200, "text/plain")


def test_ready_only_while_serving(served: Served) -> None:
    assert served.get("/readyz")[::2] == (503, "starting\n")
    served.board.state = WorkerState.SERVING
    assert served.get("/readyz")[::2] == (200, "serving\n")
    served.board.state = WorkerState.DRAINING
    assert served.get("/readyz")[0] == 503


def test_healthy_unless_something_runs_and_no_step_ends(served: Served) -> None:
    assert served.get("/healthz")[::2] == (200, "ok\n")
    served.now += STALL_SECONDS + 1
    assert served.get("/healthz")[0] == 200, "idle for long is not stuck"
    served.board.load = replace(served.board.load, counts=EngineCounts(running_sequences=1))
    status, _, text = served.get("/healthz")
    assert (status, "stuck" in text) == (503, True)
    served.board.step = StepMark(1, served.now)
    assert served.get("/healthz")[0] == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/"])
def test_a_head_has_the_status_of_a_get(served: Served, path: str) -> None:
    status, kind, _ = served.get(path)
    assert served.get(path, "HEAD")[:2] == (status, kind)


def test_a_page_that_breaks_is_an_error_that_is_told_and_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection was closed without a word, and the log had it below its usual level."""
    served.board.load = None  # type: ignore[assignment]  # a bug
    for path in ("/metrics", "/healthz"):
        assert served.get(path)[::2] == (500, "internal error\n")
        assert f"event=http_page_failed path={path!r}" in caplog.text
    assert served.get("/readyz")[0] == 503, "the others are told"


def test_no_name_is_looked_up_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no DNS answers, that took the start of a worker many seconds."""

    def look_up(*_: object) -> str:
        raise AssertionError("looked up")

    for name in ("getfqdn", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, look_up)
    made = Served("0.0.0.0")
    assert made.get("/healthz")[0] == 200
    made.server.close()


@pytest.mark.parametrize("host", ["256.0.0.1", "ä..b"])
def test_a_host_that_is_none_is_told_in_a_sentence(host: str) -> None:
    with pytest.raises(AddressError, match=r"^metrics_host .+, metrics_port 0: .+"):
        Served(host)


def test_an_address_in_use_is_told_in_a_sentence(served: Served) -> None:
    with pytest.raises(AddressError, match=f"metrics_port {served.server.port}: Address already in use"):
        StatusServer(
            "127.0.0.1",
            served.server.port,
            registry=CollectorRegistry(),
            board=served.board,
            clock=lambda: 0.0,
        )


def test_nothing_is_kept_of_connections_that_are_over(
    served: Served, wait_until: Callable[..., None]
) -> None:
    for _ in range(3):
        served.get("/healthz")
    wait_until(lambda: not served.server._server._connections, "their ends")


def test_other_paths_are_not_found(served: Served) -> None:
    assert served.get("/")[0] == 404
    assert served.get("/metrics?x=1")[0] == 200


def test_connections_that_say_nothing_are_bounded_and_do_not_hold_up_the_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that waited for them would last longer than a test may."""
    monkeypatch.setattr("worker.link.http._Handler.timeout", 3600.0)
    silent = [socket.create_connection(("127.0.0.1", served.server.port)) for _ in range(MAX_CONNECTIONS)]
    try:
        end = time.monotonic() + 60
        refused = False
        while not refused:
            assert time.monotonic() < end
            try:
                served.get("/healthz")
            except (http.client.HTTPException, OSError):
                refused = True
        silent.pop().close()
        while True:
            assert time.monotonic() < end
            try:
                assert served.get("/healthz")[0] == 200
                break
            except (http.client.HTTPException, OSError):
                threading.Event().wait(0.01)
        served.server.close()
    finally:
        for connection in silent:
            connection.close()


def test_a_connection_that_sends_now_and_then_a_byte_has_a_short_life_too(served: Served) -> None:
    """Each byte gave it another five seconds: eight of them, and nobody else was answered for days."""
    with socket.create_connection(("127.0.0.1", served.server.port)) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        end, is_over = time.monotonic() + 60, False
        while not is_over:
            assert time.monotonic() < end
            if served.server._server._connections:  # it has come
                served.now += LIFE_SECONDS
            try:
                slow.sendall(b"x")
            except OSError:
                is_over = True
            threading.Event().wait(0.01)


def test_a_connection_that_got_no_thread_keeps_no_place(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After eight of them nobody was answered any more."""
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def no_more(thread: threading.Thread) -> None:
        if thread.name != "kvatlas-http":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    for _ in range(MAX_CONNECTIONS + 1):
        with pytest.raises((http.client.HTTPException, OSError)):
            served.get("/healthz")
    monkeypatch.undo()
    assert len(refused) == MAX_CONNECTIONS + 1
    assert served.get("/healthz")[0] == 200
