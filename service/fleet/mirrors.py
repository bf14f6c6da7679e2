"""Keeps a page mirror per worker: follows the feed, asks for snapshots when something was missed.

Owns the mirrors, the event rings and the task that fetches a snapshot, at most one per worker. Listens
to the links; everything on the event loop's thread.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

from kvatlas.worker.v1 import worker_pb2
from service.fleet import page_codec
from service.fleet.codec import WorkerFacts
from service.fleet.event_ring import EventRing
from service.fleet.feed import EventColumns, OutOfStep, SequenceKey
from service.fleet.link import WorkerLink, WorkerUnavailable
from service.fleet.page_mirror import PageMirror, Standing
from service.fleet.shown import shown
from service.fleet.violations import ViolationLog
from service.metric_table import RESYNC_CAUSES
from service.request import LostReason

SNAPSHOT_SECONDS = 10.0
REPLAY_SECONDS = 5.0
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 2.0
SILENCE_SECONDS = 2.0  # the feed shows life every 0.5 s
EVENTS_KEPT_SECONDS = 60.0  # the topic of events stays subscribed so long after it was last needed
MANY_SEQUENCES = 64  # more of them in one part are decoded in a thread: 8 us each

log = logging.getLogger("service.mirror")


@asynccontextmanager
async def replies_to(
    link: WorkerLink, command: worker_pb2.Command, *, timeout: float
) -> AsyncIterator[AsyncIterator[worker_pb2.CommandReply]]:
    """The replies of a command; leaving early gives the command up at once, not when memory is tidied."""
    replies = cast("AsyncGenerator[worker_pb2.CommandReply, None]", link.command(command, timeout=timeout))
    try:
        yield replies
    finally:
        await replies.aclose()


class KeptMirror:
    """One worker's mirror with what keeps it current."""

    def __init__(self, link: WorkerLink, loop: asyncio.AbstractEventLoop) -> None:
        self.link = link
        self.mirror = PageMirror(link.worker_id)
        self.facts: WorkerFacts | None = None  # of the life that the map is of; its link may be in the next
        self.ring = EventRing()
        self.violations = ViolationLog()
        self.resyncs: Counter[str] = Counter(dict.fromkeys(RESYNC_CAUSES, 0))
        self.fed_time = loop.time()  # of the last feed message or snapshot; before the first, of its welcome
        self.is_gone = False  # its address is no longer a worker's: nothing will ever come
        self.event_watchers: set[Callable[[], None]] = set()  # called when there are new ones
        self._loop = loop
        self._fetching: asyncio.Task[None] | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._early: deque[EventColumns] = deque(maxlen=256)  # came before the replay was complete
        self._events_used = 0.0
        self._has_events = False
        self._held_idle: set[SequenceKey] = set()  # sequences held when the worker last said it has none
        self._worker_state: int | None = None  # of the last heartbeat
        self._state_changed = asyncio.Event()  # a snapshot that was refused is worth asking for again

    @property
    def age_seconds(self) -> float:
        """Since the last word of the feed."""
        return self._loop.time() - self.fed_time

    @property
    def is_live(self) -> bool:
        """Whether what the mirror shows is the present."""
        is_current = self.mirror.standing is Standing.CURRENT
        return self.link.is_up and is_current and self.age_seconds < SILENCE_SECONDS

    # -- what the link says --------------------------------------------------------------------------

    def begin_life(self) -> None:
        """The worker introduced itself."""
        facts = self.link.facts
        assert facts is not None, "a welcome has facts"
        seen = self.mirror.revision.epoch
        self.mirror.worker_id = facts.worker_id
        self.mirror.begin_life(facts.epoch, facts.page_count)
        self.ring.restart(0)
        self._drop_events()
        self.link.subscribe(page_codec.DELTAS)
        self._fetch("initial" if not seen else "gap" if seen == facts.epoch else "epoch")

    def end_life(self) -> None:
        """The worker is gone: what is held is shown on, but nothing is asked any more."""
        for task in (self._fetching, self._replaying):
            if task is not None:
                task.cancel()
        self._fetching = self._replaying = None

    def take(self, topic: bytes, payload: bytes) -> None:
        """A message of the pages socket."""
        try:
            if topic == page_codec.DELTAS:
                self.fed_time = self._loop.time()
                feed = worker_pb2.PageFeed.FromString(payload)
                self.violations.add(feed.violations)
                self.mirror.apply(page_codec.map_delta(feed))
            elif self._has_events:
                epoch, events = page_codec.decode_event_feed(payload)
                if epoch == self.mirror.revision.epoch:
                    self._take_events(events)
        except Exception as error:  # whatever a worker sends costs it a snapshot; the loop reads on
            self._missed(error)

    def beat(self) -> None:
        """The worker lives; looks whether its feed does, and whether events are still of use."""
        now = self._loop.time()
        state = self.link.beat.state if self.link.beat is not None else None
        if state != self._worker_state:
            self._worker_state = state
            self._state_changed.set()
        if (
            self._fetching is None
            and self.mirror.standing is not Standing.EMPTY
            and self.age_seconds > SILENCE_SECONDS
        ):
            self._missed(OutOfStep(f"the feed was silent for {self.age_seconds:.1f} s"))
        self._check_idle()
        if self._has_events and not self.event_watchers and now - self._events_used > EVENTS_KEPT_SECONDS:
            self._drop_events()

    def _check_idle(self) -> None:
        """A sequence that is held while the worker says twice that it has none: its end was not heard."""
        beat = self.link.beat
        is_idle = beat is not None and not beat.running_sequences and not beat.waiting_requests
        held = set(self.mirror.sequences.records) if is_idle else set()
        if held & self._held_idle:
            self._missed(OutOfStep(f"{len(held)} sequences are held, the worker has none"))
            held = set()
        self._held_idle = held

    # -- events --------------------------------------------------------------------------------------

    async def events(self) -> EventRing:
        """The ring of events, filled from the worker at first use and followed for a while then."""
        self._events_used = self._loop.time()
        if not self._has_events and self.link.is_up and self.mirror.standing is Standing.CURRENT:
            self._has_events = True
            self.link.subscribe(page_codec.EVENTS)
            self._replaying = self._loop.create_task(self._replay())
        if self._replaying is not None:
            await asyncio.wait([self._replaying])
        return self.ring

    async def _replay(self) -> None:
        """Fetches the past. Where the worker's ring is shorter than ours it begins with the present."""
        number = self.mirror.revision.number
        after = max(0, number - self.ring.capacity * 15 // 16)  # some room for what happens meanwhile
        self.ring.restart(after)
        command = worker_pb2.Command(replay=worker_pb2.ReplayRequest(after_number=after))
        try:
            async with replies_to(self.link, command, timeout=REPLAY_SECONDS) as replies:
                async for reply in replies:
                    self.ring.append(page_codec.decode_events(reply.events))
        except Exception as error:  # the worker's fault, whatever it sent: the ring begins with the present
            log.info("event=no_replay worker=%s why=%r", self.link.worker_id, str(error))
            self.ring.restart(max(number, self.ring.last_number))
        finally:
            self._replaying = None
            self.ring.named_from = self.ring.last_number + 1  # a replay does not say who began when
            while self._early:
                self._take_events(self._early.popleft())

    def _take_events(self, events: EventColumns) -> None:
        if self._replaying is not None:
            self._early.append(events)
            return
        try:
            self.ring.append(events)
        except OutOfStep:
            self.ring.restart(events.first_number - 1)
            self.ring.append(events)
        for wake in self.event_watchers:
            wake()

    def _drop_events(self) -> None:
        self._has_events = False
        self._early.clear()
        self.link.unsubscribe(page_codec.EVENTS)

    # -- snapshots -----------------------------------------------------------------------------------

    def _missed(self, error: Exception) -> None:
        self.mirror.lose_step()
        if self._fetching is None and self.link.is_up:
            log.info("event=mirror_behind worker=%s why=%r", self.link.worker_id, str(error))
            self._fetch("gap")

    def _fetch(self, cause: str) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
        self._fetching = self._loop.create_task(self._fetch_until_whole(cause))

    async def _fetch_until_whole(self, cause: str) -> None:
        pause, said = MIN_RETRY_SECONDS, ""
        while True:
            self._state_changed.clear()
            try:
                await self._fetch_once()
                break
            except WorkerUnavailable:
                break  # its next welcome begins anew
            except Exception as error:  # the worker's fault, whatever it sent: it is asked again
                if (why := str(error)) != said:  # once, however long it loads its model
                    said = why
                    log.info("event=no_snapshot worker=%s why=%r", self.link.worker_id, why)
            with suppress(TimeoutError):  # a worker that has loaded its model says so at once
                await asyncio.wait_for(self._state_changed.wait(), pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, MAX_RETRY_SECONDS)
        if asyncio.current_task() is self._fetching:
            self._fetching = None
        if self.mirror.standing is Standing.CURRENT:
            self.resyncs[cause] += 1

    async def _fetch_once(self) -> None:
        self.mirror.begin_snapshot()
        command = worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest())
        async with replies_to(self.link, command, timeout=SNAPSHOT_SECONDS) as replies:
            async for reply in replies:
                part = reply.snapshot
                if len(part.chunk.sequences) > MANY_SEQUENCES:
                    decoded = await asyncio.to_thread(page_codec.decode_part, part)
                else:
                    decoded = page_codec.decode_part(part)
                self.fed_time = self._loop.time()
                if self.mirror.add_part(decoded):
                    self.facts = self.link.facts


