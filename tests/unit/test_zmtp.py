"""ZMTP: bytes of libzmq are read as what it sent, however they are cut; what is no ZMTP is refused."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvatlas import zmtp

WAIT_SECONDS = 60.0  # only ends a test that hangs
MESSAGES = [b"", b"a", b"b" * 255, b"c" * 256, bytes(range(256)) * 300, b"last"]
PEER = zmtp.GREETING + zmtp.ready("ROUTER", b"someone")


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def what_libzmq_sends(context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> bytes:
    """All bytes of a DEALER that sends MESSAGES, one of three frames among them."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        listener.listen()
        with context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.ROUTING_ID, b"service-a")
            dealer.connect(f"ipc://{folder}/s")
            for number, message in enumerate(MESSAGES):
                if number == 2:
                    dealer.send_multipart([b"one", b"", b"three"])
                dealer.send(message)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(WAIT_SECONDS)
                connection.sendall(zmtp.GREETING)
                came = b""
                while len(came) < zmtp.GREETING_BYTES:
                    came += connection.recv(1 << 16)
                connection.sendall(zmtp.ready("ROUTER"))
                while not came.endswith(MESSAGES[-1]):
                    came += connection.recv(1 << 16)
    return came


def test_what_libzmq_sends_is_read_however_it_is_cut(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    came = what_libzmq_sends(context, tmp_path)
    draw = random.Random(1)
    for most in (1, 2, 50, 700, 1 << 20):
        reader, found, at = zmtp.Reader(), [], 0
        while at < len(came):
            size = draw.randint(1, most)
            found += reader.take(came[at : at + size])
            at += size
        assert found == MESSAGES, f"in pieces of up to {most} bytes"
        assert (reader.is_greeted, reader.identity) == (True, b"service-a")


def test_what_is_not_complete_is_not_copied_with_each_piece() -> None:
    """A page map of 17 MiB comes in 64 kB: copied each time it would be 2 GB."""
    reader, pieces = zmtp.Reader(), [bytes(1000)] * 50
    reader.take(PEER)
    message = zmtp.frame(b"".join(pieces))
    reader.take(message[:1000])
    rest = reader._rest
    for begin in range(1000, len(message) - 1000, 1000):
        assert reader.take(message[begin : begin + 1000]) == []
        assert reader._rest is rest
    assert reader.take(message[begin + 1000 :]) == [b"".join(pieces)]


def test_libzmq_reads_what_is_written(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    with context.socket(zmq.ROUTER) as router, socket.socket(socket.AF_UNIX) as connection:
        router.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
        router.bind(f"ipc://{tmp_path}/s")
        connection.settimeout(WAIT_SECONDS)
        connection.connect(str(tmp_path / "s"))
        connection.sendall(zmtp.GREETING)
        greeting, name = b"", b"n" * 250  # a READY that needs a long frame
        while len(greeting) < zmtp.GREETING_BYTES:
            greeting += connection.recv(zmtp.GREETING_BYTES)
        connection.sendall(zmtp.ready("DEALER", name) + b"".join(map(zmtp.frame, MESSAGES)))
        assert [router.recv_multipart() for _ in MESSAGES] == [[name, message] for message in MESSAGES]


def test_a_peer_that_gives_no_name_is_ready_too() -> None:
    reader = zmtp.Reader()
    assert reader.take(zmtp.GREETING) == []
    assert (reader.is_greeted, reader.identity) == (True, None)
    assert reader.take(b"\x04\x06\x05READY" + zmtp.frame(b"m")) == [b"m"]
    assert reader.identity == b""


def test_who_has_not_said_its_name_may_say_little_and_then_much() -> None:
    """Connections of strangers could hold 64 MiB each, of what was no message yet."""
    reader, ready = zmtp.Reader(), zmtp.ready("DEALER", b"n" * 255)
    assert reader.take(zmtp.GREETING + b"\x06" + (4096).to_bytes(8, "big") + bytes(4096) + ready) == []
    assert reader.identity == b"n" * 255
    assert reader.take(zmtp.frame(bytes(5000))) == [bytes(5000)]


def test_commands_that_are_not_known_are_passed_over() -> None:
    reader = zmtp.Reader()
    reader.take(PEER)
    assert reader.take(b"\x04\x07\x04PING\0\0" + zmtp.frame(b"m")) == [b"m"]
    assert reader.take(zmtp.ready("ROUTER", b"another") + zmtp.frame(b"n")) == [b"n"]
    assert reader.identity == b"someone"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(64), "no greeting"),
        (b"\xff" + bytes(8) + b"\x7f\x01".ljust(55, b"\0"), "no greeting"),
        (zmtp.GREETING.replace(b"NULL\0", b"CURVE"), "CURVE"),
        (zmtp.GREETING + zmtp.frame(b"m"), "before READY"),
        (PEER + b"\x02" + (1 << 40).to_bytes(8, "big"), "bytes"),
        (PEER + b"\x08\x01x", "flags 8"),
        (zmtp.GREETING + b"\x04\x0c\x05READY\x01n\0\0\0\x09", "cut off"),
        (zmtp.GREETING + zmtp.ready("DEALER", b"n" * 256), "an identity of 256 bytes"),
        (zmtp.GREETING + b"\x06" + (4097).to_bytes(8, "big"), "4097 bytes"),
    ],
)
def test_what_is_no_zmtp_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(zmtp.ZmtpError, match=why):
        zmtp.Reader().take(data)
