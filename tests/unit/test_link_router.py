"""The worker's ROUTER for services of its host, with libzmq's DEALERs and bare sockets at the other end."""

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvatlas import zmtp
from tests.router_bench import WAIT_SECONDS, RouterBench
from worker.channels import Wakeup
from worker.link import router as router_module
from worker.link.addresses import AddressError
from worker.link.router import UnixRouter


class Bench(RouterBench):
    """Of this host, with bare sockets, too."""

    router: UnixRouter

    def __init__(self, folder: Path) -> None:
        self.path = folder / "engine"
        wakeup = Wakeup()
        super().__init__(UnixRouter(f"ipc://{self.path}", wakeup.fileno()), wakeup, zmq.Context())
        self.strangers: list[socket.socket] = []

    def stranger(self, first: bytes = b"") -> socket.socket:
        """A bare connection."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(WAIT_SECONDS)
        connection.connect(str(self.path))
        connection.sendall(first)
        self.strangers.append(connection)
        return connection

    def serve_until(self, is_so: Callable[[], bool]) -> None:
        """Looks at the sockets as the link's thread does, though nobody sends anything."""
        end = time.monotonic() + WAIT_SECONDS
        while not is_so():
            assert time.monotonic() < end
            self.router.wait(0.01, reads=True)
            assert self.router.receive() is None

    def close(self) -> None:
        for stranger in self.strangers:
            stranger.close()
        super().close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed it; what it said before does not matter."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_messages_go_both_ways_each_to_its_own(bench: Bench) -> None:
    names = (b"a", b"b" * 200)
    dealers = {name: bench.dealer(name) for name in names}
    for size in (0, 1, 255, 256):
        for name, dealer in dealers.items():
            dealer.send(name * size)
        assert dict(bench.receive() for _ in names) == {name: name * size for name in names}
        for name in names:
            bench.router.send(name, name * (size + 1))
        assert [dealers[name].recv() for name in names] == [name * (size + 1) for name in names]


def test_messages_of_several_frames_are_passed_over(bench: Bench) -> None:
    dealer = bench.dealer(b"a")
    dealer.send_multipart([b"x", b"y"])
    dealer.send(b"z")
    assert bench.receive() == (b"a", b"z")


def test_what_the_socket_does_not_take_waits_and_comes_whole_and_in_order(bench: Bench) -> None:
    reader = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"slow") + zmtp.frame(b"here"))
    assert bench.receive() == (b"slow", b"here")
    messages = [b"first", os.urandom(20 << 20), b"third", b"d" * 1000]
    for message in messages:
        bench.router.send(b"slow", message)
    came, answers = zmtp.Reader(), list[bytes]()
    reader.setblocking(False)

    def has_all() -> bool:
        with suppress(BlockingIOError):
            answers.extend(came.take(reader.recv(1 << 20)))
        return len(answers) == len(messages)

    bench.serve_until(has_all)
    assert answers == messages
    bench.router.send(b"slow", b"after")
    bench.serve_until(
        lambda: len(answers) > len(messages) or bool(answers.extend(came.take(reader.recv(99))))
    )
    assert answers[-1] == b"after"


def test_a_socket_that_took_everything_wakes_nobody(bench: Bench) -> None:
    """It has room all the time from then on: the thread would never sleep again."""
    reader = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a"))
    bench.serve_until(lambda: not bench.refuses(b"a"))
    bench.router.send(b"a", bytes(8_000_000))
    assert bench.router._by_identity[b"a"].held_up
    reader.setblocking(False)

    def is_taken() -> bool:
        with suppress(BlockingIOError):
            while reader.recv(1 << 20):
                pass
        return not bench.router._by_identity[b"a"].held_up

    bench.serve_until(is_taken)
    assert bench.router._poll.poll(0) == []


def test_a_queue_has_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "HIGH_WATER_MARK", 5)
    stuck = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"stuck") + zmtp.frame(b"here"))
    bench.receive()
    bench.router.send(b"stuck", bytes(10 << 20))
    for _ in range(5):
        bench.router.send(b"stuck", b"waits")
    assert bench.refuses(b"stuck") == "its queue is full"
    stuck.sendall(zmtp.frame(b"enough"))
    assert bench.receive() == (b"stuck", b"enough"), "who does not read may speak all the same"


