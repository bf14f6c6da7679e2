"""Addresses of workers out of what the configuration says: as they stand, or looked up by DNS over and over.

`dns://name:port` stands for every address that the name has, as a headless service of Kubernetes or a scaled
service of compose gives one to each of its workers. Owns the task that looks them up. A name that cannot be
resolved changes nothing: workers that answer are worth more than a name server that does not.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

LOOKUP_SECONDS = 5.0  # between two looks, and for one
MAX_ADDRESSES = 256  # of one name
DNS = "dns://"

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""Hosts of a name, for a port. Raises OSError."""

log = logging.getLogger("service.workers")


async def look_up(name: str, port: int) -> list[str]:
    """IPv4 addresses of a name, or its IPv6 addresses if it has no others: one worker, one address."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    for family in (socket.AF_INET, socket.AF_INET6):
        hosts = sorted({str(entry[4][0]) for entry in found if entry[0] == family})
        if hosts:
            return hosts
    return []


class WorkerNames:
    """Tells `on_change` all addresses, at the start and whenever they are others."""

    def __init__(
        self,
        entries: Sequence[str],
        on_change: Callable[[Sequence[str]], None],
        *,
        lookup: Lookup = look_up,
        seconds: float = LOOKUP_SECONDS,
    ) -> None:
        self._on_change = on_change
        self._lookup = lookup
        self._seconds = seconds
        # In the order of the configuration; a name has none until it was looked up.
        self._found: dict[str, tuple[str, ...]] = {
            entry: () if entry.startswith(DNS) else (entry,) for entry in entries
        }
        self._told: tuple[str, ...] = ()
        self._task: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys(address for found in self._found.values() for address in found))

    def start(self) -> None:
        """Tells what is known; looks names up in the background, if there are any."""
        self._tell()
        if any(entry.startswith(DNS) for entry in self._found):
            self._task = asyncio.get_running_loop().create_task(self._keep_looking())

    def close(self) -> None:
        """Looks no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _keep_looking(self) -> None:
        while True:
            try:
                await asyncio.gather(*(self._look(entry) for entry in self._found if entry.startswith(DNS)))
                self._tell()
            except Exception:  # a bug of ours: without the next look no worker would ever be found again
                log.exception("event=look_failed")
            await asyncio.sleep(self._seconds)

    async def _look(self, entry: str) -> None:
        host, _, port = entry.removeprefix(DNS).rpartition(":")
        try:
            async with asyncio.timeout(self._seconds):
                hosts = await self._lookup(host.strip("[]"), int(port))
        except (OSError, TimeoutError, UnicodeError) as error:  # UnicodeError: what cannot be a name
            log.warning("event=name_not_found name=%s why=%r", host, str(error) or type(error).__name__)
            return
        if len(hosts) > MAX_ADDRESSES:
            log.error("event=too_many_addresses name=%s count=%d taken=%d", host, len(hosts), MAX_ADDRESSES)
        named = (f"[{one}]" if ":" in one else one for one in hosts[:MAX_ADDRESSES])
        self._found[entry] = tuple(f"tcp://{one}:{port}" for one in named)

    def _tell(self) -> None:
        addresses = self.addresses
        if addresses != self._told:
            self._on_change(addresses)
            self._told = addresses  # only now: where it failed it is told again
