"""Who may connect to a worker's tcp sockets: the answers to libzmq's questions, its refusals, its end."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvatlas.seam_keys import SeamFiles, SeamKeyError, read_key, write_pair
from worker.link import doorkeeper as doorkeeper_module
from worker.link.doorkeeper import (
    HANDSHAKE,
    HANDSHAKE_MS,
    QUIET_SECONDS,
    UNKNOWN_KEY,
    ZAP_ADDRESS,
    ZAP_DOMAIN,
    Doorkeeper,
)

WAIT_SECONDS = 60.0  # only ends a test that hangs
Context = zmq.Context["zmq.Socket[bytes]"]


class Bench:
    """A doorkeeper with a key, who knows service `a`."""

    def __init__(self, folder: Path) -> None:
        for name in ("worker", "a", "b"):
            write_pair(folder, name)
        self.folder, self.now = folder, 100.0
        self.peers = folder / "peers"
        self.peers.write_bytes((folder / "a.pub").read_bytes())
        self.peers.chmod(0o600)
        self.failures: list[str] = []
        self.context: Context = zmq.Context()
        self.door = Doorkeeper(
            self.context,
            SeamFiles(folder / "worker.key", self.peers),
            on_failure=lambda: self.failures.append("failed"),
            clock=lambda: self.now,
        )
        self.asker = self.context.socket(zmq.REQ)  # in libzmq's place
        self.asker.set(zmq.LINGER, 0)
        self.asker.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
        self.asker.connect(ZAP_ADDRESS)
        self.sockets = [self.asker]

    def key(self, name: str) -> bytes:
        """The 32 bytes of a public key."""
        from zmq.utils import z85

        return z85.decode(read_key(self.folder / f"{name}.key").public)

    def ask(self, *credentials: bytes, mechanism: bytes = b"CURVE") -> tuple[bytes, bytes]:
        """Status code and user id for somebody who wants in."""
        question = [b"1.0", b"77", b"kvatlas", b"127.0.0.1", b"name", mechanism, *credentials]
        self.asker.send_multipart(question)
        version, number, code, _, user, _ = self.asker.recv_multipart()
        assert (version, number) == (b"1.0", b"77")
        return code, user

    def know(self, *names: str) -> None:
        """The file of peers, replaced as a mounted secret is."""
        text = b"".join((self.folder / f"{name}.pub").read_bytes() for name in names)
        (self.folder / "new").write_bytes(text)
        (self.folder / "new").chmod(0o600)
        os.rename(self.folder / "new", self.peers)

    def dealer(self, address: str, **curve: Any) -> "zmq.Socket[bytes]":
        dealer = self.context.socket(zmq.DEALER)
        self.sockets.append(dealer)
        dealer.set(zmq.LINGER, 0)
        for name, value in curve.items():
            setattr(dealer, name, value)
        dealer.connect(address)
        return dealer

    def close(self) -> None:
        for one in self.sockets:
            one.close()
        self.door.close()
        self.door.close()
        self.context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvatlas-door"]


def test_who_is_in_the_file_is_let_in_by_name_and_others_are_refused_and_counted(bench: Bench) -> None:
    bench.door.start()
    assert bench.ask(bench.key("a")) == (b"200", b"a")
    assert bench.door.refusals == {UNKNOWN_KEY: 0, HANDSHAKE: 0}
    assert bench.ask(bench.key("b")) == (b"400", b"")
    for credentials, mechanism in (((), b"NULL"), ((b"user", b"word"), b"PLAIN"), ((), b"CURVE")):
        assert bench.ask(*credentials, mechanism=mechanism) == (b"400", b"")
    assert bench.ask(bench.key("a"), mechanism=b"GSSAPI") == (b"400", b""), "the bytes are no key of CURVE"
    assert bench.door.refusals == {UNKNOWN_KEY: 5, HANDSHAKE: 0}
    assert bench.ask(bench.key("a")) == (b"200", b"a")
    assert not bench.failures


def test_a_file_that_changes_counts_from_then_on_unless_it_is_wrong(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.door.start()
    bench.know("a", "b")
    assert bench.ask(bench.key("b")) == (b"200", b"b")
    bench.know("b")
    assert bench.ask(bench.key("a")) == (b"400", b"")
    bench.peers.write_bytes(b"\xff\xfe no keys")
    assert bench.ask(bench.key("b")) == (b"200", b"b"), "the old one is in force"
    assert "event=seam_peers_refused kept=old" in caplog.text
    caplog.clear()
    assert bench.ask(bench.key("b")) == (b"200", b"b")
    assert "seam_peers_refused" not in caplog.text, "read once"
    bench.peers.unlink()
    assert bench.ask(bench.key("b")) == (b"200", b"b")
    bench.know("a")
    assert bench.ask(bench.key("a")) == (b"200", b"a")
    assert not bench.failures


def test_refusals_are_logged_now_and_then_and_all_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.door.start()
    for _ in range(3):
        bench.ask(bench.key("b"))
    assert caplog.text.count("event=seam_refused") == 1
    bench.now += QUIET_SECONDS - 0.001
    bench.ask(bench.key("b"))
    assert caplog.text.count("event=seam_refused") == 1
    bench.now += 0.001
    bench.ask(bench.key("b"))
    assert caplog.text.count("event=seam_refused") == 2
    assert "reason=unknown_key total=5" in caplog.text
    assert bench.door.refusals[UNKNOWN_KEY] == 5


def test_a_guarded_socket_speaks_to_its_peers_alone(
    bench: Bench, wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guarded, heard = bench.context.socket(zmq.ROUTER), threading.Event()
    bench.sockets.append(guarded)
    bench.door.guard(guarded)
    guarded.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
    guarded.bind("tcp://127.0.0.1:*")
    address = guarded.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
    hear = bench.door._hear

    def note(monitor: "zmq.Socket[bytes]") -> None:
        hear(monitor)
        heard.set()

    bench.door._hear = note  # type: ignore[method-assign]
    bench.door.start()
    worker, known = read_key(bench.folder / "worker.key"), read_key(bench.folder / "a.key")
    plain = bench.dealer(address)
    plain.send(b"plain")
    assert heard.wait(WAIT_SECONDS)
    assert bench.door.refusals[HANDSHAKE] >= 1
    assert 'why="no CURVE"' in caplog.text
    for key, text in ((read_key(bench.folder / "b.key"), b"unknown"), (known, b"known")):
        dealer = bench.dealer(
            address, curve_serverkey=worker.public, curve_publickey=key.public, curve_secretkey=key.secret
        )
        dealer.send(text)
        if text == b"unknown":
            wait_until(lambda: bench.door.refusals[UNKNOWN_KEY], "its refusal")
    assert guarded.recv_multipart()[1] == b"known", "and nothing of others before"
    assert (guarded.get(zmq.ZAP_DOMAIN), guarded.get(zmq.ZAP_ENFORCE_DOMAIN)) == (ZAP_DOMAIN, 1)
    assert guarded.get(zmq.HANDSHAKE_IVL) == HANDSHAKE_MS


def test_the_end_of_a_doorkeeper_waits_for_its_thread(bench: Bench) -> None:
    """It reads sockets that are closed next."""
    ended: list[bool] = []

    def serve() -> None:
        while not bench.door._is_stopping:
            threading.Event().wait(0.001)
        threading.Event().wait(0.05)
        ended.append(True)

    bench.door._serve = serve  # type: ignore[method-assign]
    bench.door.start()
    bench.door.close()
    assert ended == [True]


def test_a_doorkeeper_that_breaks_ends_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one nobody is let in any more."""
    monkeypatch.setattr(doorkeeper_module, "z85", None)
    bench.door.start()
    bench.asker.send_multipart([b"1.0", b"1", b"", b"", b"", b"CURVE", bytes(32)])
    bench.door._thread.join(WAIT_SECONDS)
    assert bench.failures == ["failed"]
    assert "event=doorkeeper_failed" in caplog.text


def test_files_that_are_wrong_make_no_doorkeeper_and_hold_nothing(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "empty").touch(mode=0o600)
    for files in (
        SeamFiles(tmp_path / "empty", bench.peers),
        SeamFiles(tmp_path / "worker.key", tmp_path / "empty"),
    ):
        with pytest.raises(SeamKeyError):
            Doorkeeper(bench.context, files, on_failure=lambda: None)
