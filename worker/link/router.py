"""The engine socket as a ROUTER: who is there by routing id, what they sent, and what goes to them.

On ipc:// it is ours, without libzmq and its I/O thread: a request reaches the link's thread, and a token the
service, without another thread that must wake up (service/fleet/dealer.py has what that saves). On tcp:// it
is libzmq's, which may encrypt. Either speaks to libzmq's DEALER. Owns connections; knows no messages.
"""

import contextlib
import select
import socket
import time
from collections import deque
from typing import Protocol

import zmq

from kvatlas import zmtp
from worker.link.addresses import bind, last_endpoint, listen
from worker.link.doorkeeper import Doorkeeper
from worker.link.peers import MAX_SERVICES

HIGH_WATER_MARK = 10_000  # messages that wait for one service
WAITING_BYTES = 1 << 30  # of them, on one host: twice what a service's open calls may bring at once
READ_BYTES = 64 * 1024  # of one connection, before the next one's turn
MAX_CONNECTIONS = 2 * MAX_SERVICES  # one that is over may not have been noticed yet
PASSED_OVER = 64  # messages that are none of ours, before others have their turn
HANDSHAKE_SECONDS = 5.0  # for a connection, where others want its place
DEAF_SECONDS = 1.0  # after an accept that failed
LINGER_POLL_SECONDS = 0.002
IPC = "ipc://"
_NOTHING = memoryview(b"")


class CannotSend(Exception):
    """A message reaches nobody; the text says why."""


class Router(Protocol):
    """What the link needs of its socket. Used by one thread at a time."""

    address: str  # as bound: a wildcard port became a number

    def wait(self, seconds: float, *, reads: bool) -> None:
        """Until there is something to `receive`, if `reads`, until the wake-up, or so long."""
        ...

    def receive(self) -> tuple[bytes, bytes] | None:
        """Routing id and message of whoever has sent one; None: nothing is there now."""
        ...

    def send(self, identity: bytes, data: bytes) -> None:
        """Sends it, or puts it in that peer's queue. Raises CannotSend."""
        ...

    def close(self, linger_seconds: float = 0.0) -> None:
        """Frees it; what waits may take so long to go."""
        ...


def open_router(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, wakeup: int, doorkeeper: Doorkeeper | None
) -> Router:
    """Bound to an address; `wakeup` is the descriptor that ends a wait. Raises AddressError."""
    if address.startswith(IPC):
        return UnixRouter(address, wakeup)
    return ZmqRouter(context, address, wakeup, doorkeeper)


class ZmqRouter:
    """libzmq's."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        wakeup: int,
        doorkeeper: Doorkeeper | None,
    ) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a vanished peer is an error, not a silent drop
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a service that restarts takes its name over
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.LINGER, 0)
        if doorkeeper is not None:
            doorkeeper.guard(self._socket)
        bind(self._socket, address)
        self.address = last_endpoint(self._socket)
        self._poll_all, self._poll_wakeup = zmq.Poller(), zmq.Poller()
        for poller in (self._poll_all, self._poll_wakeup):
            poller.register(wakeup, zmq.POLLIN)
        self._poll_all.register(self._socket, zmq.POLLIN)

    def wait(self, seconds: float, *, reads: bool) -> None:
        """Until there is something to `receive`, if `reads`, until the wake-up, or so long."""
        poller = self._poll_all if reads else self._poll_wakeup
        poller.poll(max(0, int(seconds * 1000)))

    def receive(self) -> tuple[bytes, bytes] | None:
        """Routing id and message of whoever has sent one; None: nothing is there now."""
        for _ in range(PASSED_OVER):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) == 2:
                return frames[0], frames[1]
        return None

    def send(self, identity: bytes, data: bytes) -> None:
        """Sends it, or puts it in that peer's queue. Raises CannotSend."""
        try:
            self._socket.send_multipart((identity, data), zmq.NOBLOCK)
        except zmq.Again:
            raise CannotSend("its queue is full") from None
        except zmq.ZMQError as error:
            raise CannotSend(f"unreachable: {error.strerror}") from None

    def close(self, linger_seconds: float = 0.0) -> None:
        """Frees it; what waits may take so long to go."""
        self._socket.close(linger=int(linger_seconds * 1000))


class _Connection:
    """One DEALER's, from its connect to its end."""

    __slots__ = ("began", "held_up", "reader", "socket", "unsent", "waiting", "waiting_bytes")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.began = time.monotonic()
        self.reader = zmtp.Reader()
        self.waiting: deque[bytes] = deque()  # frames, in order
        self.waiting_bytes = 0  # of them
        self.unsent = _NOTHING  # of the one that the socket has not taken whole
        self.held_up = False  # the socket is full

    def write(self, data: bytes) -> None:
        """To the socket, or behind what waits. Raises OSError where it is gone."""
        if self.held_up:
            self.waiting.append(data)
            self.waiting_bytes += len(data)
        else:
            self._send(memoryview(data))

    def _send(self, data: memoryview) -> None:
        try:
            taken = self.socket.send(data)
        except BlockingIOError:
            taken = 0
        self.held_up = taken < len(data)
        self.unsent = data[taken:] if self.held_up else _NOTHING

    def go_on(self) -> None:
        """What waits, as far as the socket takes it now; nothing may be left of it. Raises OSError."""
        self._send(self.unsent)
        while self.waiting and not self.held_up:
            data = self.waiting.popleft()
            self.waiting_bytes -= len(data)
            self._send(memoryview(data))


