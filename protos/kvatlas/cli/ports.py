"""Addresses of this machine: is one free, and which is."""

import contextlib
import errno

from kvatlas.cli.exits import USAGE, CommandFailed
from kvatlas.free_ports import held_port
from kvatlas.settings import is_port


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`."""
    host, _, port = address.rpartition(":")
    if not host or not is_port(port):
        raise CommandFailed(f"{address!r} is not host:port", USAGE)
    return host.strip("[]"), int(port)


def choose_ports(wanted: dict[str, tuple[str, int]]) -> dict[str, int]:
    """Ports by flag name: the wanted ones if they are free, any free one for 0.

    Raises CommandFailed naming every flag whose port is taken. The ports are let go before this returns:
    who binds them next may still fail, and then says so itself.
    """
    chosen: dict[str, int] = {}
    taken: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for flag, (host, port) in wanted.items():
            try:
                chosen[flag] = held.enter_context(held_port(host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    why = f"cannot listen on {host}:{port} ({flag}): {error.strerror or error}"
                    raise CommandFailed(why, USAGE) from None
                taken[flag] = port
    if taken:
        raise CommandFailed(_sentence(taken), USAGE)
    return chosen


def _sentence(taken: dict[str, int]) -> str:
    if len(taken) == 1:
        ((flag, port),) = taken.items()
        return f"port {port} is taken by another process: choose one with {flag}, or 0 for any free one"
    ports, flags = _listed([str(port) for port in taken.values()]), _listed([*taken])
    return (
        f"ports {ports} are taken, perhaps by another server: choose others with {flags},"
        " or 0 for any free ones"
    )


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
