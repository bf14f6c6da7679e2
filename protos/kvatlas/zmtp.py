"""ZMTP 3.0 without security, as both ends of a Unix socket speak it: bytes to messages and back.

What libzmq speaks over ipc:// (https://rfc.zeromq.org/spec/23/), so it may be at the other end. Without its
I/O threads a message passes two threads less at each end. Owns the bytes of a message that is not complete
yet. Knows no sockets.
"""

GREETING_BYTES = 64
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MAX_MESSAGE_BYTES = 64 << 20  # workers' messages stay below 17 MiB
MAX_READY_BYTES = 4096  # of a frame before its sender has said who it is
MAX_IDENTITY_BYTES = 255
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_READY = b"\x05READY"
_MAJOR, _MECHANISM = 10, slice(12, 32)  # places in a greeting


class ZmtpError(Exception):
    """The other end does not speak this; the text says what it did."""


def ready(socket_type: str, identity: bytes = b"") -> bytes:
    """The command that ends a handshake."""
    body = _READY + _property(b"Socket-Type", socket_type.encode()) + _property(b"Identity", identity)
    return bytes((_COMMAND, len(body))) + body if len(body) < 256 else _long(_COMMAND, body)


def frame(message: bytes) -> bytes:
    """A message of one frame."""
    size = len(message)
    return bytes((0, size)) + message if size < 256 else _long(0, message)


def _long(flags: int, body: bytes) -> bytes:
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


class Reader:
    """What one connection reads. `is_greeted` and `identity` tell how far its handshake is."""

    def __init__(self) -> None:
        self.is_greeted = False
        self.identity: bytes | None = None  # of the other end, once it is ready; empty: it gave none
        self._rest = bytearray()
        self._needed = GREETING_BYTES  # bytes of what is not complete, as far as they are known
        self._is_in_parts = False

    def take(self, data: bytes) -> list[bytes]:
        """The messages of one frame that `data` completes; others are passed over. Raises ZmtpError."""
        if self._rest or len(data) < self._needed:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            all_of_it, self._rest = memoryview(self._rest), bytearray()
        else:
            all_of_it = memoryview(data)
        at = 0
        if not self.is_greeted:
            _check_greeting(bytes(all_of_it[:GREETING_BYTES]))
            self.is_greeted, at = True, GREETING_BYTES
        messages: list[bytes] = []
        while (body := self._frame_at(all_of_it, at)) is not None:
            flags = all_of_it[at]
            at = body.stop
            if flags & _COMMAND:
                self._obey(bytes(all_of_it[body]))
            elif self.identity is None:
                raise ZmtpError("a message before READY")
            elif flags & _MORE or self._is_in_parts:
                self._is_in_parts = bool(flags & _MORE)
            else:
                messages.append(bytes(all_of_it[body]))
        self._rest += all_of_it[at:]
        return messages

    def _frame_at(self, data: memoryview, at: int) -> slice | None:
        """Where the body of the frame at `at` is; None: it is not complete. Raises ZmtpError."""
        left = len(data) - at
        is_long = left > 0 and data[at] & _LONG
        head = 9 if is_long else 2
        if left < head:
            self._needed = head
            return None
        flags = data[at]
        size = int.from_bytes(data[at + 1 : at + head], "big")
        most = MAX_READY_BYTES if self.identity is None else MAX_MESSAGE_BYTES
        if flags > _MORE | _LONG | _COMMAND or size > most:
            raise ZmtpError(f"a frame of flags {flags} and {size} bytes")
        if left < head + size:
            self._needed = head + size
            return None
        return slice(at + head, at + head + size)

    def _obey(self, body: bytes) -> None:
        """A command. Those that NULL security does not know are passed over, as the specification wants."""
        if not body.startswith(_READY) or self.identity is not None:
            return
        self.identity = b""
        at = len(_READY)
        while at < len(body):
            name = body[at + 1 : at + 1 + body[at]]
            at += 1 + len(name)
            size = int.from_bytes(body[at : at + 4], "big")
            value = body[at + 4 : at + 4 + size]
            at += 4 + size
            if len(value) < size:
                raise ZmtpError("a READY that is cut off")
            if name.lower() == b"identity":
                self.identity = value
        if len(self.identity) > MAX_IDENTITY_BYTES:
            raise ZmtpError(f"an identity of {len(self.identity)} bytes")


def _check_greeting(data: bytes) -> None:
    if data[0] != 0xFF or not data[9] & 1 or data[_MAJOR] < 3:
        raise ZmtpError("no greeting of ZMTP 3")
    if data[_MECHANISM] != GREETING[_MECHANISM]:
        raise ZmtpError(f"wants the mechanism {data[_MECHANISM].rstrip(bytes(1))!r}")