class UnixRouter:
    """Ours, for services of this host."""

    def __init__(self, address: str, wakeup: int) -> None:
        self.address = address
        self._listener = listen(address)
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._by_identity: dict[bytes, _Connection] = {}
        self._came: deque[tuple[bytes, bytes]] = deque()  # read and not received yet
        self._ready: list[tuple[int, int]] = []  # descriptors and events of the last wait
        self._poll = select.epoll()
        self._poll.register(self._listener.fileno(), select.EPOLLIN)
        self._poll.register(wakeup, select.EPOLLIN)
        self._poll_wakeup = select.poll()
        self._poll_wakeup.register(wakeup, select.POLLIN)
        self._listens_at: float | None = None  # there were no descriptors left: when to accept again

    def wait(self, seconds: float, *, reads: bool) -> None:
        """Until there is something to `receive`, if `reads`, until the wake-up, or so long."""
        if self._listens_at is not None and time.monotonic() >= self._listens_at:
            self._listens_at = None
            self._poll.register(self._listener.fileno(), select.EPOLLIN)
        if not reads:
            self._send_waiting()
            self._poll_wakeup.poll(max(0.0, seconds * 1000))
        elif not self._came and not self._ready:
            self._ready = self._poll.poll(max(0.0, seconds))

    def receive(self) -> tuple[bytes, bytes] | None:
        """Routing id and message of whoever has sent one; None: nothing is there now."""
        while not self._came and self._ready:
            self._serve(*self._ready.pop())
        return self._came.popleft() if self._came else None

    def send(self, identity: bytes, data: bytes) -> None:
        """Sends it, or puts it in that peer's queue. Raises CannotSend."""
        connection = self._by_identity.get(identity)
        if connection is None:
            raise CannotSend("unreachable: it has left")
        if len(connection.waiting) >= HIGH_WATER_MARK or connection.waiting_bytes >= WAITING_BYTES:
            raise CannotSend("its queue is full")
        try:
            self._write(connection, zmtp.frame(data))
        except OSError as error:
            self._drop(connection)
            raise CannotSend(f"unreachable: {error.strerror}") from None

    def _write(self, connection: _Connection, data: bytes) -> None:
        was_held_up = connection.held_up
        connection.write(data)
        if connection.held_up and not was_held_up:
            self._poll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Frees it; what waits may take so long to go."""
        end = time.monotonic() + linger_seconds
        while self._send_waiting() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LINGER_POLL_SECONDS))
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()
        self._poll.close()

    def _send_waiting(self) -> bool:
        """Tries everybody for whom something waits; whether something still does."""
        for connection in list(self._connections.values()):
            if connection.held_up:
                self._go_on(connection)
        return any(connection.held_up for connection in self._connections.values())

    # What a descriptor has.

    def _serve(self, descriptor: int, events: int) -> None:
        connection = self._connections.get(descriptor)
        if connection is not None:
            if events & select.EPOLLOUT:
                self._go_on(connection)
            if events & ~select.EPOLLOUT and descriptor in self._connections:
                self._read(connection)
        elif descriptor == self._listener.fileno():
            self._accept()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError:  # no descriptors are left, and until some are this would be asked for ever
            self._poll.unregister(self._listener.fileno())
            self._listens_at = time.monotonic() + DEAF_SECONDS
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop_silent()
        if len(self._connections) >= MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        connection = self._connections[accepted.fileno()] = _Connection(accepted)
        self._poll.register(accepted.fileno(), select.EPOLLIN)
        with contextlib.suppress(OSError):  # it is gone: the next wait tells
            self._write(connection, zmtp.GREETING)

    def _drop_silent(self) -> None:
        """Those that have connected and not said who they are for too long."""
        latest = time.monotonic() - HANDSHAKE_SECONDS
        for connection in list(self._connections.values()):
            if connection.reader.identity is None and connection.began <= latest:
                self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        reader = connection.reader
        was_greeted, was_ready = reader.is_greeted, reader.identity is not None
        try:
            data = connection.socket.recv(READ_BYTES)
            messages = reader.take(data)
            if reader.is_greeted and not was_greeted:
                self._write(connection, zmtp.ready("ROUTER"))  # not before: libzmq would end it
        except BlockingIOError:
            return
        except (OSError, zmtp.ZmtpError):
            data = b""
        identity = reader.identity
        if not data or identity == b"":  # over, or one to whom nothing could be sent
            self._drop(connection)
            return
        if identity is not None:
            if not was_ready:
                self._welcome(identity, connection)
            self._came.extend((identity, message) for message in messages)

    def _welcome(self, identity: bytes, connection: _Connection) -> None:
        """A service that restarts takes its name over."""
        older = self._by_identity.get(identity)
        if older is not None:
            self._drop(older)
        self._by_identity[identity] = connection

    def _go_on(self, connection: _Connection) -> None:
        try:
            connection.go_on()
        except OSError:
            self._drop(connection)
            return
        if not connection.held_up:
            self._poll.modify(connection.socket.fileno(), select.EPOLLIN)

    def _drop(self, connection: _Connection) -> None:
        descriptor, identity = connection.socket.fileno(), connection.reader.identity
        self._poll.unregister(descriptor)
        del self._connections[descriptor]
        if identity is not None and self._by_identity.get(identity) is connection:
            del self._by_identity[identity]
        connection.socket.close()
