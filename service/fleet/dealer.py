"""A DEALER to a worker of this host, on the event loop, without libzmq and its I/O thread.

Owns the connection from the first try to close(). A request reaches the worker's socket, and a token the
loop, without another thread that must wake up (docs/benchmarks.md, "The served path").
"""

import asyncio
from collections.abc import Callable
from typing import Any

from kvatlas import zmtp

RETRY_SECONDS = 0.1  # a worker that has just begun to listen is found soon


class Dealer(asyncio.Protocol):
    """`on_message` gets what comes, `on_end` once why it is over; neither is called after close()."""

    def __init__(
        self,
        path: str,
        *,
        loop: asyncio.AbstractEventLoop,
        identity: bytes,
        limit_bytes: int,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._path = path
        self._loop = loop
        self._ready = zmtp.ready("DEALER", identity)
        self._limit_bytes = limit_bytes  # of what waits for a worker that does not read
        self._on_message = on_message
        self._on_end = on_end
        self._reader = zmtp.Reader()
        self._early: list[bytes] = []  # sent before the other end has greeted
        self._transport: Any = None
        self._is_over = False
        self._task = loop.create_task(self._connect())

    def send(self, message: bytes) -> bool:
        """Sends it, or puts it in the queue; False: that is full, or it is over."""
        if self._is_over:
            return False
        frame = zmtp.frame(message)
        if not self._reader.is_greeted:
            self._early.append(frame)
            return sum(map(len, self._early)) <= self._limit_bytes
        self._transport.write(frame)
        return bool(self._transport.get_write_buffer_size() <= self._limit_bytes)

    def close(self, linger_ms: int = 0) -> None:
        """Frees it; what waits may take so long to go. Idempotent."""
        self._is_over = True
        self._task.cancel()
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if linger_ms:
            transport.close()
            self._loop.call_later(linger_ms / 1000, transport.abort)
        else:
            transport.abort()

    async def _connect(self) -> None:
        """Until somebody listens: a worker may be about to start."""
        while True:
            try:
                await self._loop.create_unix_connection(lambda: self, self._path)
                return
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)

    # What the transport calls.

    def connection_made(self, transport: Any) -> None:
        """Speaks first: libzmq at the other end waits for it."""
        if self._is_over:  # closed while it was being connected
            transport.abort()
            return
        self._transport = transport
        transport.write(zmtp.GREETING)

    def data_received(self, data: bytes) -> None:
        """Some bytes of the worker's."""
        was_greeted = self._reader.is_greeted
        try:
            messages = self._reader.take(data)
        except zmtp.ZmtpError as error:
            self._end(f"does not speak our protocol: {error}")
            return
        if self._reader.is_greeted and not was_greeted:
            self._transport.writelines([self._ready, *self._early])
            self._early.clear()
        for message in messages:
            if self._is_over:
                return  # by what was read
            self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        """The worker has closed it, or is gone."""
        self._end("closed the connection")

    def _end(self, why: str) -> None:
        if not self._is_over:
            self.close()
            self._on_end(why)
