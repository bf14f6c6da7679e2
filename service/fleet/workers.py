"""Who is there: the links of a static list of workers, which of them can be used, and the next sequence id.

Owns the links. Knows no requests; router.py decides.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

import zmq

from service.fleet import codec
from service.fleet.codec import WorkerFacts
from service.fleet.link import LinkListener, WorkerLink
from service.fleet.router import Candidate, choose
from service.request import LostReason

log = logging.getLogger("service.workers")


class WorkerPool:
    """The workers of this service. `accept` says what is wrong with a worker's facts, None if nothing is."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        instance_id: str,
        service_epoch: int,
        version: str,
        accept: Callable[[WorkerFacts], str | None],
        stall_seconds: float = 30.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._accept = accept
        self._stall_seconds = stall_seconds
        self._refused: dict[str, str] = {}  # by address: why its facts do not fit
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._watchers: dict[Callable[[], None], None] = {}  # in order of arrival
        self._next_sequence_id = 1
        self.links = [
            WorkerLink(
                address,
                context=self._context,
                loop=self._loop,
                instance_id=instance_id,
                service_epoch=service_epoch,
                version=version,
            )
            for address in addresses
        ]
        for link in self.links:
            link.listeners.append(self)

    def open(self) -> None:
        """Starts to connect to all; returns at once."""
        for link in self.links:
            link.open()

    def close(self) -> None:
        """Says goodbye to all. Idempotent."""
        for link in self.links:
            link.close()
        self._context.term()

    def add_listener(self, listener: LinkListener) -> None:
        """Tells it what becomes of every link from now on."""
        for link in self.links:
            link.listeners.append(listener)

    def take_sequence_ids(self, count: int) -> int:
        """The first of `count` ids that no sequence of this process ever had."""
        first = self._next_sequence_id
        self._next_sequence_id += count
        return first

    # Who can be used

    @property
    def known(self) -> list[WorkerLink]:
        """Workers that have introduced themselves and fit, lost ones included."""
        return [link for link in self.links if link.facts is not None and link.address not in self._refused]

    @property
    def usable(self) -> list[WorkerLink]:
        """Workers that take requests now."""
        return [
            link for link in self.known if self.state_of(link) == codec.SERVING and not self.is_stuck(link)
        ]

    @property
    def facts(self) -> WorkerFacts | None:
        """Facts of a worker that is there, or was there last: model and limits."""
        known = self.known
        up = [link for link in known if link.is_up]
        chosen = (up or known)[:1]
        return chosen[0].facts if chosen else None

    @property
    def pinned_pages(self) -> int:
        """Pages that no sequence gets, at the last heartbeat; the most of all workers."""
        return max((link.beat.pool.pinned_pages for link in self.known if link.beat is not None), default=0)

    def state_of(self, link: WorkerLink) -> int:
        """ServerState of a worker."""
        if link.facts is None:
            return codec.STARTING
        if not link.is_up:
            return codec.LOST
        if link.address in self._refused:
            return codec.STARTING
        return link.beat.state if link.beat is not None else link.facts.state

    def is_stuck(self, link: WorkerLink) -> bool:
        """Whether it lives but computes nothing though it should."""
        beat = link.beat
        return (
            beat is not None
            and beat.running_sequences > 0
            and beat.last_step_age_seconds > self._stall_seconds
        )

    def pick(self, avoid: Collection[str] = ()) -> WorkerLink | None:
        """The worker for the next request; None: nobody is usable."""
        links = {link.address: link for link in self.usable}
        candidates = [
            Candidate(address, link.live_sequences, link.beat.waiting_requests if link.beat else 0)
            for address, link in links.items()
        ]
        chosen = choose(candidates, avoid)
        return links[chosen.address] if chosen is not None else None

    # Who waits for a change

    def watch(self, wake: Callable[[], None]) -> None:
        """Calls `wake` whenever something about a worker changes, until unwatch()."""
        self._watchers[wake] = None

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Takes watch() back; may be called twice."""
        self._watchers.pop(wake, None)

    # LinkListener

    def link_welcomed(self, link: WorkerLink) -> None:
        """Checks whether the worker fits."""
        assert link.facts is not None, "a welcome has facts"
        fault = self._accept(link.facts)
        self._refused.pop(link.address, None)
        if fault is not None:
            self._refused[link.address] = fault
            log.error("event=worker_refused worker=%s why=%r", link.worker_id, fault)
        self._notify()

    def link_lost(self, link: WorkerLink, reason: LostReason) -> None:
        """Somebody may wait for this."""
        self._notify()

    def link_beat(self, link: WorkerLink) -> None:
        """A worker may have become ready, or stuck."""
        self._notify()

    def link_fed(self, link: WorkerLink, topic: bytes, payload: bytes) -> None:
        """Page feeds are the mirror's."""

    def _notify(self) -> None:
        for wake in list(self._watchers):
            wake()
