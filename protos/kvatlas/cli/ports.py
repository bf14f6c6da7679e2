"""Addresses of this machine: is one free, and which is."""

import contextlib
import errno
import socket
from collections.abc import Iterator

from kvatlas.cli.exits import USAGE, CommandFailed


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise CommandFailed(f"{address!r} is not host:port", USAGE)
    return host.strip("[]"), int(port)


def choose_ports(wanted: dict[str, tuple[str, int]]) -> dict[str, int]:
    """Ports by flag name: the wanted ones if they are free, any free one for 0.

    Raises CommandFailed naming the flag whose port is taken. The ports are let go before this returns:
    who binds them next may still fail, and then says so itself.
    """
    with contextlib.ExitStack() as held:
        return {flag: held.enter_context(_held(flag, host, port)) for flag, (host, port) in wanted.items()}


@contextlib.contextmanager
def _held(flag: str, host: str, port: int) -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            bound.bind((host, port))
        except OSError as error:
            raise CommandFailed(_sentence(flag, host, port, error), USAGE) from None
        yield bound.getsockname()[1]


def _sentence(flag: str, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken by another process: choose one with {flag}, or 0 for any free one"
    return f"cannot listen on {host}:{port} ({flag}): {error.strerror or error}"
