"""A DEALER on the event loop, for workers on this host: ZMTP 3.0 on a Unix socket, with no thread between.

libzmq's socket has an I/O thread, which wakes up for every message before this process sees it, and before
one leaves: a tenth of a millisecond each way where processors sleep. Owns its socket from open() to close().
Speaks NULL: a file has rights. Source: rfc.zeromq.org/spec/23. Knows no messages.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from struct import Struct

RETRY_SECONDS = 0.1  # until a worker that does not listen yet is tried again
READ_BYTES = 1 << 16  # of one turn of the loop: some hundred steps
GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
_SHORT, _LONG = Struct(">BB"), Struct(">BQ")  # flags and length
_MECHANISM = slice(12, 32)
_NULL = b"NULL".ljust(20, b"\0")
_GREETING = (b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _NULL).ljust(GREETING_BYTES, b"\0")
_READY, _PING, _PONG, _ERROR = b"\x05READY", b"\x04PING", b"\x04PONG", b"\x05ERROR"


class IpcStream:
    """`on_frames` gets each message, `on_end` why it is over: once, after everything else."""

    def __init__(
        self,
        address: str,
        *,
        loop: asyncio.AbstractEventLoop,
        identity: bytes,
        max_queued: int,
        max_message_bytes: int,
        on_frames: Callable[[list[bytes]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._path = path_of(address)
        self._loop = loop
        self._max_queued = max_queued
        self._max_message_bytes = max_message_bytes
        self._on_frames = on_frames
        self._on_end = on_end
        self._socket: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._out = _GREETING + _framed(_ready(identity), COMMAND)  # what is being sent
        self._queue: deque[bytes] = deque()  # messages behind it
        self._in = bytearray()
        self._parts: list[bytes] = []  # of a message whose last frame has not come
        self._is_greeted = self._is_ready = self._has_writer = False

    def open(self) -> None:
        """Connects, now or once somebody listens; returns at once."""
        self._retry = None
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            made.connect(self._path)
        except OSError:
            made.close()
            self._retry = self._loop.call_later(RETRY_SECONDS, self.open)
            return
        self._socket = made
        self._loop.add_reader(made.fileno(), self._read)
        self._write()

    def send(self, message: bytes) -> bool:
        """Sends a message, or puts it in the queue until the other side is there; False: that is full."""
        if len(self._queue) >= self._max_queued:
            return False
        self._queue.append(_framed(message))
        if self._is_ready and self._socket is not None and not self._has_writer:
            self._write()
        return True

    def close(self) -> None:
        """Frees the socket; what is still in the queue is lost. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _end(self, why: str) -> None:
        self.close()
        self._on_end(why)

    def _write(self) -> None:
        assert self._socket is not None, "not connected"
        while self._out or (self._is_ready and self._queue):
            self._out = self._out or self._queue.popleft()
            try:
                self._out = self._out[self._socket.send(self._out) :]
            except BlockingIOError:
                self._want_writer(True)
                return
            except OSError:
                return  # the reader hears of the end, behind what was said before it
        self._want_writer(False)

    def _want_writer(self, is_wanted: bool) -> None:
        if self._socket is None or is_wanted is self._has_writer:
            return
        self._has_writer = is_wanted
        if is_wanted:
            self._loop.add_writer(self._socket.fileno(), self._write)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        assert self._socket is not None, "not connected"
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._in += data
            self._take()
        else:
            self._end("closed the connection")

    def _take(self) -> None:
        """All that has come whole."""
        data, at = self._in, 0
        if not self._is_greeted:
            if len(data) < GREETING_BYTES:
                return
            if data[0] != 0xFF or data[10] < 3 or data[_MECHANISM] != _NULL:
                self._end("handshake failed: it does not speak ZMTP 3 without a mechanism")
                return
            self._is_greeted, at = True, GREETING_BYTES
        while self._socket is not None and len(data) - at >= _SHORT.size:
            flags, size = _SHORT.unpack_from(data, at)
            begin = at + _SHORT.size
            if flags & LONG:
                if len(data) - at < _LONG.size:
                    break
                flags, size = _LONG.unpack_from(data, at)
                begin = at + _LONG.size
            if size > self._max_message_bytes:
                self._end(f"sent a message of {size} bytes")
                return
            if len(data) < begin + size:
                break
            at = begin + size
            self._take_frame(flags, bytes(data[begin:at]))
        del data[:at]

    def _take_frame(self, flags: int, body: bytes) -> None:
        if flags & COMMAND:
            self._obey(body)
        elif not self._is_ready:
            self._end("handshake failed: a message before READY")
        else:
            self._parts.append(body)
            if not flags & MORE:
                parts, self._parts = self._parts, []
                self._on_frames(parts)

    def _obey(self, command: bytes) -> None:
        if command.startswith(_READY):
            self._is_ready = True
            self._write()
        elif command.startswith(_ERROR):
            self._end("handshake failed: it refused this service")
        elif command.startswith(_PING):
            self._queue.appendleft(_framed(_PONG + command[len(_PING) + 2 :], COMMAND))
            self._write()


def path_of(address: str) -> str:
    """The path of an ipc:// address; behind an @ it is a name that no file has."""
    path = address.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


def _framed(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return _SHORT.pack(flags, len(body)) + body
    return _LONG.pack(flags | LONG, len(body)) + body


def _ready(identity: bytes) -> bytes:
    """The command that ends the handshake: what kind of socket this is, and its name."""
    pairs = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    return _READY + b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in pairs
    )
