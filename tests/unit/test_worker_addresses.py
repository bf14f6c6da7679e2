"""Where the sockets lie: private folders, one worker per address, real ports, nothing left behind."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

import pytest
import zmq

from worker.channels import Wakeup
from worker.link.addresses import AddressError, IpcGuard, advertised, bind, last_endpoint
from worker.link.router import UnixRouter


def test_folders_are_made_private_and_go_again(tmp_path: Path) -> None:
    guard = IpcGuard()
    guard.take(f"ipc://{tmp_path}/a/b/engine")
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o700
    guard.release()
    guard.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    guard = IpcGuard()
    guard.take(f"ipc://{tmp_path}/engine")
    guard.release()
    assert tmp_path.is_dir()


def test_one_worker_per_path(tmp_path: Path) -> None:
    first, second = IpcGuard(), IpcGuard()
    first.take(f"ipc://{tmp_path}/engine")
    with pytest.raises(AddressError, match="another worker"):
        second.take(f"ipc://{tmp_path}/engine")
    first.release()
    second.take(f"ipc://{tmp_path}/engine")
    second.release()


def test_a_lock_whose_file_its_holder_just_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held on a file that nobody else could find: a third worker took the address over."""
    first, second, third = IpcGuard(), IpcGuard(), IpcGuard()
    address = f"ipc://{tmp_path}/engine"
    first.take(address)
    lock_file = fcntl.flock

    def late(lock: IO[bytes], how: int) -> None:
        first.release()  # between the second one's open and its lock
        lock_file(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second.take(address)
    with pytest.raises(AddressError, match="another worker"):
        third.take(address)
    second.release()
    third.take(address)
    third.release()


def test_a_folder_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(AddressError, match=r"engine: no file can be locked there \(Function not"):
        IpcGuard().take(f"ipc://{tmp_path}/engine")


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(AddressError, match="not private"):
        IpcGuard().take(f"ipc://{shared}/engine")
    with pytest.raises(AddressError, match="belongs to"):
        IpcGuard().take(f"ipc://{shared}/deeper/engine")
    shared.chmod(0o1777)  # as /tmp
    guard = IpcGuard()
    guard.take(f"ipc://{shared}/deeper/engine")
    guard.release()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AddressError, match="file"):
        IpcGuard().take(f"ipc://{tmp_path}/file/engine")


def test_a_wildcard_port_becomes_a_number_and_all_interfaces_a_name() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for address in ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://[::1]:0", "tcp://[::]:*"):
        socket = context.socket(zmq.XPUB)
        bind(socket, address)
        host, _, port = last_endpoint(socket).rpartition(":")
        assert host == address.rpartition(":")[0]
        assert int(port) > 0
        socket.close()
    context.term()
    assert advertised("tcp://0.0.0.0:5") == f"tcp://{os.uname().nodename}:5"
    assert advertised("tcp://10.0.0.1:5") == "tcp://10.0.0.1:5"
    assert advertised("ipc:///x") == "ipc:///x"


def test_what_cannot_be_bound_is_closed_and_named() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(AddressError, match="tcp://no-such-interface:1"):
        bind(context.socket(zmq.XPUB), "tcp://no-such-interface:1")
    context.term()  # would wait for a socket that is open


def test_only_the_owner_may_connect_whatever_the_umask(tmp_path: Path) -> None:
    """The folder may have been there and let others in."""
    before = os.umask(0)
    try:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pages = context.socket(zmq.XPUB)
        bind(pages, f"ipc://{tmp_path}/pages")
        wakeup = Wakeup()
        engine = UnixRouter(f"ipc://{tmp_path}/engine", wakeup.fileno())
        modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("pages", "engine")]
        engine.close()
        wakeup.close()
        pages.close()
        context.term()
        assert modes == [0o600, 0o600]
        assert os.umask(0) == 0, "it is as it was"
    finally:
        os.umask(before)
