"""The link's own ZMTP: beside a ROUTER of libzmq what a DEALER of it would be, and what ends a connection."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from struct import pack

import pytest
import zmq

from service.fleet import ipc_stream
from service.fleet.ipc_stream import IpcStream, path_of

WAIT_SECONDS = 60.0  # only ends a test that hangs
MAX_BYTES = 1 << 20
GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL").ljust(64, b"\0")
READY = b"\x04\x06\x05READY"


class End:
    """A stream with what came of it."""

    def __init__(self, address: str, *, max_queued: int = 100) -> None:
        self.got: list[list[bytes]] = []
        self.ends: list[str] = []
        self.stream = IpcStream(
            address,
            loop=asyncio.get_running_loop(),
            identity=b"service",
            max_queued=max_queued,
            max_message_bytes=MAX_BYTES,
            on_frames=self.got.append,
            on_end=self.ends.append,
        )
        self.stream.open()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


def router_at(address: str) -> "zmq.Socket[bytes]":
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind(address)
    return router


async def received(router: "zmq.Socket[bytes]", count: int) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while len(messages) < count:
            if router.poll(0):
                messages.append(router.recv_multipart())
            else:
                await asyncio.sleep(0.001)
    return messages


def beside_router(work: Callable[["zmq.Socket[bytes]", str], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        address = f"ipc://{folder}/engine"
        router = router_at(address)
        try:
            await work(router, address)
        finally:
            router.close()

    asyncio.run(run())


def test_messages_of_all_sizes_go_both_ways_whole_and_in_order(tmp_path: Path) -> None:
    async def work(router: "zmq.Socket[bytes]", address: str) -> None:
        end = End(address)
        sent = [bytes([size % 251]) * size for size in (0, 1, 255, 256, 257, 70_000, 300_000, 3)]
        for message in sent:
            assert end.stream.send(message)
        assert await received(router, len(sent)) == [[b"service", message] for message in sent]
        for message in sent:
            router.send_multipart((b"service", message))
        router.send_multipart((b"service", b"two", b"", b"parts"))
        await until(lambda: len(end.got) > len(sent))
        assert end.got == [*([message] for message in sent), [b"two", b"", b"parts"]]
        end.stream.close()
        assert not end.ends

    beside_router(work, tmp_path)


def test_a_worker_that_listens_later_gets_what_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_stream, "RETRY_SECONDS", 0.001)

    async def run() -> None:
        address = f"ipc://{tmp_path}/engine"
        end = End(address, max_queued=2)
        assert end.stream.send(b"hello")
        assert end.stream.send(b"again")
        assert not end.stream.send(b"one too many")
        await asyncio.sleep(0)
        router = router_at(address)
        assert await received(router, 2) == [[b"service", b"hello"], [b"service", b"again"]]
        assert end.stream.send(b"there is room")
        assert await received(router, 1) == [[b"service", b"there is room"]]
        end.stream.close()
        router.close()

    asyncio.run(run())


def test_a_worker_that_goes_is_told_once_behind_its_last_words(tmp_path: Path) -> None:
    async def work(router: "zmq.Socket[bytes]", address: str) -> None:
        end = End(address)
        end.stream.send(b"hello")
        await received(router, 1)
        router.send_multipart((b"service", b"last words"))
        router.close(linger=10_000)
        await until(lambda: end.ends)
        assert end.got == [[b"last words"]]
        assert end.ends == ["closed the connection"]
        end.stream.close()

    beside_router(work, tmp_path)


def test_a_second_of_the_same_name_takes_it_over(tmp_path: Path) -> None:
    async def work(router: "zmq.Socket[bytes]", address: str) -> None:
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        first = End(address)
        first.stream.send(b"first")
        await received(router, 1)
        second = End(address)
        second.stream.send(b"second")
        await received(router, 1)
        router.send_multipart((b"service", b"to the last"))
        await until(lambda: second.got)
        assert not first.got
        for end in (first, second):
            end.stream.close()

    beside_router(work, tmp_path)


# A worker of the test's own


class Peer:
    """Listens, and says what a test wants it to."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/peer"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/peer")
        self._listener.listen(1)
        self._listener.setblocking(False)
        self.socket: socket.socket | None = None

    async def accept(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_SECONDS):
            made, _ = await loop.sock_accept(self._listener)
        made.setblocking(False)
        self.socket = made
        return made

    async def say(self, data: bytes) -> None:
        assert self.socket is not None
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def hear(self, size: int) -> bytes:
        assert self.socket is not None
        data = b""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(data) < size:
                part = await asyncio.get_running_loop().sock_recv(self.socket, size - len(data))
                assert part, "the stream left"
                data += part
        return data

    def close(self) -> None:
        self._listener.close()
        if self.socket is not None:
            self.socket.close()


