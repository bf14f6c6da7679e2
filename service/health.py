"""grpc.health.v1: who serves, told at once and on every change, until the drain ends the watches.

Owns the status of each name. Not the package's servicer: that one has no List, starts as SERVING, cannot
come back from a shutdown, and its Watch never ends.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from service import health_messages as messages
from service.health_messages import NOT_SERVING, SERVICE_UNKNOWN, SERVING

PROCESS = ""
GENERATION = "kvatlas.v1.GenerationService"
CACHE = "kvatlas.v1.CacheService"


class HealthBoard:
    """What is said about each name; changes wake all watches."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._statuses = dict.fromkeys((PROCESS, GENERATION, CACHE), NOT_SERVING)
        self._changed: asyncio.Future[None] = loop.create_future()
        self.is_draining = False
        self.drain_started = asyncio.Event()  # ends the watches of all services

    @property
    def statuses(self) -> Mapping[str, int]:
        """Status by name; all NOT_SERVING while draining."""
        return dict.fromkeys(self._statuses, NOT_SERVING) if self.is_draining else self._statuses

    def status(self, name: str) -> int | None:
        """Status of a name; None: there is no such name."""
        return self.statuses.get(name)

    def set(self, name: str, *, is_serving: bool) -> None:
        """Says that a name serves, or no longer."""
        status = SERVING if is_serving else NOT_SERVING
        if self._statuses[name] != status:
            self._statuses[name] = status
            self._notify()

    def set_draining(self, is_draining: bool) -> None:
        """NOT_SERVING on all names, and the end of all watches; False takes it back."""
        if self.is_draining != is_draining:
            self.is_draining = is_draining
            if is_draining:
                self.drain_started.set()
            else:
                self.drain_started.clear()
            self._notify()

    async def wait_for_change(self) -> None:
        """Returns after the next change."""
        await asyncio.shield(self._changed)

    def _notify(self) -> None:
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)


class HealthServicer:
    """Answers from the board."""

    def __init__(self, board: HealthBoard) -> None:
        self._board = board

    async def check(self, request: Any, context: Any) -> Any:
        """The status of one name."""
        status = self._board.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return messages.HealthCheckResponse(status=status)

    async def list(self, request: Any, context: Any) -> Any:
        """All names."""
        response = messages.HealthListResponse()
        for name, status in self._board.statuses.items():
            response.statuses[name].status = status
        return response

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The status now and after each change; ends with OK when the drain begins."""
        sent: int | None = None
        while True:
            status = self._board.status(request.service)
            status = SERVICE_UNKNOWN if status is None else status
            if status != sent:
                sent = status
                yield messages.HealthCheckResponse(status=status)
                continue  # it may have changed while the message was written
            if self._board.is_draining:
                return
            await self._board.wait_for_change()


def add_health(server: grpc.aio.Server, board: HealthBoard) -> None:
    """Registers the servicer."""
    servicer = HealthServicer(board)
    encode = messages.HealthCheckResponse.SerializeToString
    check = messages.HealthCheckRequest.FromString
    handlers = {
        "Check": grpc.unary_unary_rpc_method_handler(servicer.check, check, encode),
        "List": grpc.unary_unary_rpc_method_handler(
            servicer.list,
            messages.HealthListRequest.FromString,
            messages.HealthListResponse.SerializeToString,
        ),
        "Watch": grpc.unary_stream_rpc_method_handler(servicer.watch, check, encode),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, handlers),))
