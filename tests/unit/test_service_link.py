"""What a service's link says in the log of a worker that is lost, or was never there; whom it reaches."""

import asyncio
import logging
from typing import Any

import pytest
import zmq

from kvatlas.worker.v1 import worker_pb2
from service.fleet import link as link_module
from service.fleet.link import WorkerLink
from service.fleet.link_sockets import LinkSockets
from service.fleet.seam import SeamClient
from service.request import LostReason

WAIT_SECONDS = 60.0  # only ends a test that hangs


class Sockets:
    """Of LinkSockets, without a socket."""

    def __init__(self, address: str, **_: Any) -> None:
        self.is_open = False
        self.is_full = False
        self.sent: list[str] = []  # kinds of messages

    def open(self, first: bytes) -> None:
        self.is_open = True

    def close(self, linger_ms: int = 0) -> None:
        self.is_open = False

    def send(self, frame: bytes) -> bool:
        self.sent.append(worker_pb2.ServiceMessage.FromString(frame).WhichOneof("kind") or "")
        return not self.is_full


class Listener:
    """What a link told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def link_welcomed(self, link: WorkerLink) -> None:
        self.told.append("welcomed")

    def link_beat(self, link: WorkerLink) -> None:
        self.told.append("beat")

    def link_lost(self, link: WorkerLink, reason: LostReason) -> None:
        self.told.append(f"lost by {reason.value}")

    def link_fed(self, link: WorkerLink, topic: bytes, payload: bytes) -> None:
        self.told.append("fed")

    def link_removed(self, link: WorkerLink) -> None:
        self.told.append("removed")


def welcome(number: int) -> bytes:
    config = worker_pb2.Config()
    config.worker.worker_id = "w"
    return worker_pb2.WorkerMessage(number=number, config=config).SerializeToString()


def beat(number: int) -> bytes:
    message = worker_pb2.WorkerMessage(number=number, heartbeat=worker_pb2.Heartbeat())
    return message.SerializeToString()


def welcomed_link() -> tuple[WorkerLink, Sockets, Listener]:
    link, listener = link_on(asyncio.get_running_loop()), Listener()
    link.listeners.append(listener)
    link.open()
    link._on_encoded(welcome(1))
    sockets = link._sockets
    assert isinstance(sockets, Sockets)
    return link, sockets, listener


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "service.link"]


def link_on(
    loop: asyncio.AbstractEventLoop,
    address: str = "ipc:///nowhere",
    context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
) -> WorkerLink:
    return WorkerLink(
        address,
        context=context or zmq.Context.instance(),
        loop=loop,
        instance_id="s",
        service_epoch=1,
        version="",
        seam=SeamClient(address, None, loop.time, lambda why: None),
    )


async def until_absent(caplog: pytest.LogCaptureFixture) -> None:
    link = link_on(asyncio.get_running_loop())
    link.open()
    async with asyncio.timeout(WAIT_SECONDS):
        while len(messages(caplog)) < 2:
            await asyncio.sleep(0.01)
    link.close()


def test_a_worker_that_has_not_said_anything_yet_is_absent_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start may take longer than a Hello waits; it is said once, then only for who looks closely."""
    monkeypatch.setattr(link_module, "LinkSockets", Sockets)
    monkeypatch.setattr(link_module, "HELLO_SECONDS", 0.01)
    caplog.set_level(logging.DEBUG, "service.link")
    asyncio.run(until_absent(caplog))
    first, second = [record for record in caplog.records if record.name == "service.link"][:2]
    assert first.getMessage().startswith("event=worker_absent worker=ipc:///nowhere")
    assert "no answer to Hello" in first.getMessage()
    assert (first.levelno, second.levelno) == (logging.WARNING, logging.DEBUG)


def test_a_worker_that_was_there_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "LinkSockets", Sockets)

    async def lose() -> None:
        link = link_on(asyncio.get_running_loop())
        link.open()
        link.is_up = True
        link._lose(LostReason.CRASH, "gone")
        link.close()

    asyncio.run(lose())
    assert messages(caplog)[0].startswith("event=worker_lost worker=ipc:///nowhere reason=crash")


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_link_that_finds_no_socket_left_is_tried_again(
    num_free: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The try that found none was the last one: its worker stayed lost when there were sockets again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8)
    held = [context.socket(zmq.DEALER) for _ in range(8 - num_free)]

    async def scenario() -> None:
        link = link_on(asyncio.get_running_loop(), "tcp://127.0.0.1:1", context)
        link.open()
        assert not link._sockets.is_open
        for socket in held:
            socket.close()
        async with asyncio.timeout(WAIT_SECONDS):
            while not link._sockets.is_open:
                await asyncio.sleep(0.01)
        link.close()

    asyncio.run(scenario())
    context.term()  # would wait for a socket that is open
    assert "cannot connect: Too many open files" in messages(caplog)[0]