def test_a_queue_of_large_messages_has_an_end_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand messages of a megabyte were ten gigabytes, for one service that asks and does not read."""
    monkeypatch.setattr(router_module, "WAITING_BYTES", 3_000_000)
    reader = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"slow") + zmtp.frame(b"here"))
    bench.receive()
    bench.router.send(b"slow", bytes(10 << 20))
    for _ in range(3):
        bench.router.send(b"slow", bytes(1_000_000))
    assert bench.refuses(b"slow") == "its queue is full"
    reader.setblocking(False)

    def has_room() -> bool:
        with suppress(BlockingIOError):
            reader.recv(1 << 20)
        return bench.refuses(b"slow") == ""

    bench.serve_until(has_room)


def test_who_has_left_is_unreachable(bench: Bench) -> None:
    assert "unreachable" in bench.refuses(b"a")
    dealer = bench.dealer(b"a")
    dealer.send(b"here")
    bench.receive()
    assert bench.refuses(b"a") == ""
    dealer.close()
    bench.serve_until(lambda: "unreachable" in bench.refuses(b"a"))


def test_who_comes_again_takes_its_name_over(bench: Bench) -> None:
    older = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a") + zmtp.frame(b"first"))
    assert bench.receive() == (b"a", b"first")
    newer = bench.dealer(b"a")
    newer.send(b"second")
    assert bench.receive() == (b"a", b"second")
    bench.router.send(b"a", b"to the newer")
    assert newer.recv() == b"to the newer"
    bench.serve_until(lambda: has_ended(older))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n".ljust(64),
        zmtp.GREETING + zmtp.ready("DEALER"),
        zmtp.GREETING + zmtp.ready("DEALER", b"b") + b"\x02" + bytes((0xFF,)) * 8,
    ],
)
def test_a_stranger_loses_its_connection_and_nobody_else_does(bench: Bench, said: bytes) -> None:
    dealer = bench.dealer(b"a")
    dealer.send(b"before")
    assert bench.receive() == (b"a", b"before")
    stranger = bench.stranger(said)
    bench.serve_until(lambda: has_ended(stranger))
    bench.router.send(b"a", b"after")
    assert dealer.recv() == b"after"


def test_connections_that_say_nothing_are_so_many_at_most(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "MAX_CONNECTIONS", 2)
    silent = [bench.stranger() for _ in range(3)]
    bench.serve_until(lambda: has_ended(silent[2]))
    assert not has_ended(silent[0])
    monkeypatch.setattr(router_module, "HANDSHAKE_SECONDS", 0.0)  # whoever speaks takes their places
    dealer = bench.dealer(b"a")
    dealer.send(b"here")
    assert bench.receive() == (b"a", b"here")
    assert [has_ended(one) for one in silent] == [True, True, True]


def test_who_has_said_its_name_keeps_its_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(router_module, "HANDSHAKE_SECONDS", 0.0)
    dealer = bench.dealer(b"a")
    dealer.send(b"here")
    assert bench.receive() == (b"a", b"here")
    late = bench.stranger()
    bench.serve_until(lambda: has_ended(late))
    bench.router.send(b"a", b"still")
    assert dealer.recv() == b"still"


def test_without_descriptors_it_is_deaf_for_a_while_instead_of_busy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "no descriptors")

    class Listener:
        fileno, close, accept = (
            bench.router._listener.fileno,
            bench.router._listener.close,
            staticmethod(fail),
        )

    with monkeypatch.context() as patch:
        patch.setattr(bench.router, "_listener", Listener)
        dealer = bench.dealer(b"a")
        dealer.send(b"here")
        bench.serve_until(lambda: bench.router._listens_at is not None)
        assert bench.router._poll.poll(0) == []
        listens_at = bench.router._listens_at
        bench.router.wait(0.0, reads=True)
        assert bench.router._listens_at == listens_at, "and not at the next look already"
    assert bench.receive() == (b"a", b"here")


@pytest.mark.parametrize("error", [ConnectionAbortedError, BlockingIOError])
def test_a_connection_that_has_gone_before_it_was_accepted_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    real = bench.router._listener

    class Listener:
        num_asked = 0
        fileno, close = real.fileno, real.close

        def accept(self) -> tuple[socket.socket, object]:
            self.num_asked += 1
            if self.num_asked == 1:
                raise error()
            return real.accept()

    listener = Listener()
    monkeypatch.setattr(bench.router, "_listener", listener)
    dealer = bench.dealer(b"a")
    dealer.send(b"here")
    bench.serve_until(lambda: listener.num_asked == 1)
    assert bench.router._listens_at is None, "it hears the next one at once"
    assert bench.receive() == (b"a", b"here")


@pytest.mark.parametrize("reads", [True, False])
def test_a_wait_lasts_until_its_end_or_the_wakeup(bench: Bench, reads: bool) -> None:
    began = time.monotonic()
    bench.router.wait(0.05, reads=reads)
    assert time.monotonic() - began >= 0.05
    bench.wakeup.notify()
    bench.router.wait(WAIT_SECONDS, reads=reads)
    assert time.monotonic() - began < WAIT_SECONDS
    assert bench.router.receive() is None


def test_who_has_gone_while_it_was_held_up_is_dropped_once(bench: Bench) -> None:
    stranger = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a") + zmtp.frame(b"here"))
    bench.receive()
    bench.router.send(b"a", bytes(8_000_000))
    stranger.close()
    bench.router.wait(WAIT_SECONDS, reads=True)
    assert bench.router.receive() is None
    assert bench.refuses(b"a") == "unreachable: it has left"
    assert not bench.router._connections


def test_who_goes_without_a_word_is_dropped_before_and_behind_its_greeting(bench: Bench) -> None:
    bench.stranger().close()
    bench.router.wait(WAIT_SECONDS, reads=True)
    assert bench.router.receive() is None  # accepted, and there is nobody to greet
    assert len(bench.router._connections) == 1
    bench.serve_until(lambda: not bench.router._connections)
    stranger = bench.stranger()
    bench.serve_until(lambda: bool(bench.router._connections))
    stranger.close()  # with the greeting unread: a reset
    bench.serve_until(lambda: not bench.router._connections)


def test_what_a_wait_had_found_of_another_with_that_descriptor_ends_no_connection(bench: Bench) -> None:
    bench.dealer(b"a").send(b"here")
    bench.receive()
    (descriptor,) = bench.router._connections
    bench.router._serve(descriptor, select.EPOLLIN | select.EPOLLOUT)
    assert bench.refuses(b"a") == ""


def test_who_has_gone_unseen_is_dropped_by_what_is_sent_to_it(bench: Bench) -> None:
    stranger = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a"))
    bench.serve_until(lambda: bench.refuses(b"a") == "")
    assert not has_ended(stranger)  # with something unread its end would be another one
    stranger.sendall(zmtp.frame(b"here"))
    stranger.close()
    assert bench.receive() == (b"a", b"here")
    assert bench.refuses(b"a") == f"unreachable: {os.strerror(errno.EPIPE)}"
    assert bench.refuses(b"a") == "unreachable: it has left"
    assert not bench.router._connections


def test_a_wait_ends_with_the_wakeup_and_reads_nothing_if_so_told(bench: Bench) -> None:
    bench.dealer(b"a").send(b"here")
    bench.receive()
    bench.dealers[0].send(b"more")
    bench.wakeup.notify()
    began = time.monotonic()
    bench.router.wait(WAIT_SECONDS, reads=False)
    assert time.monotonic() - began < WAIT_SECONDS
    assert bench.router.receive() is None
    bench.wakeup.clear()
    assert bench.receive() == (b"a", b"more")


def test_a_wait_is_over_while_something_that_was_read_is_not_received(bench: Bench) -> None:
    """As behind a turn that received as much as it may."""
    frames = zmtp.frame(b"first") + zmtp.frame(b"second")
    bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a") + frames)
    assert bench.receive() == (b"a", b"first")
    began = time.monotonic()
    bench.router.wait(WAIT_SECONDS, reads=True)
    assert time.monotonic() - began < WAIT_SECONDS
    assert bench.router.receive() == (b"a", b"second")


def test_what_waits_has_time_to_go_when_it_closes(bench: Bench) -> None:
    bench.stranger()  # for whom nothing waits
    reader = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a") + zmtp.frame(b"here"))
    bench.receive()
    bench.router.send(b"a", bytes(1_000_000))
    bench.router.send(b"a", b"the last")
    closing = threading.Thread(target=bench.router.close, args=(WAIT_SECONDS,))
    closing.start()
    came, rest = b"", b"?"
    while rest:
        rest = reader.recv(1 << 16)
        came += rest
    closing.join(WAIT_SECONDS)
    assert came.endswith(b"the last")


def test_a_close_waits_no_longer_than_it_was_told_and_gives_all_back(tmp_path: Path) -> None:
    wakeup = Wakeup()
    before = len(os.listdir("/proc/self/fd"))
    router = UnixRouter(f"ipc://{tmp_path}/engine", wakeup.fileno())
    with socket.socket(socket.AF_UNIX) as reader:
        reader.connect(str(tmp_path / "engine"))
        reader.sendall(zmtp.GREETING + zmtp.ready("DEALER", b"a") + zmtp.frame(b"here"))
        end = time.monotonic() + WAIT_SECONDS
        while router.receive() is None:
            assert time.monotonic() < end
            router.wait(1.0, reads=True)
        router.send(b"a", bytes(8_000_000))  # more than its buffers take, and it reads nothing
        began = time.monotonic()
        router.close(linger_seconds=0.05)
        assert 0.05 <= time.monotonic() - began < WAIT_SECONDS
    assert len(os.listdir("/proc/self/fd")) == before
    wakeup.close()


def test_what_waits_goes_also_while_nothing_is_read(bench: Bench) -> None:
    reader = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a") + zmtp.frame(b"here"))
    bench.receive()
    bench.router.send(b"a", bytes(1_000_000))
    bench.router.send(b"a", b"the last")
    reader.setblocking(False)
    came, end = b"", time.monotonic() + WAIT_SECONDS
    while not came.endswith(b"the last"):
        assert time.monotonic() < end
        bench.router.wait(0.001, reads=False)
        with suppress(BlockingIOError):
            came += reader.recv(1 << 20)


def test_room_that_was_seen_before_what_waited_had_gone_sends_nothing_twice(bench: Bench) -> None:
    """The engine was behind between a wait and what it had found: the end of a message went out again."""
    reader = bench.stranger(zmtp.GREETING + zmtp.ready("DEALER", b"a") + zmtp.frame(b"here"))
    bench.receive()
    message = os.urandom(1_000_000)
    bench.router.send(b"a", message)
    reader.setblocking(False)
    came, answers = zmtp.Reader(), list[bytes]()

    def read() -> None:
        with suppress(BlockingIOError):
            while data := reader.recv(1 << 20):
                answers.extend(came.take(data))

    read()
    bench.router.wait(WAIT_SECONDS, reads=True)  # there is room again
    connection = bench.router._by_identity[b"a"]
    end = time.monotonic() + WAIT_SECONDS
    while connection.held_up:
        assert time.monotonic() < end
        bench.router.wait(0.0, reads=False)
        read()
    assert len(connection.unsent) == 0, "nothing is kept of what is gone"
    assert bench.router.receive() is None  # what the wait had found
    bench.router.send(b"a", b"after")
    read()
    assert answers == [message, b"after"]


def test_a_path_that_cannot_be_bound_is_said(tmp_path: Path) -> None:
    wakeup = Wakeup()
    with pytest.raises(AddressError, match="ipc://"):
        UnixRouter(f"ipc://{tmp_path}/{'x' * 200}", wakeup.fileno())
    wakeup.close()


def test_a_socket_that_a_dead_worker_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "engine"))
    bench = Bench(tmp_path)
    try:
        bench.dealer(b"a").send(b"here")
        assert bench.receive() == (b"a", b"here")
    finally:
        bench.close()
