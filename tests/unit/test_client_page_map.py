"""The client's copy of a page map: whole snapshots, deltas that fit, and nothing else."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import DeadlineExceeded, Incomplete, Refused, ServerFailure, Unavailable
from kvatlas.client.page_map import PageMap
from kvatlas.client.sync import Client
from kvatlas.client.watch import Reconnect, watch_load
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import cache_pb2_grpc, server_pb2

FREE, ACTIVE, CACHED, RESERVED = (
    pb.PAGE_STATE_FREE,
    pb.PAGE_STATE_ACTIVE,
    pb.PAGE_STATE_CACHED,
    pb.PAGE_STATE_RESERVED,
)


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def u16(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


def sequence(owner: int, pages: tuple[int, ...], *, first: int = 0, tokens: int = 0) -> pb.SequenceInfo:
    return pb.SequenceInfo(
        request_id=f"r{owner}",
        owner=owner,
        page_ids=u32(*pages),
        first_page_index=first,
        token_count=tokens,
        state=pb.SEQUENCE_STATE_DECODE,
    )


def snapshot(
    states: list[int],
    *,
    number: int = 10,
    epoch: int = 1,
    left: int = 0,
    first: int = 0,
    total: int | None = None,
) -> pb.WatchPageMapResponse:
    chunk = pb.SnapshotChunk(
        geometry=pb.PoolGeometry(page_count=total or len(states), page_size=16, epoch=epoch)
        if first == 0
        else None,
        first_page_id=first,
        page_count=len(states),
        pages=pb.PageMap(states=bytes(states), owners=u16(*[0] * len(states))),
        chunks_left=left,
    )
    return pb.WatchPageMapResponse(revision=pb.Revision(epoch=epoch, number=number), snapshot=chunk)


def delta(base: int, number: int, *, epoch: int = 1, **fields: object) -> pb.WatchPageMapResponse:
    return pb.WatchPageMapResponse(
        revision=pb.Revision(epoch=epoch, number=number),
        base_number=base,
        delta=pb.PageDelta(**fields),  # type: ignore[arg-type]
    )


def test_a_snapshot_counts_when_its_last_part_is_there() -> None:
    page_map = PageMap()
    assert not page_map.apply(snapshot([FREE, ACTIVE], left=1, total=4))
    assert page_map.is_stale
    assert page_map.apply(snapshot([CACHED, RESERVED], first=2))
    assert page_map.counts() == {"free": 1, "active": 1, "cached": 1, "pinned": 0, "reserved": 1}
    assert not page_map.is_stale


def test_no_message_is_held_once_it_is_taken() -> None:
    """A part of a protobuf message keeps the memory of all of it, here of every plane."""
    held, taken = PageMap(), snapshot([FREE, CACHED])
    held.apply(taken)
    taken.snapshot.geometry.page_size = taken.revision.number = 99
    assert (held.geometry.page_size, held.revision.number) == (16, 10)
    window = pb.GetPageMapResponse(pages=pb.PageMap(states=bytes([FREE])), stats=pb.PoolStats(free_pages=1))
    held.take_window(window, taken.snapshot.geometry)
    window.stats.free_pages, taken.snapshot.geometry.page_size = 7, 5
    assert (held.stats.free_pages, held.geometry.page_size) == (1, 99)


def test_a_delta_changes_its_pages_and_no_others() -> None:
    page_map = PageMap()
    page_map.apply(snapshot([FREE, FREE, ACTIVE]))
    page_map.apply(delta(10, 12, page_ids=u32(0, 2), pages=pb.PageMap(states=bytes([ACTIVE, CACHED]))))
    assert page_map["states"].tolist() == [ACTIVE, FREE, CACHED]
    assert page_map.revision.number == 12


@pytest.mark.parametrize("wrong", [delta(9, 11), delta(11, 12), delta(10, 11, epoch=2)])
def test_a_delta_that_does_not_fit_is_an_error(wrong: pb.WatchPageMapResponse) -> None:
    page_map = PageMap()
    page_map.apply(snapshot([FREE]))
    with pytest.raises(Incomplete):
        page_map.apply(wrong)


def test_a_delta_before_a_snapshot_is_an_error() -> None:
    with pytest.raises(Incomplete):
        PageMap().apply(delta(0, 1))


def test_a_new_epoch_replaces_everything() -> None:
    page_map = PageMap()
    first = snapshot([ACTIVE, FREE])
    first.snapshot.sequences.append(sequence(1, (0,)))
    page_map.apply(first)
    page_map.apply(snapshot([FREE, FREE, FREE], epoch=2, number=0))
    assert page_map.counts()["free"] == 3
    assert page_map.sequences == {}


def test_the_old_map_stays_until_a_new_snapshot_is_whole() -> None:
    page_map = PageMap()
    page_map.apply(snapshot([ACTIVE]))
    page_map.apply(snapshot([FREE], left=1, total=2, number=20))
    assert page_map.counts()["active"] == 1
    assert page_map.is_stale


def test_snapshots_of_one_size_share_their_memory() -> None:
    """Who reads for days sees many: new arrays beside the old ones, again and again, scatter a heap."""
    page_map = PageMap()
    page_map.apply(snapshot([FREE, ACTIVE]))
    states = page_map["states"]
    page_map.apply(snapshot([CACHED], left=1, total=2, number=20))
    assert states.tolist() == [FREE, ACTIVE]
    page_map.apply(snapshot([RESERVED], first=1, number=20))
    assert page_map["states"] is states
    assert states.tolist() == [CACHED, RESERVED]
    page_map.apply(snapshot([FREE, FREE, FREE], epoch=2, number=0))
    assert states.tolist() == [CACHED, RESERVED]
    assert page_map["states"].tolist() == [FREE] * 3


def test_a_snapshot_that_does_not_fit_leaves_the_map_as_it_was() -> None:
    page_map = PageMap()
    page_map.apply(snapshot([FREE, ACTIVE]))
    with pytest.raises(Incomplete):
        page_map.apply(snapshot([CACHED], total=2, number=20))
    assert page_map["states"].tolist() == [FREE, ACTIVE]
    assert page_map.is_stale


def test_parts_of_a_broken_snapshot_are_not_mixed_with_the_next() -> None:
    page_map = PageMap()
    page_map.apply(snapshot([FREE, FREE], left=1, total=4))
    assert page_map.begin() is None
    assert page_map.apply(snapshot([ACTIVE, ACTIVE]))
    assert page_map.page_count == 2


def test_a_plane_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(Incomplete, match="plane states has 1 entries for 2 pages"):
        PageMap().apply(snapshot([FREE], total=2))


def test_sequences_keep_the_pages_that_did_not_change() -> None:
    page_map = PageMap()
    first = snapshot([ACTIVE] * 4)
    first.snapshot.sequences.append(sequence(1, (3, 2), tokens=20))
    page_map.apply(first)
    page_map.apply(delta(10, 11, sequences=[sequence(1, (0,), first=1, tokens=30)]))
    assert page_map.sequences[1].page_ids.tolist() == [3, 0]
    with pytest.raises(Incomplete, match="5 pages are to be kept"):
        page_map.apply(delta(11, 12, sequences=[sequence(1, (0,), first=5)]))


def test_a_sequence_too_long_for_a_part_goes_on_in_the_next() -> None:
    page_map = PageMap()
    part = snapshot([ACTIVE] * 3, left=1)
    part.snapshot.sequences.append(sequence(1, (0, 1)))
    rest = pb.WatchPageMapResponse(
        revision=part.revision, snapshot=pb.SnapshotChunk(sequences=[sequence(1, (2,), first=2)])
    )
    page_map.apply(part)
    page_map.apply(rest)
    assert page_map.sequences[1].page_ids.tolist() == [0, 1, 2]


def test_an_owner_given_again_within_a_delta_is_the_new_sequence() -> None:
    page_map = PageMap()
    first = snapshot([ACTIVE] * 2)
    first.snapshot.sequences.append(sequence(1, (0,)))
    page_map.apply(first)
    page_map.apply(delta(10, 15, ended_owners=u16(1), sequences=[sequence(1, (1,), tokens=5)]))
    assert page_map.sequences[1].page_ids.tolist() == [1]


def test_progress_and_ends_reach_their_sequences() -> None:
    page_map = PageMap()
    first = snapshot([ACTIVE] * 2)
    first.snapshot.sequences.extend([sequence(1, (0,), tokens=1), sequence(2, (1,), tokens=1)])
    page_map.apply(first)
    progress = pb.SequenceProgress(owners=u16(2, 9), token_counts=u32(8, 3))
    page_map.apply(delta(10, 11, progress=progress, ended_owners=u16(1)))
    assert {owner: s.token_count for owner, s in page_map.sequences.items()} == {2: 8}


def test_a_heartbeat_only_moves_the_revision() -> None:
    page_map = PageMap()
    page_map.apply(snapshot([FREE]))
    beat = pb.WatchPageMapResponse(
        revision=pb.Revision(epoch=1, number=10), base_number=10, heartbeat=pb.WatchHeartbeat()
    )
    assert page_map.apply(beat)


def test_a_watch_comes_back_ever_later_and_gives_up_in_time() -> None:
    now = [100.0]
    reconnect = Reconnect(5.0, lambda: now[0])
    lost = Unavailable("gone")
    waits = [reconnect.wait_seconds(lost) for _ in range(7)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    now[0] += 5.0
    with pytest.raises(Unavailable):
        reconnect.wait_seconds(lost)
    reconnect.succeeded()
    assert reconnect.wait_seconds(lost) == 0.1


def test_a_watch_whose_deadline_passes_goes_on_at_once_but_never_in_a_tight_loop() -> None:
    """A proxy that answers every connection with its own deadline was asked without a pause."""
    reconnect = Reconnect(0.0, lambda: 100.0)
    passed = DeadlineExceeded("the deadline of this connection")
    for _ in range(3):
        assert reconnect.wait_seconds(passed) == 0.0
        reconnect.succeeded()
    waits = [reconnect.wait_seconds(passed) for _ in range(7)]
    assert waits == [0.0, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_watch_that_was_refused_does_not_come_back() -> None:
    with pytest.raises(Refused):
        Reconnect(60.0, lambda: 0.0).wait_seconds(Refused("too many watches", reason="WATCH_LIMIT"))


def test_a_watch_survives_a_broken_connection_and_no_failure_that_its_server_tells() -> None:
    broken = ServerFailure("RST_STREAM", code="INTERNAL")
    assert Reconnect(60.0, lambda: 0.0).wait_seconds(broken) == 0.1
    told = ServerFailure("a bug", code="INTERNAL", reason="INTERNAL")
    with pytest.raises(ServerFailure):
        Reconnect(60.0, lambda: 0.0).wait_seconds(told)


def test_each_loss_of_a_watch_is_the_first_again_once_a_message_came() -> None:
    watch = watch_load(1.0, 60.0)
    lost = Unavailable("gone")
    for _ in range(3):
        assert [watch.reconnect.wait_seconds(lost) for _ in range(3)] == [0.1, 0.2, 0.4]
        message = server_pb2.WatchLoadResponse(load=server_pb2.Load(active_requests=3))
        assert watch.take(message) == message.load


class SilentServer(cache_pb2_grpc.CacheServiceServicer):
    """Of a worker that was lost before it had told its pages."""

    def __init__(self) -> None:
        self.calls = 0

    def WatchPageMap(self, request: Any, context: Any) -> Iterator[pb.WatchPageMapResponse]:
        self.calls += 1
        over = threading.Event()
        context.add_callback(over.set)
        over.wait(60)
        yield from ()


def test_a_look_at_a_map_that_never_comes_ends_at_its_deadline() -> None:
    """It was asked for again after each half hour, without end and without a word."""
    server, silent = grpc.server(futures.ThreadPoolExecutor(4)), SilentServer()
    cache_pb2_grpc.add_CacheServiceServicer_to_server(silent, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    async def look() -> None:
        async with AsyncClient(address, timeout_seconds=0.5) as client:
            await client.page_map()

    with Client(address, timeout_seconds=0.5) as client, pytest.raises(DeadlineExceeded):
        client.page_map()
    with pytest.raises(DeadlineExceeded):
        asyncio.run(look())
    assert silent.calls == 2
    server.stop(0).wait()


def waiting(request_id: str, *, state: int = pb.SEQUENCE_STATE_WAITING) -> pb.SequenceInfo:
    info = pb.SequenceInfo(request_id=request_id, needed_pages=7, wait_reason=pb.WAIT_REASON_PAGES)
    info.state = state  # type: ignore[assignment]
    return info


def test_a_sequence_that_waits_is_known_until_it_runs_or_ends() -> None:
    page_map = PageMap()
    page_map.apply(snapshot([FREE, FREE]))
    page_map.apply(delta(10, 11, sequences=[waiting("a"), waiting("b")]))
    assert {name for name, _ in page_map.waiting} == {"a", "b"}
    held = page_map.waiting["a", 0]
    assert (held.state, held.wait_reason, held.needed_pages) == ("waiting", "pages", 7)
    runs = sequence(4, (1,))
    runs.request_id = "a"
    page_map.apply(delta(11, 12, sequences=[runs]))
    assert page_map.waiting.keys() == {("b", 0)}
    assert page_map.sequences[4].wait_reason == ""
    page_map.apply(delta(12, 13, sequences=[waiting("b", state=pb.SEQUENCE_STATE_UNSPECIFIED)]))
    assert page_map.waiting == {}
