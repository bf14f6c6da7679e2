"""The worker's page feed: what it says of its clock, and of what nobody listened to."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvatlas.worker.v1 import worker_pb2
from worker.channels import Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.link.publisher import DELTAS, PageFeed
from worker.messages import EncodedReply, LinkMessage, ObserverCall, SnapshotCall, Ticket
from worker.pages.events import EventRing
from worker.pages.pool import PagePool
from worker.readers.observer import Fold

EPOCH = 1_700_000_000_000_000_000


class Bench:
    """A feed with a pool of four pages, its fold, and a subscriber."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
        self.ring = EventRing(1024)
        self.pool = PagePool(4, 16, self.ring)
        self.fold = Fold(4, 16)
        self.calls: Handover[ObserverCall] = Handover(8)
        self.answers: OutputQueue[LinkMessage] = OutputQueue(8)
        model = ModelDescription("m", 1000, 64)
        pool = PoolDescription(4, 16, 2, 64, "lru")
        self.feed = PageFeed(
            context,
            f"ipc://{folder}/pages",
            description=WorkerDescription("w", EPOCH, model, pool, 8, 64, 0, (), "", b""),
            ring=self.ring,
            calls=self.calls,
            answers=self.answers,
            start_time=100.0,
        )
        self.subscriber = context.socket(zmq.SUB)
        self.subscriber.set(zmq.RCVTIMEO, 10_000)
        self.subscriber.connect(f"ipc://{folder}/pages")

    def subscribe(self, topic: bytes) -> None:
        self.subscriber.subscribe(topic)
        while topic not in self.feed.topics:
            self.publish(0.0)

    def publish(self, now: float) -> None:
        events = self.ring.read(self.fold.ledger.revision)
        assert events is not None
        self.fold.ledger.fold(events)
        self.feed.publish(self.fold, self.fold.pool(), now)

    def heard(self, number: int) -> worker_pb2.PageFeed:
        """The message that leads to a revision; signs of life before it are passed over."""
        while True:
            message = worker_pb2.PageFeed.FromString(self.subscriber.recv_multipart()[1])
            if message.revision.number == number:
                return message

    def close(self) -> None:
        self.feed.close()
        self.subscriber.close()
        self.answers.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found = Bench(context, tmp_path)
    yield found
    found.close()
    context.term()


def allocate(bench: Bench, time_us: int) -> None:
    bench.ring.time_us = time_us
    bench.pool.now_ms = time_us // 1000
    bench.pool.allocate(array("H", (1,)))


def test_the_feed_s_clock_is_that_of_events_and_never_behind_them(bench: Bench) -> None:
    """A wall clock may be set back: pages would be younger than new, which the planes count as 49 days."""
    bench.subscribe(DELTAS)
    for time_us, now, wanted_us in ((2_000_000, 107.5, 7_500_000), (8_000_000, 107.9, 8_000_000)):
        allocate(bench, time_us)
        bench.calls.put(SnapshotCall(Ticket("peer", 1)))
        bench.publish(now)
        delta = bench.heard(bench.ring.number)
        (reply,) = bench.answers.take(8)
        assert isinstance(reply, EncodedReply)
        snapshot = worker_pb2.CommandReply.FromString(reply.payload).snapshot
        assert delta.publish_time == snapshot.publish_time
        assert delta.publish_time.ToNanoseconds() == EPOCH + wanted_us * 1000


def test_events_that_nobody_listened_to_are_not_dropped(bench: Bench) -> None:
    """A fold that is built anew leaves a gap in the feed only where there is a feed."""
    for subscribed, dropped in ((False, 0), (True, 1)):
        if subscribed:
            bench.subscribe(DELTAS)
        bench.publish(200.0)
        allocate(bench, bench.ring.time_us + 1)
        bench.fold.num_rebuilds += 1
        bench.publish(300.0)
        assert bench.feed.dropped_events == dropped
