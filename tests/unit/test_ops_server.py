"""The service's plain port: what it answers, and that those who hold connections leave room again."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from service import http
from service.http import MAX_CONNECTIONS, OpsServer

Ask = Callable[[bytes], Awaitable[bytes]]


def run(scenario: Callable[[Ask, int], Awaitable[None]]) -> None:
    """A scenario before a server that is not ready."""

    async def work() -> None:
        server = OpsServer(CollectorRegistry(), lambda: False)
        port = await server.start("127.0.0.1", 0)

        async def ask(request: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            try:
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

        try:
            await scenario(ask, port)
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize(
    ("line", "status", "body"),
    [
        ("GET /healthz?full=1 HTTP/1.1", "200 OK", b"ok\n"),
        ("GET /readyz HTTP/1.1", "503 Service Unavailable", b"not ready\n"),
        ("POST /healthz HTTP/1.1", "405 Method Not Allowed", b""),
        ("GET /elsewhere HTTP/1.1", "404 Not Found", b""),
    ],
)
def test_each_request_has_its_answer(line: str, status: str, body: bytes) -> None:
    async def scenario(ask: Ask, port: int) -> None:
        head, _, told = (await ask(f"{line}\r\n\r\n".encode())).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status}\r\n".encode())
        assert told == body

    run(scenario)


def test_connections_are_so_many_at_most_and_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PATIENCE_SECONDS", 600.0)

    async def scenario(ask: Ask, port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        request = b"GET /healthz HTTP/1.1\r\n\r\n"
        while await ask(request):  # until all of them are accepted
            await asyncio.sleep(0.01)
        for _, writer in held:
            writer.close()
        while not await ask(request):
            await asyncio.sleep(0.01)
        for _ in range(2 * MAX_CONNECTIONS):
            assert b"ok\n" in await ask(request), "each gives its place back"

    run(scenario)
