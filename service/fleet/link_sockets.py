"""The sockets of one link: a DEALER for commands and steps, its monitor, and a SUB for page feeds.

Owns them from one open() to the next close(); both may come again. Sending only appends to a queue.
Knows no messages.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from service.fleet.seam import EVENTS, SeamClient
from service.fleet.socket_reader import SocketReader

SEND_QUEUE = 10_000  # messages; a full queue is a lost worker, never a wait
CONNECT_MS, HANDSHAKE_MS = 2_000, 5_000  # of one try: after a partition TCP alone would wait a minute longer
Context = zmq.Context["zmq.Socket[bytes]"]


class LinkSockets:
    """`on_frames` gets what comes on the DEALER, `on_feed` topic and payload, `on_end` why it is over."""

    def __init__(
        self,
        address: str,
        *,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        identity: str,
        seam: SeamClient,
        on_frames: Callable[[list[bytes]], None],
        on_feed: Callable[[bytes, bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._address = address
        self._context = context
        self._loop = loop
        self._identity = identity.encode()
        self._seam = seam
        self._on_frames = on_frames
        self._on_feed = on_feed
        self._on_end = on_end
        self._engine: SocketReader | None = None
        self._monitor: SocketReader | None = None
        self._pages: SocketReader | None = None
        self._topics: set[bytes] = set()

    @property
    def is_open(self) -> bool:
        """Between open() and close()."""
        return self._engine is not None

    def open(self, first: bytes) -> None:
        """Starts to connect, with a first message; returns at once."""
        assert self._engine is None, "open already"
        engine = self._context.socket(zmq.DEALER)
        engine.setsockopt(zmq.ROUTING_ID, self._identity)
        engine.setsockopt(zmq.LINGER, 0)
        engine.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        engine.setsockopt(zmq.RCVHWM, SEND_QUEUE)
        engine.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        engine.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        engine.setsockopt(zmq.RECONNECT_IVL, 100)
        engine.setsockopt(zmq.RECONNECT_IVL_MAX, 250)  # a worker that has just begun to listen is found soon
        self._seam.prepare(engine)
        monitor = engine.get_monitor_socket(EVENTS)
        self._engine = SocketReader(self._loop, engine, self._on_frames)
        self._monitor = SocketReader(self._loop, monitor, self._hear)
        engine.connect(self._address)
        engine.send(first, zmq.NOBLOCK)
        self._engine.drain_soon()

    def send(self, frame: bytes) -> bool:
        """Puts a message in the queue; False: that is full."""
        assert self._engine is not None, "not open"
        try:
            self._engine.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may have consumed the edge that announced a message (api.md 8).
        self._engine.drain_soon()
        return True

    def open_pages(self, address: str) -> None:
        """Connects to the page feeds, at an address as the worker tells it."""
        pages = self._context.socket(zmq.SUB)
        pages.setsockopt(zmq.LINGER, 0)
        for topic in self._topics:
            pages.setsockopt(zmq.SUBSCRIBE, topic)
        self._seam.prepare(pages)
        pages.connect(_reachable(address, self._address))
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
        if self._monitor is not None and self._engine is not None:
            self._monitor.stop()
            self._engine.socket.disable_monitor()
        for reader in (self._monitor, self._engine, self._pages):
            if reader is not None:
                reader.close(linger_ms)
        self._engine = self._monitor = self._pages = None

    def _take_feed(self, frames: list[bytes]) -> None:
        if len(frames) == 2:
            self._on_feed(frames[0], frames[1])

    def _hear(self, frames: list[bytes]) -> None:
        if why := self._seam.hear(parse_monitor_message(frames)):
            self._on_end(why)


def _reachable(pages_address: str, engine_address: str) -> str:
    """The pages address as seen from here: a worker that binds all interfaces names none."""
    for anywhere in ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"):
        if pages_address.startswith(anywhere) and engine_address.startswith("tcp://"):
            host = engine_address.removeprefix("tcp://").rpartition(":")[0]
            return f"tcp://{host}:{pages_address.rpartition(':')[2]}"
    return pages_address
