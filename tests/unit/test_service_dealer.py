"""The service's DEALER to a worker of its host, with libzmq's ROUTER and bare sockets at the other end."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from kvatlas import zmtp
from service.fleet import dealer as dealer_module
from service.fleet.dealer import Dealer

WAIT_SECONDS = 60.0  # only ends a test that hangs


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not is_so():
            await asyncio.sleep(0.005)


class Ends:
    """A dealer on the running loop, and what it tells."""

    def __init__(self, path: Path, limit_bytes: int = 1 << 20) -> None:
        self.came: list[bytes] = []
        self.whys: list[str] = []
        self.dealer = Dealer(
            str(path),
            loop=asyncio.get_running_loop(),
            identity=b"service-a",
            limit_bytes=limit_bytes,
            on_message=self.came.append,
            on_end=self.whys.append,
        )

    def close(self) -> None:
        self.dealer.close()


async def accepted(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    return connection


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_what_is_sent_before_a_worker_listens_is_what_it_hears_first(tmp_path: Path) -> None:
    async def talk() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context.socket(zmq.ROUTER) as router, closing(Ends(tmp_path / "s")) as ends:
            assert ends.dealer.send(b"hello")
            assert ends.dealer.send(b"more")
            await asyncio.sleep(2 * dealer_module.RETRY_SECONDS)
            router.bind(f"ipc://{tmp_path}/s")
            heard: list[list[bytes]] = []
            while len(heard) < 2:
                await until(lambda: router.poll(0))
                heard.append(router.recv_multipart())
            assert heard == [[b"service-a", b"hello"], [b"service-a", b"more"]]
            answers = [b"", b"x" * 255, b"y" * 1_000_000, b"last"]
            for answer in answers:
                router.send_multipart([b"service-a", answer])
            await until(lambda: len(ends.came) == len(answers))
            assert ends.came == answers
            assert ends.whys == []
        context.term()

    run(talk())


def test_a_connection_that_is_there_only_after_close_is_ended(tmp_path: Path) -> None:
    """close() can come between the connection and the transport's first call."""

    class Transport:
        ended, written = 0, b""

        def abort(self) -> None:
            self.ended += 1

        def write(self, data: bytes) -> None:
            self.written += data

    async def talk() -> None:
        ends, transport = Ends(tmp_path / "s"), Transport()
        ends.close()
        ends.dealer.connection_made(transport)
        assert (transport.ended, transport.written) == (1, b"")
        assert ends.whys == []

    run(talk())


@pytest.mark.parametrize("said", [b"", zmtp.GREETING + zmtp.ready("ROUTER")])
def test_a_worker_that_closes_is_told_once(tmp_path: Path, said: bytes) -> None:
    async def talk() -> None:
        with listening(tmp_path / "s") as listener, closing(Ends(tmp_path / "s")) as ends:
            with await accepted(listener) as connection:
                connection.send(said)
            await until(lambda: ends.whys)
            await asyncio.sleep(0.05)
            assert ends.whys == ["closed the connection"]

    run(talk())


def test_what_is_no_zmtp_ends_it(tmp_path: Path) -> None:
    async def talk() -> None:
        with listening(tmp_path / "s") as listener, closing(Ends(tmp_path / "s")) as ends:
            with await accepted(listener) as connection:
                connection.send(b"HTTP/1.1 400 Bad Request\r\n".ljust(64))
                await until(lambda: ends.whys)
            assert ends.whys[0].startswith("does not speak our protocol: no greeting")

    run(talk())


def test_a_worker_that_does_not_read_fills_the_queue_and_gets_all_of_it_when_it_does(tmp_path: Path) -> None:
    async def talk() -> None:
        with (
            listening(tmp_path / "s") as listener,
            closing(Ends(tmp_path / "s", 5_000_000)) as ends,
            await accepted(listener) as connection,
        ):
            connection.send(zmtp.GREETING + zmtp.ready("ROUTER"))
            large, sent = bytes(2_000_000), 1
            while ends.dealer.send(large):
                sent += 1
                await asyncio.sleep(0.01)
            assert 3 <= sent <= 4  # the kernel takes less than one of them
            reader, heard = zmtp.Reader(), list[bytes]()
            connection.setblocking(False)

            def has_all() -> bool:
                with suppress(BlockingIOError):
                    heard.extend(reader.take(connection.recv(1 << 20)))
                return len(heard) == sent

            await until(has_all)
            assert reader.identity == b"service-a"
            assert all(message == large for message in heard)
            assert ends.dealer.send(b"again")

    run(talk())


