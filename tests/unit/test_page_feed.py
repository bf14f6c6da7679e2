"""The worker's page feed: what it says of its clock, and of what nobody listened to."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvatlas.worker.v1 import worker_pb2
from worker.channels import Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.link import publisher
from worker.link.addresses import last_endpoint
from worker.link.publisher import DELTAS, EVENTS, PUBLISH_SECONDS, SIGN_OF_LIFE_SECONDS, PageFeed
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
    Ticket,
)
from worker.pages.events import EventRing
from worker.pages.pool import PagePool
from worker.readers import delta
from worker.readers.audit import Finding
from worker.readers.metric_table import CHECKS
from worker.readers.observer import Fold

EPOCH = 1_700_000_000_000_000_000


class Bench:
    """A feed with a pool of four pages, its fold, and a subscriber."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
        self.ring = EventRing(1024)
        self.pool = PagePool(4, 16, self.ring)
        self.fold = Fold(4, 16)
        self.calls: Handover[ObserverCall] = Handover(8)
        self.answers: OutputQueue[LinkMessage] = OutputQueue(1000)
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

    def look(self) -> None:
        """The fold takes what came."""
        events = self.ring.read(self.fold.ledger.revision)
        assert events is not None
        self.fold.ledger.fold(events)

    def publish(self, now: float) -> None:
        self.look()
        self.feed.publish(self.fold, self.fold.pool(), now)

    def messages(self) -> list[worker_pb2.PageFeed]:
        """What has been sent and not been read, up to a mark that is sent behind it."""
        self.feed._send(DELTAS, b"mark")
        self.feed._send(EVENTS, b"mark")
        found: list[bytes] = []
        for _ in self.feed.topics:
            while (data := self.subscriber.recv_multipart()[1]) != b"mark":
                found.append(data)
        return [worker_pb2.PageFeed.FromString(data) for data in found]

    def ask(self, call: ObserverCall) -> None:
        assert self.calls.put(call)

    def replies(self) -> list[worker_pb2.CommandReply]:
        """Answers, each checked to be the last of its call where it says so."""
        found = []
        for answer in self.answers.take(1000):
            assert isinstance(answer, EncodedReply), answer
            found.append(worker_pb2.CommandReply.FromString(answer.payload))
            assert (found[-1].command_id, found[-1].more) == (answer.ticket.command_id, not answer.is_last)
        return found

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


TICKET = Ticket("peer", 5)


def touch(bench: Bench, times: int) -> None:
    """A page is taken and given back: three page events."""
    for _ in range(times):
        pages = bench.pool.allocate(array("H", (1,)))
        assert pages is not None
        bench.pool.release(pages, 1)


def test_deltas_join_on_to_one_another_and_an_empty_one_is_a_sign_of_life(bench: Bench) -> None:
    bench.subscribe(DELTAS)
    bench.messages()
    now = 200.0
    bench.publish(now)
    bench.messages()
    allocate(bench, 1)
    assert bench.feed.publish(bench.fold, bench.fold.pool(), now + 0.04) == pytest.approx(0.06)
    assert bench.messages() == [], "not before its time"
    now += PUBLISH_SECONDS
    bench.publish(now)
    allocate(bench, 2)
    now += PUBLISH_SECONDS
    bench.publish(now)
    first, second = bench.messages()
    assert (first.base_number, first.revision.number) == (0, bench.ring.number - 1)
    assert (second.base_number, second.revision.number) == (first.revision.number, bench.ring.number)
    assert second.delta.merged_events == 1
    now += PUBLISH_SECONDS
    bench.publish(now)
    assert bench.messages() == [], "nothing has changed"
    now += SIGN_OF_LIFE_SECONDS
    bench.publish(now)
    (sign,) = bench.messages()
    assert (sign.base_number, sign.revision.number, sign.delta.page_ids) == (2, 2, b"")
    now += PUBLISH_SECONDS
    bench.publish(now)
    assert bench.messages() == [], "one of them is enough for its time"


