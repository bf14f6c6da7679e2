"""Free ports for processes that are yet to start: chosen here, listened on there a moment later.

Meanwhile a port belongs to nobody. The system gives those of a range of its own to every connection that is
made, so none of these is chosen; and processes that choose at the same time look at different ones first.
"""

import errno
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SYSTEMS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, LAST = 10_000, 65_535
PORTS_OF_PROCESS = 16
"""As far apart begin processes that were started one after the other."""
MAX_TRIES = 256

_count = itertools.count()


@contextmanager
def held_port(host: str, port: int = 0) -> Iterator[int]:
    """Nobody else can bind it while this runs; 0: any that is free. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        if port or not _bind_one_of(bound, host, _not_the_systems()):
            bound.bind((host, port))
        yield bound.getsockname()[1]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ones."""
    with ExitStack() as held:
        return [held.enter_context(held_port(host)) for _ in range(count)]


def _not_the_systems() -> range:
    """The longer of what lies below and above its range; empty where that cannot be told."""
    try:
        first, last = map(int, SYSTEMS_RANGE.read_text().split())
    except (OSError, ValueError):
        return range(0)
    return max(range(FIRST, first), range(last + 1, LAST + 1), key=len)


def _bind_one_of(bound: socket.socket, host: str, ports: range) -> bool:
    """Whether one of those that were tried was free."""
    for _ in range(min(MAX_TRIES, len(ports))):
        try:
            bound.bind((host, ports[(os.getpid() * PORTS_OF_PROCESS + next(_count)) % len(ports)]))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            return True
    return False
