"""Addresses of the worker's sockets: private folders and locks for ipc, real ports for tcp.

libzmq takes over an ipc path that another process has bound without a word, so each is guarded by a
lock file that dies with its holder.
"""

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

import zmq

MAX_MESSAGE_BYTES = 64 << 20  # libzmq alone sets no limit; ours stay below 17 MiB
BACKLOG = 128


class AddressError(Exception):
    """An address that this worker cannot have; the text is for the user."""

    reason = "ADDRESS_UNUSABLE"


class IpcGuard:
    """Holds the paths of ipc addresses for this process; others are ignored."""

    def __init__(self) -> None:
        self._locks: list[tuple[Path, IO[bytes]]] = []
        self._made_folders: list[Path] = []

    def take(self, address: str) -> None:
        """Makes the folder (mode 0700) and takes the lock. Raises AddressError."""
        if not address.startswith("ipc://"):
            return
        path = Path(address.removeprefix("ipc://"))
        try:
            self._make_folder(path.parent)
            _check_private(path.parent)
        except OSError as error:
            raise AddressError(f"{address}: {error}") from None
        self._locks.append((path, _locked(path.with_name(path.name + ".lock"), address)))

    def _make_folder(self, folder: Path) -> None:
        """With its parents, all of them private: `mkdir -p` would leave the parents open to others."""
        if folder.exists():
            return
        self._make_folder(folder.parent)
        _check_trusted(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._made_folders.append(folder)

    def release(self) -> None:
        """Removes sockets and locks; idempotent."""
        for path, lock in self._locks:
            for file in (path, path.with_name(path.name + ".lock")):
                with contextlib.suppress(OSError):
                    file.unlink()
            lock.close()
        for folder in reversed(self._made_folders):
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where nothing else is in it
        self._locks.clear()


def _locked(path: Path, address: str) -> IO[bytes]:
    """The lock file of an address, locked until it is closed. Raises AddressError."""
    while True:
        try:
            lock = open(path, "wb")  # noqa: SIM115  # held until release
        except OSError as error:
            raise AddressError(f"{address}: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                    return lock
            lock.close()  # who had it has removed the file meanwhile: the next one would lock another
        except BlockingIOError:
            lock.close()
            raise AddressError(f"{address}: another worker has it") from None
        except OSError as error:
            lock.close()
            raise AddressError(f"{address}: no file can be locked there ({error.strerror})") from None


def _zmq_address(address: str) -> str:
    """As libzmq takes it: port 0 is a wildcard there."""
    if address.startswith("tcp://") and address.endswith(":0"):
        return address[:-1] + "*"
    return address


def _check_trusted(folder: Path) -> None:
    """Raises PermissionError when another user could put folders of ours elsewhere."""
    status = os.stat(folder)
    is_sticky_or_closed = status.st_mode & 0o1000 or not status.st_mode & 0o022
    if status.st_uid not in (0, os.getuid()) or not is_sticky_or_closed:
        raise PermissionError(f"{folder} belongs to user {status.st_uid}, mode {status.st_mode & 0o7777:o}")


def _check_private(folder: Path) -> None:
    """Raises PermissionError when others could put a socket of their own there."""
    status = os.stat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not private: owner {status.st_uid}, mode {status.st_mode & 0o777:o}"
        )


def listen(address: str) -> socket.socket:
    """A socket that listens at an ipc path whose lock this process has, for this user alone: its folder may
    let others in, who could connect to a file of the mode that the umask leaves. Raises AddressError.
    """
    path = Path(address.removeprefix("ipc://"))
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    try:
        path.unlink(missing_ok=True)  # what is there is nobody's
        os.fchmod(listener.fileno(), 0o600)  # the file's mode from the first moment on (unix_bind in Linux)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressError(f"{address}: {error.strerror or error}") from None
    return listener


def bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Binds a new socket, or closes it and raises AddressError."""
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if "[" in address:  # only then: with it an IPv4 address is told as ::ffff:1.2.3.4
        socket.set(zmq.IPV6, 1)
    try:
        if address.startswith("ipc://"):
            socket.set(zmq.USE_FD, listen(address).detach())
        socket.bind(_zmq_address(address))
    except AddressError:
        socket.close()
        raise
    except zmq.ZMQError as error:
        socket.close()
        raise AddressError(f"{address}: {error.strerror}") from None


def advertised(address: str) -> str:
    """The address that services are told: one that is bound on all interfaces gets this host's name."""
    for anywhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if address.startswith(anywhere):
            return f"tcp://{socket.gethostname()}:{address.removeprefix(anywhere)}"
    return address


def last_endpoint(socket: "zmq.Socket[bytes]") -> str:
    """The address that a bound socket really has: a wildcard port became a number."""
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