class Guard:
    """A doorkeeper's place."""

    def __init__(self) -> None:
        self.guarded: list[str] = []  # where each socket was bound already

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        self.guarded.append(last_endpoint(socket))


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_feed_on_tcp_is_guarded_before_it_is_bound_and_holds_few_messages(
    bench: Bench, tmp_path: Path, transport: str
) -> None:
    guard, context = Guard(), bench.subscriber.context
    feed = PageFeed(
        context,
        f"ipc://{tmp_path}/guarded" if transport == "ipc" else "tcp://127.0.0.1:0",
        description=bench.feed.description,
        ring=bench.ring,
        calls=bench.calls,
        answers=bench.answers,
        start_time=0.0,
        doorkeeper=guard,  # type: ignore[arg-type]
    )
    assert guard.guarded == ([""] if transport == "tcp" else [])
    assert feed._socket.get(zmq.SNDHWM) == publisher.SEND_HIGH_WATER_MARK
    assert feed.description.pages_address.startswith(f"{transport}://")
    feed.close()


def test_what_changed_while_nobody_listened_is_in_no_delta(bench: Bench) -> None:
    touch(bench, 1)
    bench.publish(200.0)
    bench.subscribe(DELTAS)
    bench.messages()
    bench.publish(300.0)
    (sign,) = bench.messages()
    assert (sign.base_number, sign.delta.page_ids) == (3, b"")
    bench.subscriber.unsubscribe(DELTAS)
    while bench.feed.topics:
        bench.publish(300.0)


def test_nothing_is_made_for_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(bench.feed, "_send", lambda topic, data: sent.append(topic))
    touch(bench, 2)
    bench.publish(200.0)
    assert sent == []


def test_topics_that_are_none_of_ours_are_not_listened_to(bench: Bench) -> None:
    bench.subscriber.subscribe(b"x")
    bench.subscribe(EVENTS)
    assert bench.feed.topics == {EVENTS}