def test_what_was_sent_arrives_though_it_is_closed_at_once(tmp_path: Path) -> None:
    async def talk() -> None:
        with (
            listening(tmp_path / "s") as listener,
            closing(Ends(tmp_path / "s")) as ends,
            await accepted(listener) as connection,
        ):
            connection.send(zmtp.GREETING + zmtp.ready("ROUTER"))
            reader, heard = zmtp.Reader(), list[bytes]()
            connection.setblocking(False)

            def is_ready() -> bool:
                with suppress(BlockingIOError):
                    heard.extend(reader.take(connection.recv(1 << 20)))
                return reader.identity is not None

            await until(is_ready)
            ends.dealer.send(b"goodbye")
            ends.dealer.close(linger_ms=int(WAIT_SECONDS * 1000))
            loop = asyncio.get_running_loop()
            while data := await loop.sock_recv(connection, 1 << 16):
                heard.extend(reader.take(data))
            assert heard == [b"goodbye"]
            assert ends.whys == []

    run(talk())


def test_a_close_waits_no_longer_for_a_worker_that_does_not_read_than_it_may(tmp_path: Path) -> None:
    async def talk() -> None:
        with (
            listening(tmp_path / "s") as listener,
            closing(Ends(tmp_path / "s", 100_000_000)) as ends,
            await accepted(listener) as connection,
        ):
            connection.send(zmtp.GREETING + zmtp.ready("ROUTER"))
            await until(lambda: ends.dealer._reader.is_greeted)
            size, came = 20_000_000, 0
            assert ends.dealer.send(bytes(size))
            ends.dealer.close(linger_ms=1)
            await asyncio.sleep(0.05)  # the loop has ended it by then
            loop = asyncio.get_running_loop()
            while data := await loop.sock_recv(connection, 1 << 20):
                came += len(data)
            assert came < size

    run(talk())


def test_nothing_is_sent_behind_the_end(tmp_path: Path) -> None:
    async def talk() -> None:
        with listening(tmp_path / "s") as listener, closing(Ends(tmp_path / "s")) as ends:
            with await accepted(listener) as connection:
                connection.send(zmtp.GREETING + zmtp.ready("ROUTER"))
                await until(lambda: ends.dealer._reader.is_greeted)
            await until(lambda: ends.whys)
            assert not ends.dealer.send(b"late")

    run(talk())


def test_what_waits_for_a_worker_to_listen_has_a_limit(tmp_path: Path) -> None:
    async def talk() -> None:
        with closing(Ends(tmp_path / "s", limit_bytes=100)) as ends:
            assert ends.dealer.send(b"hello")
            assert not ends.dealer.send(bytes(200))

    run(talk())


def test_who_closes_on_a_message_gets_none_of_those_behind_it(tmp_path: Path) -> None:
    async def talk() -> None:
        with listening(tmp_path / "s") as listener, closing(Ends(tmp_path / "s")) as ends:
            came: list[bytes] = []

            def take(message: bytes) -> None:
                came.append(message)
                ends.dealer.close()

            ends.dealer._on_message = take
            with await accepted(listener) as connection:
                two = zmtp.frame(b"first") + zmtp.frame(b"second")
                connection.send(zmtp.GREETING + zmtp.ready("ROUTER") + two)
                await until(lambda: came)
                await asyncio.sleep(0)
            assert came == [b"first"]
            assert ends.whys == []

    run(talk())


def test_a_close_ends_the_search_for_a_worker(tmp_path: Path) -> None:
    async def talk() -> None:
        ends = Ends(tmp_path / "s")
        ends.close()
        with listening(tmp_path / "s") as listener:
            listener.settimeout(0)
            await asyncio.sleep(3 * dealer_module.RETRY_SECONDS)
            with pytest.raises(BlockingIOError):
                listener.accept()

    run(talk())