def test_a_worker_at_an_ipv6_address_is_reached() -> None:
    """What `dns://` finds of a name that has no other addresses: the link was opened and never connected."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, feeds = context.socket(zmq.ROUTER), context.socket(zmq.XPUB)
    for socket in (router, feeds):
        socket.set(zmq.IPV6, 1)
    ports = [router.bind_to_random_port("tcp://[::1]"), feeds.bind_to_random_port("tcp://[::]")]

    async def connect() -> tuple[list[bytes], bytes]:
        address = f"tcp://[::1]:{ports[0]}"
        sockets = LinkSockets(
            address,
            context=context,
            loop=asyncio.get_running_loop(),
            identity="me",
            seam=SeamClient(address, None, lambda: 0.0, lambda reason: None),
            on_message=lambda message: None,
            on_feed=lambda topic, payload: None,
            on_end=lambda why: None,
        )
        sockets.open(b"hello")
        sockets.subscribe(b"topic")
        sockets.open_pages(f"tcp://[::]:{ports[1]}")
        try:
            assert router.poll(WAIT_SECONDS * 1000)
            assert feeds.poll(WAIT_SECONDS * 1000)
            return router.recv_multipart(), feeds.recv()
        finally:
            sockets.close()

    try:
        assert asyncio.run(connect()) == ([b"me", b"hello"], b"\x01topic")
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (beat(3), "message 3 came instead of 2"),
        (beat(1), "message 1 came instead of 2"),
        (welcome(2), "welcomed this service twice"),
        (b"\xff", "sent a message that cannot be used"),
        (worker_pb2.WorkerMessage(number=2).SerializeToString(), "sent a message that cannot be used"),
    ],
)
def test_a_message_that_cannot_come_costs_the_connection(
    message: bytes, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "LinkSockets", Sockets)

    async def scenario() -> None:
        link, sockets, listener = welcomed_link()
        link._on_encoded(message)
        assert (link.is_up, sockets.is_open) == (False, False)
        link._on_encoded(beat(2))  # of the life that is over
        assert listener.told == ["welcomed", "lost by partition"]
        link.close()

    asyncio.run(scenario())
    assert f"event=worker_lost worker=w reason=partition why={why!r}" in " ".join(messages(caplog))


def test_messages_in_order_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "LinkSockets", Sockets)

    async def scenario() -> None:
        link, _, listener = welcomed_link()
        for number in (2, 3):
            link.beat_time = 0.0
            link._on_encoded(beat(number))
            assert link.beat_time > 0.0
        assert listener.told == ["welcomed", "beat", "beat"]
        link.close()

    asyncio.run(scenario())


def test_a_worker_that_is_silent_or_takes_nothing_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of this process its signs of life are still in the socket, so it is not lost at once."""
    monkeypatch.setattr(link_module, "LinkSockets", Sockets)

    async def scenario() -> None:
        link, sockets, listener = welcomed_link()
        now = asyncio.get_running_loop().time()
        link.beat_time, link._last_tick = now - 1000.0, now - 1000.0
        link._tick()
        assert link.is_up
        link._last_tick = now + 1000.0  # as if it had been a moment ago, however slow this machine is
        link._tick()
        assert (link.is_up, listener.told) == (False, ["welcomed", "lost by partition"])
        link.close()
        link, sockets, listener = welcomed_link()
        sockets.is_full, link._last_sent_beat = True, 0.0
        link._tick()
        assert (link.is_up, listener.told) == (False, ["welcomed", "lost by partition"])
        link.close()

    asyncio.run(scenario())


def test_a_service_that_ends_says_goodbye_and_one_that_has_another_way_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "LinkSockets", Sockets)

    async def scenario() -> None:
        link, sockets, _ = welcomed_link()
        link.close()
        link.close()
        assert sockets.sent.count("goodbye") == 1
        link, sockets, _ = welcomed_link()
        link.retire()
        assert (sockets.sent.count("goodbye"), link.is_up, link.facts) == (0, False, None)

    asyncio.run(scenario())
