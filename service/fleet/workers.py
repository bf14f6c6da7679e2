"""Who is there: a link to every worker, which of them can be used, and the next sequence id.

Owns the links. Knows no requests; router.py decides, names.py knows the addresses.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

import zmq

from service.fleet import codec
from service.fleet.codec import WorkerFacts
from service.fleet.link import LinkListener, WorkerLink
from service.fleet.names import WorkerNames
from service.fleet.prefix_hint import routing_key
from service.fleet.room import size_of, with_room
from service.fleet.router import Candidate, choose
from service.fleet.seam import SeamClient, SeamKeys
from service.request import LostReason, Request

log = logging.getLogger("service.workers")


class WorkerPool:
    """The workers of this service. `accept` says what is wrong with a worker's facts, None if nothing is.

    Those with the model `model_id` go before those with another; without them whoever comes first does.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        instance_id: str,
        service_epoch: int,
        version: str,
        model_id: str,
        accept: Callable[[WorkerFacts], str | None],
        stall_seconds: float = 30.0,
        keys: SeamKeys | None = None,
        on_seam_failure: Callable[[str], None] = lambda reason: None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._model_id = model_id
        self._accept = accept
        self._stall_seconds = stall_seconds
        self._keys, self._on_seam_failure = keys, on_seam_failure
        self._identity = (instance_id, service_epoch, version)
        self._refused: dict[str, str] = {}  # by address: why its facts do not fit
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._watchers: dict[Callable[[], None], None] = {}  # in order of arrival
        self._listeners: list[LinkListener] = [self]
        self._next_sequence_id = 1
        self._names = WorkerNames(addresses, self._set_addresses)
        self._wanted: Sequence[str] = ()
        self._links: dict[str, WorkerLink] = {}  # by address
        self.choose = choose

    @property
    def links(self) -> list[WorkerLink]:
        """To all workers, those that never answered and those that are lost included."""
        return list(self._links.values())

    def open(self) -> None:
        """Starts to connect to all; returns at once."""
        self._names.start()

    def close(self) -> None:
        """Says goodbye to all. Idempotent."""
        self._names.close()
        for link in self.links:
            link.close()
        self._context.term()

    def add_listener(self, listener: LinkListener) -> None:
        """Tells it what becomes of every link from now on."""
        self._listeners.append(listener)
        for link in self.links:
            link.listeners.append(listener)

    def take_sequence_ids(self, count: int) -> int:
        """The first of `count` ids that no sequence of this process ever had."""
        first = self._next_sequence_id
        self._next_sequence_id += count
        return first

    # Addresses come and go

    def _set_addresses(self, addresses: Sequence[str]) -> None:
        """A worker whose address is gone keeps its link until that is lost: it may be about to drain."""
        self._wanted = addresses
        for address in addresses:
            if address not in self._links:
                self._add_link(address)
        for link in self.links:
            if link.address not in addresses and not link.is_up:
                self._remove(link)
        self._notify()

    def _add_link(self, address: str) -> None:
        instance_id, service_epoch, version = self._identity
        link = self._links[address] = WorkerLink(
            address,
            context=self._context,
            loop=self._loop,
            instance_id=instance_id,
            service_epoch=service_epoch,
            version=version,
            seam=SeamClient(address, self._keys, self._loop.time, self._on_seam_failure),
        )
        link.listeners += self._listeners
        link.open()

    def _remove(self, link: WorkerLink) -> None:
        log.info("event=worker_removed worker=%s address=%s", link.worker_id, link.address)
        del self._links[link.address]
        self._refused.pop(link.address, None)
        link.close()
        for listener in self._listeners:
            listener.link_removed(link)

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
        """Facts of the roomiest worker that takes requests, is there, or was there last: model and limits."""
        known = self.known
        there = self.usable or [link for link in known if link.is_up] or known
        return max((link.facts for link in there if link.facts is not None), key=size_of, default=None)

    @property
    def pin_pages(self) -> int:
        """Pages that only sequences of a pinned prefix get, at the last heartbeat; the most of any."""
        return max((link.beat.pin_pages for link in self.known if link.beat is not None), default=0)

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

    def pick(self, request: Request, avoid: Collection[str] = ()) -> WorkerLink | None:
        """The worker for a request, none of those in `avoid` if there are others; None: nobody is usable."""
        usable = with_room(self.usable, request)
        if len(usable) < 2:
            return usable[0] if usable else None
        links = {link.address: link for link in usable}
        first = usable[0].facts
        assert first is not None, "a usable worker has introduced itself"
        uses_cache = request.cache_read or request.cache_write
        key = routing_key(request.prompt_ids, first.page_size, request.page_salt) if uses_cache else b""
        chosen = self.choose([_candidate(link) for link in links.values()], key, avoid)
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
        self._judge(link)
        self._notify()

    def _judge(self, link: WorkerLink) -> None:
        facts = link.facts
        assert facts is not None, "a welcome has facts"
        self._refused.pop(link.address, None)
        for same in [one for one in self.known if one is not link and _is_same_life(one, link)]:
            # Two links under our one name would take this worker's session from each other for ever.
            first, second = sorted((link, same), key=list(self._links.values()).index)
            self._refused[second.address] = f"{first.address} is the same worker"
            self._loop.call_soon(self._retire, second)
        if link.address in self._refused:
            return
        fault = self._conflict(link, facts) or self._accept(facts)
        if fault is not None:
            self._refused[link.address] = fault
            log.error("event=worker_refused worker=%s why=%r", link.worker_id, fault)
        elif facts.model_id == self._model_id:
            for other in [one for one in self.known if one.is_up and _model_of(one) != self._model_id]:
                self._judge(other)  # what it runs it may end

    def _conflict(self, link: WorkerLink, facts: WorkerFacts) -> str | None:
        """Why it cannot be used beside those that are there: a worker has a name, and one model is served."""
        for other in self.known:
            if other is link or not other.is_up or other.facts is None:
                continue
            if other.worker_id == link.worker_id:
                return f"{other.address} has the same worker_id"
            if other.facts.model_id != facts.model_id != self._model_id:
                return f"its model {facts.model_id} is not that of {other.worker_id}, {other.facts.model_id}"
        return None

    def _retire(self, link: WorkerLink) -> None:
        why = self._refused[link.address]
        log.error("event=address_given_up worker=%s address=%s why=%r", link.worker_id, link.address, why)
        link.retire()
        for listener in self._listeners:
            listener.link_removed(link)

    def link_lost(self, link: WorkerLink, reason: LostReason) -> None:
        """Somebody may wait for this."""
        if link.address not in self._wanted:
            self._remove(link)
        for other in self.links:
            if other.is_up and other.address in self._refused:
                self._judge(other)  # it may have been refused for the one that is gone
        self._notify()

    def link_beat(self, link: WorkerLink) -> None:
        """A worker may have become ready, or stuck."""
        self._notify()

    def link_fed(self, link: WorkerLink, topic: bytes, payload: bytes) -> None:
        """Page feeds are the mirror's."""

    def link_removed(self, link: WorkerLink) -> None:
        """It is removed here."""

    def _notify(self) -> None:
        for wake in list(self._watchers):
            wake()


def _is_same_life(one: WorkerLink, other: WorkerLink) -> bool:
    """Whether both lead to one process, by what it has said of itself."""
    a, b = one.facts, other.facts
    return a is not None and b is not None and (a.worker_id, a.epoch) == (b.worker_id, b.epoch)


def _model_of(link: WorkerLink) -> str:
    return link.facts.model_id if link.facts is not None else ""


def _candidate(link: WorkerLink) -> Candidate:
    """Its load is what the last heartbeat said of other services, and what this one knows to have there."""
    beat = link.beat
    if beat is None:
        return Candidate(link.worker_id, link.address, link.live_sequences)
    others = max(0, beat.running_sequences + beat.waiting_requests - link.beat_sequences)
    pool = beat.pool
    held = pool.active_pages + pool.pinned_pages + pool.reserved_pages
    total = held + pool.free_pages + pool.cached_pages
    return Candidate(link.worker_id, link.address, link.live_sequences + others, held / max(1, total))
