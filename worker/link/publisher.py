"""The pages socket: deltas and events for whoever subscribed, and answers about the page map.

Runs on the observer's thread and owns the XPUB socket. Without a subscriber nothing is encoded. What a
slow subscriber loses it finds out by `base_number` and asks for a snapshot.
"""

import logging
from collections import deque
from dataclasses import replace

import zmq

from worker.channels import Handover, OutputQueue
from worker.description import WorkerDescription
from worker.link import integrity_codec, page_codec
from worker.link.addresses import advertised, bind, last_endpoint
from worker.link.doorkeeper import Doorkeeper
from worker.log import log_event
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    EncodedReply,
    IntegrityCall,
    LinkMessage,
    ObserverCall,
    ReplayCall,
    SnapshotCall,
)
from worker.pages.events import EventRing
from worker.readers.audit import KEPT_FINDINGS, Finding
from worker.readers.delta import forget_changes, snapshot_parts, take_delta
from worker.readers.observer import Fold
from worker.stats import PoolTotals

DELTAS, EVENTS = b"d", b"e"
"""Topics."""

PUBLISH_SECONDS = 0.1
SIGN_OF_LIFE_SECONDS = 0.5  # an empty delta, so that mirrors know how old they are
SEND_HIGH_WATER_MARK = 64
SUBSCRIPTIONS_PER_TURN = 256  # so that a flood of them does not hold up the page map
MAX_EVENTS_PER_MESSAGE = 16_384

logger = logging.getLogger("worker.feed")