def beside_peer(work: Callable[[Peer, End], Awaitable[None]], folder: Path, *, max_queued: int = 100) -> None:
    async def run() -> None:
        peer = Peer(folder)
        end = End(peer.address, max_queued=max_queued)
        try:
            await peer.accept()
            await work(peer, end)
        finally:
            end.stream.close()
            peer.close()

    asyncio.run(run())


def message(body: bytes, flags: int = 0) -> bytes:
    return pack(">BB", flags, len(body)) + body


def test_what_comes_byte_by_byte_is_the_same(tmp_path: Path) -> None:
    long = pack(">BQ", 2, 300) + b"x" * 300

    async def work(peer: Peer, end: End) -> None:
        for byte in GREETING + READY + message(b"a", 1) + message(b"b") + long:
            await peer.say(bytes((byte,)))
            await asyncio.sleep(0)
        await until(lambda: len(end.got) == 2)
        assert end.got == [[b"a", b"b"], [b"x" * 300]]
        assert not end.ends

    beside_peer(work, tmp_path)


def test_nothing_is_sent_before_the_other_side_is_ready_and_a_ping_is_answered(tmp_path: Path) -> None:
    async def work(peer: Peer, end: End) -> None:
        end.stream.send(b"waits")
        hello = await peer.hear(64 + 2 + 6)
        assert hello[:64] == GREETING
        rest = await peer.hear(hello[65] - 6)
        assert (hello + rest)[66:] == (
            b"\x05READY" + b"\x0bSocket-Type" + pack(">I", 6) + b"DEALER" + b"\x08Identity" + pack(">I", 7)
        ) + b"service"
        await peer.say(GREETING)
        await peer.say(READY)
        assert await peer.hear(7) == message(b"waits")
        await peer.say(message(b"\x04PING\x00\x0acontext", 4))
        assert await peer.hear(14) == message(b"\x04PONGcontext", 4)

    beside_peer(work, tmp_path)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400 Bad Request".ljust(64), "handshake failed"),
        (GREETING[:12] + b"CURVE".ljust(52, b"\0"), "handshake failed"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "handshake failed"),
        (GREETING + message(b"too early"), "handshake failed"),
        (GREETING + message(b"\x05ERROR\x02no", 4), "handshake failed"),
        (GREETING + READY + pack(">BQ", 2, MAX_BYTES + 1), f"a message of {MAX_BYTES + 1} bytes"),
    ],
)
def test_what_is_not_zmtp_ends_it_with_the_reason(tmp_path: Path, said: bytes, why: str) -> None:
    async def work(peer: Peer, end: End) -> None:
        await peer.say(said)
        await until(lambda: end.ends)
        assert len(end.ends) == 1
        assert why in end.ends[0]
        assert not end.got
        assert end.stream.send(b"nobody hears it")  # as to a worker that is not there

    beside_peer(work, tmp_path)


def test_a_worker_that_does_not_read_fills_the_queue_and_loses_nothing(tmp_path: Path) -> None:
    async def work(peer: Peer, end: End) -> None:
        await peer.say(GREETING + READY)
        hello = 64 + 2 + (await peer.hear(64 + 2))[65]
        await peer.hear(hello - 66)
        count, body = 0, b"y" * 100_000
        await until(lambda: end.stream._is_ready)
        while end.stream.send(body):
            count += 1
            assert count < 1000, "the queue has no bound"
        assert count > 5
        for _ in range(count):
            assert await peer.hear(len(body) + 9) == pack(">BQ", 2, len(body)) + body
        assert end.stream.send(b"room")
        assert await peer.hear(6) == message(b"room")

    beside_peer(work, tmp_path, max_queued=5)


def test_who_closes_it_while_reading_gets_nothing_more(tmp_path: Path) -> None:
    async def work(peer: Peer, end: End) -> None:
        def take(frames: list[bytes]) -> None:
            end.got.append(frames)
            end.stream.close()

        end.stream._on_frames = take
        await peer.say(GREETING + READY + message(b"first") + message(b"second"))
        await until(lambda: end.got)
        await asyncio.sleep(0)
        assert end.got == [[b"first"]]
        assert not end.ends

    beside_peer(work, tmp_path)


def test_an_address_is_a_path_or_a_name_without_a_file() -> None:
    assert path_of("ipc:///run/engine") == "/run/engine"
    assert path_of("ipc://@kvatlas") == "\0kvatlas"
