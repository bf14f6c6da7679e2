"""/metrics, /healthz and /readyz on a port of their own: serves frozen numbers, computes nothing.

Bounded: a few connections at once, each with a short life. Knows the status board and a registry.
"""

import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from worker.description import WorkerState
from worker.link.addresses import AddressError
from worker.log import log_event
from worker.status import StatusBoard

MAX_CONNECTIONS = 8
CONNECTION_SECONDS = 5.0  # for each read, and for the answer
LIFE_SECONDS = 10.0  # of a connection, however often its peer sends a byte
STALL_SECONDS = 30.0

logger = logging.getLogger("worker.http")


class StatusServer:
    """The http thread; port 0 takes any free one. Raises AddressError where it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        board: StatusBoard,
        clock: Callable[[], float],
    ) -> None:
        self._pages: dict[str, Callable[[str], tuple[int, str, bytes]]] = {
            "/metrics": lambda accept: _metrics(registry, accept),
            "/healthz": lambda _: _health(board, clock()),
            "/readyz": lambda _: _readiness(board),
        }
        try:
            self._server = _BoundedServer((host, port), self._pages, clock)
        except (OSError, TypeError) as error:  # no such address, or what can be no name
            why = getattr(error, "strerror", error)
            raise AddressError(f"metrics_host {host}, metrics_port {port}: {why}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="kvatlas-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, its connections and the socket; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = False  # server_close joins them
    request_queue_size = 16

    def __init__(
        self,
        address: tuple[str, int],
        pages: dict[str, Callable[[str], tuple[int, str, bytes]]],
        clock: Callable[[], float],
    ) -> None:
        self.pages = pages
        self._clock = clock
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._connections: dict[socket.socket, float] = {}  # when each began
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without a look at names, which http.server wants for CGI: a worker without DNS waited for it."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            request.close()  # someone opens connections faster than we answer: the next scrape will do
            return
        self._connections[request] = self._clock()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread for it, so nobody else gives its place back
            self._let_go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._let_go(request)

    def _let_go(self, request: Any) -> None:
        self._connections.pop(request, None)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("event=http_failed client=%s", client_address, exc_info=True)

    def service_actions(self) -> None:
        """Called by serve_forever in each of its turns."""
        oldest = self._clock() - LIFE_SECONDS
        for connection, began in list(self._connections.items()):
            if began < oldest:
                _shut(connection)

    def server_close(self) -> None:
        for connection in list(self._connections):
            _shut(connection)
        super().server_close()


def _shut(connection: socket.socket) -> None:
    """Ends what its thread waits for."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("event=http_connection_gone")


class _Handler(BaseHTTPRequestHandler):
    timeout = CONNECTION_SECONDS
    server: _BoundedServer

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def do_HEAD(self) -> None:
        """How some load balancers and watchers ask."""
        self._answer()

    def _answer(self) -> bytes:
        """Sends status and headers; the body."""
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            status, kind, body = 404, "text/plain", b"/metrics /healthz /readyz\n"
        else:
            status, kind, body = self._asked(page)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def _asked(self, page: Callable[[str], tuple[int, str, bytes]]) -> tuple[int, str, bytes]:
        """What a page says; where it breaks, that."""
        try:
            return page(self.headers.get("Accept", ""))
        except Exception:  # any bug of what is read, and an alarm is to hear of it
            logger.exception("event=http_page_failed path=%r", self.path[:128])
            return 500, "text/plain", b"internal error\n"

    def log_message(self, format: str, *args: Any) -> None:
        log_event(logger, logging.DEBUG, "http_request", line=format % args)


def _metrics(registry: CollectorRegistry, accept: str) -> tuple[int, str, bytes]:
    try:
        encode, kind = choose_encoder(accept)
    except TypeError:  # of a version that is no number; the header is the client's, who gets plain text
        encode, kind = choose_encoder("")
    return 200, kind, encode(registry)


def _health(board: StatusBoard, now: float) -> tuple[int, str, bytes]:
    age = now - board.step.ended
    if board.load.counts.running_sequences and age > STALL_SECONDS:
        return 503, "text/plain", f"stuck: no step for {age:.0f} s\n".encode()
    return 200, "text/plain", b"ok\n"


def _readiness(board: StatusBoard) -> tuple[int, str, bytes]:
    state = board.state
    status = 200 if state is WorkerState.SERVING else 503
    return status, "text/plain", f"{state.name.lower()}\n".encode()