def test_a_flood_of_subscriptions_ends_a_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sent nothing else kept the thread of the page map for itself."""

    class Flood:
        num_read = 0

        def recv(self, flags: int) -> bytes:
            self.num_read += 1
            assert self.num_read < 10_000, "read for ever"
            return b"\x01x"

    with monkeypatch.context() as patch:
        patch.setattr(bench.feed, "_socket", Flood())
        bench.publish(200.0)


def test_events_come_from_the_subscription_on_in_messages_that_join(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "MAX_EVENTS_PER_MESSAGE", 4)
    touch(bench, 1)
    bench.publish(150.0)
    bench.subscribe(EVENTS)
    touch(bench, 3)
    bench.fold.ended_owners = [5]
    bench.publish(200.0)
    heard = bench.messages()
    assert [array("H", one.events.ended_owners).tolist() for one in heard] == [[5], [], []], "told once"
    assert [(one.base_number, one.revision.number) for one in heard] == [(3, 7), (7, 11), (11, 12)]
    assert [len(one.events.types) for one in heard] == [4, 4, 1]
    bench.publish(300.0)
    assert bench.messages() == []
    assert bench.feed.dropped_events == 0


def test_events_that_are_gone_before_they_were_sent_are_counted(bench: Bench) -> None:
    bench.subscribe(EVENTS)
    touch(bench, 1)
    bench.publish(200.0)
    assert len(bench.messages()) == 1
    for _ in range(4):
        touch(bench, 100)
        bench.look()
    bench.publish(300.0)
    assert bench.messages() == []
    assert bench.feed.dropped_events == 1200
    touch(bench, 1)
    bench.publish(400.0)
    (following,) = bench.messages()
    assert following.base_number == 1203, "a gap that readers see"


def test_a_fold_that_is_built_anew_is_told_at_once_and_begins_with_a_gap(bench: Bench) -> None:
    bench.subscribe(DELTAS)
    bench.publish(200.0)
    bench.messages()
    touch(bench, 2)
    bench.fold.num_rebuilds += 1
    bench.publish(200.01)
    (sign,) = bench.messages()
    assert (sign.base_number, sign.revision.number, sign.delta.page_ids) == (6, 6, b"")
    touch(bench, 1)
    bench.publish(200.2)
    (following,) = bench.messages()
    assert (following.base_number, len(following.delta.page_ids)) == (6, 4), "one page; and once only"
    assert bench.feed.dropped_events == 6


def test_findings_go_out_once_and_at_once_with_a_delta(bench: Bench) -> None:
    bench.subscribe(DELTAS)
    bench.publish(200.0)
    bench.messages()
    found = Finding(CHECKS[0], "page 3", "1", "2", page=3)
    bench.fold.findings = [found]
    bench.publish(200.05)
    bench.fold.findings = []
    assert bench.messages() == []
    bench.publish(200.1)
    (told,) = bench.messages()
    assert [(one.subject, one.expected, one.found) for one in told.violations] == [("page 3", "1", "2")]
    bench.publish(300.0)
    (sign,) = bench.messages()
    assert not sign.violations


def test_findings_that_nobody_listened_to_are_not_kept(bench: Bench) -> None:
    bench.fold.findings = [Finding(CHECKS[0], "page 3", "1", "2")]
    bench.publish(200.0)
    bench.fold.findings = []
    bench.subscribe(DELTAS)
    bench.messages()
    bench.publish(300.0)
    (sign,) = bench.messages()
    assert not sign.violations


def test_a_snapshot_lies_on_a_delta_and_its_parts_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MAX_PAGES_PER_PART", 2)
    bench.subscribe(DELTAS)
    bench.publish(200.0)
    bench.messages()
    allocate(bench, 1)
    bench.ask(SnapshotCall(TICKET))
    bench.publish(200.01)
    (on,) = bench.messages()
    parts = bench.replies()
    assert [(part.snapshot.chunk.first_page_id, part.more) for part in parts] == [
        (0, True),
        (2, True),
        (4, False),
    ]
    assert {part.snapshot.revision.number for part in parts} == {on.revision.number}
    assert [part.snapshot.chunk.HasField("geometry") for part in parts] == [True, False, False]


def test_what_audits_found_is_answered(bench: Bench) -> None:
    bench.fold.audits.findings.append(Finding(CHECKS[0], "page 3", "1", "2"))
    bench.ask(IntegrityCall(TICKET))
    bench.publish(200.0)
    (reply,) = bench.replies()
    assert [one.subject for one in reply.integrity.violations] == ["page 3"]


def test_events_are_had_again_in_parts_to_the_newest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MAX_EVENTS_PER_MESSAGE", 4)
    touch(bench, 3)
    for after, wanted in ((0, [4, 4, 1]), (1, [4, 4]), (8, [1]), (9, [0])):
        bench.ask(ReplayCall(TICKET, after, False))
        bench.publish(200.0)
        parts = bench.replies()
        assert [len(part.events.types) for part in parts] == wanted
        assert parts[0].events.first_number == after + 1
        assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]


def test_events_that_are_not_there_yet_or_no_more_are_out_of_range(bench: Bench) -> None:
    for _ in range(4):
        touch(bench, 100)
        bench.publish(200.0)
    for after, reason, words in (
        (1201, CallReason.INVALID_FIELD, "is not there yet"),
        (2**64 - 1, CallReason.INVALID_FIELD, "is not there yet"),
        (0, CallReason.NONE, "no longer has event 1"),
    ):
        bench.ask(ReplayCall(TICKET, after, False))
        bench.publish(200.0)
        (failure,) = bench.answers.take(8)
        assert isinstance(failure, CallFailure)
        assert (failure.ticket, failure.error, failure.reason) == (TICKET, CallError.OUT_OF_RANGE, reason)
        assert words in failure.message
