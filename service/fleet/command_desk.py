"""Commands of one link and their answers: ids, waiting readers, time limits.

Owns the commands that are under way. Sends through the link; knows no sockets.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from service.fleet import codec
from service.fleet.codec import Command, CommandReply

MAX_REPLIES = 4096  # replies of one command that wait for their reader


class WorkerUnavailable(Exception):
    """The worker is not connected, or went away before it had answered."""


class CommandFailed(Exception):
    """The worker's answer to a command is an error."""

    def __init__(self, reply: CommandReply) -> None:
        super().__init__(f"code {reply.code}: {reply.message}")
        self.code: int = reply.code  # google.rpc.Code
        self.error_reason: int = reply.error_reason  # kvatlas.v1.ErrorReason
        self.message: str = reply.message
        self.metadata: dict[str, str] = dict(reply.metadata)  # of ErrorInfo


@dataclass(slots=True)
class _Pending:
    replies: deque[CommandReply] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    is_lost: bool = False

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class CommandDesk:
    """Commands under way on one worker. `send` puts a frame in the socket's queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._send = send
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1

    @property
    def under_way(self) -> int:
        """Commands that wait for an answer."""
        return len(self._pending)

    async def ask(self, command: Command, timeout: float) -> AsyncGenerator[CommandReply, None]:
        """Sends a command and yields its replies; see WorkerLink.command."""
        command_id = self._take_id()
        pending = self._pending[command_id] = _Pending()
        deadline = self._loop.time() + timeout
        more = True
        self._send(codec.encode_command(command_id, max(1, int(timeout * 1000)), command))
        try:
            while more:
                reply = await self._next_reply(pending, deadline)
                more = reply.more
                if reply.code:
                    more = False
                    raise CommandFailed(reply)
                yield reply
        finally:
            self._pending.pop(command_id, None)
            if more and not pending.is_lost:
                self._send(codec.encode_cancel_command(self._take_id(), command_id))

    def take(self, reply: CommandReply) -> None:
        """An answer came. One that nobody waits for any more is dropped."""
        pending = self._pending.get(reply.command_id)
        if pending is None:
            return
        pending.replies.append(reply)
        if len(pending.replies) > MAX_REPLIES:
            self._give_up(reply.command_id)
        pending.wake()

    def lose(self) -> None:
        """The worker is gone: nothing is answered any more."""
        for command_id in list(self._pending):
            self._give_up(command_id)

    def _give_up(self, command_id: int) -> None:
        pending = self._pending.pop(command_id)
        pending.is_lost = True
        pending.replies.clear()
        pending.wake()

    async def _next_reply(self, pending: _Pending, deadline: float) -> CommandReply:
        while not pending.replies:
            if pending.is_lost:
                raise WorkerUnavailable("the worker went away before it had answered")
            pending.waiter = self._loop.create_future()
            async with asyncio.timeout_at(deadline):
                await pending.waiter
        return pending.replies.popleft()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