class PageFeed:
    """Sink of the observer. Made and bound by one thread, then used by the observer's alone."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        *,
        description: WorkerDescription,
        ring: EventRing,
        calls: Handover[ObserverCall],
        answers: OutputQueue[LinkMessage],
        start_time: float,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        self._ring = ring
        self._start_time = start_time  # of the epoch, by the clock that `publish` is told
        self._time_ns = 0  # of this turn, Unix
        self._calls = calls
        self._answers = answers
        self.topics: set[bytes] = set()  # that somebody listens to
        self._delta_number = 0  # revision of the last message of topic d
        self._event_number = 0  # of topic e
        self._rebuilds_seen = 0
        self._next_delta = 0.0
        self._next_sign = 0.0
        self.dropped_events = 0  # that subscribers were never sent
        self._findings: deque[Finding] = deque(maxlen=KEPT_FINDINGS)  # not yet in a delta
        self._socket = context.socket(zmq.XPUB)
        self._socket.set(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.set(zmq.LINGER, 0)
        if doorkeeper is not None and address.startswith("tcp://"):
            doorkeeper.guard(self._socket)
        bind(self._socket, address)
        # What services are told has the real port.
        self.description = replace(description, pages_address=advertised(last_endpoint(self._socket)))

    def open(self) -> None:
        """Nothing to do: the socket was bound before the thread began."""

    def close(self) -> None:
        """Ends the socket."""
        self._socket.close()

    def publish(self, fold: Fold, pool: PoolTotals, now: float) -> float:
        """Sends what changed to those who listen, then answers calls, so that snapshots lie on a delta.

        Events go first: who reads both topics has each event by the time that a map shows what it did.
        """
        # The clock of page events: by a wall clock that was set back, pages would be younger than new.
        time_us = max(fold.ledger.time_us, int((now - self._start_time) * 1e6))
        self._time_ns = self.description.epoch + time_us * 1000
        self._take_subscriptions(pool)
        self._findings.extend(fold.findings)
        calls = self._calls.take_all()
        if fold.num_rebuilds != self._rebuilds_seen:
            self._skip_to(fold, pool)
        self._publish_events(fold, pool)
        if calls or now >= self._next_delta:
            self._next_delta = now + PUBLISH_SECONDS
            self._publish_delta(fold, pool, now)
        for call in calls:
            match call:
                case SnapshotCall():
                    self._answer_snapshot(call, fold, pool)
                case ReplayCall():
                    self._answer_replay(call, pool)
                case IntegrityCall():
                    self._answer_integrity(call, fold, pool)
        return max(0.0, self._next_delta - now)

    def _take_subscriptions(self, pool: PoolTotals) -> None:
        for _ in range(SUBSCRIPTIONS_PER_TURN):
            try:
                request = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            topic = request[1:]
            if request[:1] == b"\x01" and topic in (DELTAS, EVENTS):
                self.topics.add(topic)
                if topic == EVENTS:
                    self._event_number = pool.revision
                log_event(logger, logging.DEBUG, "feed_subscribed", topic=topic.decode())
            elif request[:1] == b"\x00":
                self.topics.discard(topic)

    def _skip_to(self, fold: Fold, pool: PoolTotals) -> None:
        """The fold was built anew: readers see the gap by base_number and ask for a snapshot."""
        self._rebuilds_seen = fold.num_rebuilds
        self.dropped_events += max(0, pool.revision - self._delta_number) if self.topics else 0
        self._delta_number = self._event_number = pool.revision
        self._next_delta = self._next_sign = 0.0  # at once
        forget_changes(fold.ledger, fold.book)

    def _publish_delta(self, fold: Fold, pool: PoolTotals, now: float) -> None:
        base, self._delta_number = self._delta_number, pool.revision
        if DELTAS not in self.topics:
            self._findings.clear()
            forget_changes(fold.ledger, fold.book)
            return
        delta = take_delta(fold.ledger, fold.book, base)
        if delta.is_empty and not self._findings and now < self._next_sign:
            return
        self._next_sign = now + SIGN_OF_LIFE_SECONDS
        message = page_codec.delta_feed(
            delta,
            description=self.description,
            pool=pool,
            counts=fold.counts,
            num_events=pool.revision - base,
            time_ns=self._time_ns,
        )
        message.violations.extend(integrity_codec.violations(self._findings, self.description.epoch))
        self._findings.clear()
        self._send(DELTAS, message.SerializeToString())

    def _publish_events(self, fold: Fold, pool: PoolTotals) -> None:
        if EVENTS not in self.topics or self._event_number >= pool.revision:
            return
        started, ended = fold.started, fold.ended_owners
        while self._event_number < pool.revision:
            wanted = min(pool.revision - self._event_number, MAX_EVENTS_PER_MESSAGE)
            events = self._ring.read(self._event_number, wanted)
            if events is None:
                self.dropped_events += pool.revision - self._event_number
                self._event_number = pool.revision  # a gap that readers see
                return
            batch = page_codec.event_batch(
                events,
                epoch_ns=self.description.epoch,
                page_size=self.description.pool.page_size,
                started=started,
                ended_owners=ended,
            )
            self._event_number = events.last_number
            message = page_codec.event_feed(
                batch, description=self.description, pool=pool, counts=fold.counts, time_ns=self._time_ns
            )
            message.revision.number = events.last_number
            self._send(EVENTS, message.SerializeToString())
            started, ended = [], []

    def _send(self, topic: bytes, data: bytes) -> None:
        try:
            self._socket.send_multipart((topic, data), zmq.NOBLOCK)
        except zmq.Again:
            log_event(logger, logging.DEBUG, "feed_dropped", topic=topic.decode())

    def _answer_snapshot(self, call: SnapshotCall, fold: Fold, pool: PoolTotals) -> None:
        for number, part in enumerate(snapshot_parts(fold.ledger, fold.book)):
            reply = page_codec.snapshot_reply(
                call.ticket.command_id,
                part,
                description=self.description,
                pool=pool,
                counts=fold.counts,
                time_ns=self._time_ns,
                is_first=number == 0,
            )
            is_last = part.parts_left == 0
            self._answers.put(EncodedReply(call.ticket, reply.SerializeToString(), is_last))

    def _answer_integrity(self, call: IntegrityCall, fold: Fold, pool: PoolTotals) -> None:
        epoch = self.description.epoch
        reply = integrity_codec.integrity_reply(call.ticket.command_id, fold.audits, epoch=epoch, pool=pool)
        self._answers.put(EncodedReply(call.ticket, reply.SerializeToString(), is_last=True))

    def _answer_replay(self, call: ReplayCall, pool: PoolTotals) -> None:
        after = call.after_number
        if after > pool.revision:
            text = f"event {after} is not there yet, the last is {pool.revision}"
            self._answers.put(
                CallFailure(call.ticket, CallError.OUT_OF_RANGE, CallReason.INVALID_FIELD, text)
            )
            return
        while True:
            wanted = min(pool.revision - after, MAX_EVENTS_PER_MESSAGE)
            events = self._ring.read(after, wanted, with_tokens=call.include_token_ids)
            if events is None:
                text = f"the ring no longer has event {after + 1}"
                failure = CallFailure(call.ticket, CallError.OUT_OF_RANGE, CallReason.NONE, text)
                self._answers.put(failure)
                return
            after = events.last_number
            is_last = after >= pool.revision
            reply = page_codec.replay_reply(
                call.ticket.command_id, events, description=self.description, more=not is_last
            )
            self._answers.put(EncodedReply(call.ticket, reply.SerializeToString(), is_last))
            if is_last:
                return
