"""The sockets of one link: a DEALER for commands and steps, and a SUB for page feeds.

Owns them from one open() to the next close(); both may come again. Sending never waits. To a worker of this
host the DEALER is ours (dealer.py), to another one libzmq's, with a monitor. Knows no messages.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from service.fleet.dealer import Dealer
from service.fleet.seam import EVENTS, SeamClient
from service.fleet.socket_reader import SocketReader

SEND_QUEUE = 10_000  # messages; a full queue is a lost worker, never a wait
SEND_QUEUE_BYTES = 64 << 20  # the same on one host, where they are counted by size
CONNECT_MS, HANDSHAKE_MS = 2_000, 5_000  # of one try: after a partition TCP alone would wait a minute longer
IPC = "ipc://"
Context = zmq.Context["zmq.Socket[bytes]"]


class EngineSocket(Protocol):
    """What a link needs of a DEALER."""

    def send(self, message: bytes) -> bool:
        """Puts a message in the queue; False: that is full."""
        ...

    def close(self, linger_ms: int = 0) -> None:
        """Frees it."""
        ...


class ZmqDealer:
    """libzmq's, for workers of other hosts: it may encrypt. Its monitor tells why a connection is over."""

    def __init__(
        self,
        address: str,
        *,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        identity: bytes,
        seam: SeamClient,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._seam = seam
        self._on_end = on_end
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        dealer.setsockopt(zmq.RCVHWM, SEND_QUEUE)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 250)  # a worker that has just begun to listen is found soon
        seam.prepare(dealer)
        try:
            monitor = dealer.get_monitor_socket(EVENTS)
        except zmq.ZMQError:
            dealer.close()
            raise
        self._dealer = SocketReader(loop, dealer, lambda frames: on_message(frames[0]))
        self._monitor = SocketReader(loop, monitor, self._hear)
        _connect(dealer, address)

    def send(self, message: bytes) -> bool:
        """Puts a message in the queue; False: that is full."""
        try:
            self._dealer.socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may have consumed the edge that announced a message (api.md 8).
        self._dealer.drain_soon()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Frees both."""
        self._monitor.stop()
        self._dealer.socket.disable_monitor()
        self._monitor.close(linger_ms)
        self._dealer.close(linger_ms)

    def _hear(self, frames: list[bytes]) -> None:
        if why := self._seam.hear(parse_monitor_message(frames)):
            self._on_end(why)


class LinkSockets:
    """`on_message` gets what comes on the DEALER, `on_feed` topic and payload, `on_end` why it is over."""

    def __init__(
        self,
        address: str,
        *,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        identity: str,
        seam: SeamClient,
        on_message: Callable[[bytes], None],
        on_feed: Callable[[bytes, bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._address = address
        self._context = context
        self._loop = loop
        self._identity = identity.encode()
        self._seam = seam
        self._on_message = on_message
        self._on_feed = on_feed
        self._on_end = on_end
        self._engine: EngineSocket | None = None
        self._pages: SocketReader | None = None
        self._topics: set[bytes] = set()

    @property
    def is_open(self) -> bool:
        """Between open() and close()."""
        return self._engine is not None

    def open(self, first: bytes) -> None:
        """Starts to connect, with a first message; returns at once. Raises OSError: no socket is left."""
        assert self._engine is None, "open already"
        try:
            self._engine = self._engine_socket()
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        self._engine.send(first)

    def _engine_socket(self) -> EngineSocket:
        if self._address.startswith(IPC):
            return Dealer(
                self._address.removeprefix(IPC),
                loop=self._loop,
                identity=self._identity,
                limit_bytes=SEND_QUEUE_BYTES,
                on_message=self._on_message,
                on_end=self._on_end,
            )
        return ZmqDealer(
            self._address,
            context=self._context,
            loop=self._loop,
            identity=self._identity,
            seam=self._seam,
            on_message=self._on_message,
            on_end=self._on_end,
        )

    def send(self, frame: bytes) -> bool:
        """Puts a message in the queue; False: that is full."""
        assert self._engine is not None, "not open"
        return self._engine.send(frame)

    def open_pages(self, address: str) -> None:
        """Connects to the page feeds, at an address as the worker tells it."""
        pages = self._context.socket(zmq.SUB)
        pages.setsockopt(zmq.LINGER, 0)
        for topic in self._topics:
            pages.setsockopt(zmq.SUBSCRIBE, topic)
        self._seam.prepare(pages)
        _connect(pages, _reachable(address, self._address))
        self._pages = SocketReader(self._loop, pages, self._take_feed)

    def subscribe(self, topic: bytes) -> None:
        """Wants a topic of the feeds, now and after the next open_pages()."""
        if topic not in self._topics:
            self._topics.add(topic)
            if self._pages is not None:
                self._pages.socket.setsockopt(zmq.SUBSCRIBE, topic)

    def unsubscribe(self, topic: bytes) -> None:
        """Takes subscribe() back."""
        if topic in self._topics:
            self._topics.remove(topic)
            if self._pages is not None:
                self._pages.socket.setsockopt(zmq.UNSUBSCRIBE, topic)

    def close(self, linger_ms: int = 0) -> None:
        """Frees them. Idempotent."""
        for socket in (self._engine, self._pages):
            if socket is not None:
                socket.close(linger_ms)
        self._engine = self._pages = None

    def _take_feed(self, frames: list[bytes]) -> None:
        if len(frames) == 2:
            self._on_feed(frames[0], frames[1])


def _connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Without the option libzmq takes [v6]:port without a word, and never connects."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


def _reachable(pages_address: str, engine_address: str) -> str:
    """The pages address as seen from here: a worker that binds all interfaces names none."""
    for anywhere in ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"):
        if pages_address.startswith(anywhere) and engine_address.startswith("tcp://"):
            host = engine_address.removeprefix("tcp://").rpartition(":")[0]
            return f"tcp://{host}:{pages_address.rpartition(':')[2]}"
    return pages_address