class PageMirrors:
    """The mirrors of all workers, in the order of the links. A listener of every link."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._kept: dict[str, KeptMirror] = {}  # by address

    @property
    def kept(self) -> Sequence[KeptMirror]:
        """Mirrors of workers that have introduced themselves, lost ones included.

        One of each name: see `shown`.
        """
        by_address = self._kept.copy()  # a scrape looks here from another thread
        by_name: dict[str, KeptMirror] = {}
        for link in shown([kept.link for kept in by_address.values()]):
            by_name.setdefault(link.worker_id, by_address[link.address])  # a second is refused
        return list(by_name.values())

    @property
    def is_any_fresh(self) -> bool:
        """Whether some mirror is at most 5 s old: the health of the cache service."""
        return any(
            kept.mirror.standing is not Standing.EMPTY and kept.age_seconds <= 5.0
            for kept in self._kept.values()
        )

    def close(self) -> None:
        """Asks nothing any more."""
        for kept in self._kept.values():
            kept.end_life()

    # LinkListener

    def link_welcomed(self, link: WorkerLink) -> None:
        """A life of the worker begins."""
        if link.address not in self._kept:
            self._kept[link.address] = KeptMirror(link, self._loop)
        self._kept[link.address].begin_life()

    def link_lost(self, link: WorkerLink, reason: LostReason) -> None:
        """It is over."""
        if (kept := self._kept.get(link.address)) is not None:
            kept.end_life()

    def link_beat(self, link: WorkerLink) -> None:
        """A heartbeat came."""
        if (kept := self._kept.get(link.address)) is not None:
            kept.beat()

    def link_fed(self, link: WorkerLink, topic: bytes, payload: bytes) -> None:
        """A message of the pages socket."""
        if (kept := self._kept.get(link.address)) is not None:
            kept.take(topic, payload)

    def link_removed(self, link: WorkerLink) -> None:
        """Its map goes with it; who watches it is told."""
        if (kept := self._kept.pop(link.address, None)) is not None:
            kept.end_life()
            kept.is_gone = True
            for reader in kept.mirror.readers:
                reader.abandoned()
