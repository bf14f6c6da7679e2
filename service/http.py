"""/metrics, /healthz, /readyz on a port of their own.

Owns a listener of the event loop, so that /healthz proves that the loop turns. A scrape is rendered on a
thread: it takes milliseconds. Connections, their time and their size are bounded.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 16_384
PATIENCE_SECONDS = 5.0

log = logging.getLogger("service.http")


class OpsServer:
    """Answers scrapers and probes."""

    def __init__(self, registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._is_ready = is_ready
        self._server: asyncio.Server | None = None
        self._num_connections = 0

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """Stops to listen."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        writer.transport.set_write_buffer_limits(high=0)  # drain() waits for all that was written
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    answer = await self._answer_safely(head)
                    writer.write(_without_body(answer) if head.startswith("HEAD ") else answer)
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # Whoever it was is gone, or no scraper of ours: close() would wait for its reading without end.
            writer.transport.abort()
        finally:
            self._num_connections -= 1
            with suppress(OSError):
                writer.close()

    async def _answer_safely(self, head: str) -> bytes:
        try:
            return await self._answer(head)
        except Exception:  # any bug of what is read, and an alarm is to hear of it
            log.exception("event=http_page_failed request=%r", head[:128])
            return _response("500 Internal Server Error", "text/plain", b"internal error\n")

    async def _answer(self, head: str) -> bytes:
        method, _, rest = head.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"")
        match path:
            case "/metrics":
                kind, body = await asyncio.to_thread(self._metrics, head.lower())
                return _response("200 OK", kind, body)
            case "/healthz":
                return _response("200 OK", "text/plain", b"ok\n")
            case "/readyz" if self._is_ready():
                return _response("200 OK", "text/plain", b"ready\n")
            case "/readyz":
                return _response("503 Service Unavailable", "text/plain", b"not ready\n")
        return _response("404 Not Found", "text/plain", b"")

    def _metrics(self, head: str) -> tuple[str, bytes]:
        if "application/openmetrics-text" in head:
            return openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)


def _without_body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _response(status: str, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join([*head, "", ""]).encode() + body
