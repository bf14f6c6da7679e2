"""A worker's pages as services see them: the audit, the map and its feed, rows, events, pins."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from tests.worker_on_thread import Running, config_in, settled
from worker.link.testing_bench import until


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(config_in(tmp_path)) as made:
        yield made


def test_a_planted_leak_is_counted_told_and_found_by_a_full_check(tmp_path: Path) -> None:
    """S1-35, S1-36: metrics, the feed and both calls tell of the same page; the worker goes on serving."""
    running = Running(config_in(tmp_path, debug_faults="page_leak", audit_interval=0.05, fake_step_ms=1.0))
    try:
        service = running.ready_service()
        service.subscribe(b"d")
        first = service.add(list(range(20)), max_tokens=30)
        service.finish(first)
        failed = {"check": "refcount", "result": "fail"}
        until(lambda: running.metric("kvatlas_integrity_checks_total", **failed) >= 2)
        until(lambda: running.metric("kvatlas_pages", state="active") == 1)
        until(lambda: running.metric("kvatlas_requests_running") == 0)
        service.wait(lambda: any(feed.violations for feed in service.feeds))
        told = next(feed.violations[0] for feed in service.feeds if feed.violations)
        assert told.check == cache_pb2.INTEGRITY_CHECK_REFCOUNT
        asked = worker_pb2.Command(integrity=cache_pb2.GetIntegrityRequest())
        (reply,) = service.command(asked)
        checks = {stats.check: stats for stats in reply.integrity.checks}
        assert len(checks) == 6
        assert checks[cache_pb2.INTEGRITY_CHECK_REFCOUNT].fail_count >= 2
        assert checks[cache_pb2.INTEGRITY_CHECK_TRIE].fail_count == 0
        assert checks[cache_pb2.INTEGRITY_CHECK_TRIE].pass_count >= 2
        assert not reply.integrity.HasField("last_success_time")
        pages = {v.page_id for v in reply.integrity.violations if v.HasField("page_id")}
        full = worker_pb2.Command(check_integrity=cache_pb2.RunIntegrityCheckRequest())
        (reply,) = service.command(full)
        report = reply.check_integrity
        assert (report.checked_pages, report.violations_total) == (64, len(report.violations))
        assert {v.page_id for v in report.violations if v.HasField("page_id")} == pages
        assert {(v.expected, v.found) for v in report.violations if v.HasField("page_id")} == {("0", "1")}
        service.finish(service.add(list(range(9)), max_tokens=3))
    finally:
        running.close()


def test_a_full_check_of_a_sound_worker_under_load_finds_nothing_and_compares_rows(tmp_path: Path) -> None:
    running = Running(config_in(tmp_path, fake_step_ms=50.0, num_pages=20_000))
    try:
        service = running.ready_service()
        ids = [service.add([number] * 10, max_tokens=1500) for number in range(4)]
        service.wait(lambda: all(service.answers[number].tokens for number in ids))
        full = worker_pb2.Command(check_integrity=cache_pb2.RunIntegrityCheckRequest())
        (reply,) = service.command(full)
        report = reply.check_integrity
        assert report.violations_total == 0
        assert (report.checked_pages, report.checked_rows, report.round_count) == (20_000, 4, 10)
        assert report.last_revision.number >= report.first_revision.number > 0
        assert report.engine_time.ToNanoseconds() > 0
    finally:
        running.close()


def test_snapshot_feed_and_rows_tell_one_story(running: Running) -> None:
    service = running.ready_service()
    service.subscribe(b"d")
    first = service.add(list(range(20)), max_tokens=100, samples=2)
    service.wait(lambda: len(service.answers[first].tokens) == 100)
    service.finish(first, first + 1)
    settled(running)
    replies = service.command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    (reply,) = replies
    chunk, stats = reply.snapshot.chunk, reply.snapshot.stats
    states = list(chunk.pages.states)
    assert len(states) == 65
    assert [states.count(state) for state in (1, 2, 3, 4, 5)] == [
        stats.free_pages,
        stats.active_pages,
        stats.cached_pages,
        stats.pinned_pages,
        stats.reserved_pages,
    ]
    assert chunk.geometry.page_count == 65
    assert chunk.chunks_left == 0
    fingerprints = array("Q", chunk.pages.fingerprints)
    assert all((state == 3) == bool(print_) for state, print_ in zip(states, fingerprints, strict=True))
    number = reply.snapshot.revision.number
    service.wait(lambda: bool(service.feeds) and service.feeds[-1].revision.number == number)
    assert service.feeds[-1].stats == stats


@pytest.mark.parametrize("from_device", [False, True])
def test_rows_of_the_page_table_hold_the_slots_of_the_pages(tmp_path: Path, from_device: bool) -> None:
    """S1-04, S1-07: entries are slots, consecutive within a page; the dummy row is the dummy page (S1-27)."""
    running = Running(config_in(tmp_path, fake_step_ms=50.0, num_pages=1200))
    try:
        service = running.ready_service()
        ids = [service.add([number] * 10, max_tokens=1500) for number in range(3)]
        service.wait(lambda: all(service.answers[number].tokens for number in ids))
        asked = cache_pb2.GetPageTableRequest(from_device=from_device)
        replies = [reply.page_table for reply in service.command(worker_pb2.Command(page_table=asked))]
        assert [row.rows_left for row in replies] == [2, 1, 0]
        assert {row.request_id for row in replies} == {f"r{number}" for number in ids}
        for row in replies:
            slots = array("i", row.slots).tolist()
            assert len(slots) % 4 == 0
            assert len(slots) >= row.token_count > 0
            for at in range(0, len(slots), 4):
                assert slots[at] % 4 == 0
                assert slots[at : at + 4] == list(range(slots[at], slots[at] + 4))
        asked = cache_pb2.GetPageTableRequest(rows=[8, 7], from_device=from_device)
        replies = []
        while not replies or replies[0].code == 8:  # from the device: one call a second
            replies = service.command(worker_pb2.Command(page_table=asked))
        dummy, unused = [reply.page_table for reply in replies]
        assert set(array("i", dummy.slots)) == {1200 * 4}
        assert (dummy.owner, unused.owner, unused.slots) == (0, 0, b"")
        bad = cache_pb2.GetPageTableRequest(rows=[9])
        assert service.command(worker_pb2.Command(page_table=bad))[0].code == 3
    finally:
        running.close()


def test_events_come_without_gaps_and_can_be_had_again(tmp_path: Path) -> None:
    running = Running(config_in(tmp_path, fake_step_ms=5.0, num_pages=200))
    try:
        check_events(running)
    finally:
        running.close()


def check_events(running: Running) -> None:
    service = running.ready_service()
    service.subscribe(b"e")
    service.wait(lambda: b"e" in running.worker.feed.topics)
    ids = [service.add([number] * 9, samples=2, max_tokens=60) for number in range(5)]
    service.finish(*ids, *[number + 1 for number in ids])
    last = settled(running)
    service.wait(lambda: bool(service.feeds) and service.feeds[-1].revision.number == last)
    numbers = []
    for feed in service.feeds:
        assert feed.base_number + 1 == feed.events.first_number
        numbers += range(feed.events.first_number, feed.events.first_number + len(feed.events.types))
    assert numbers == list(range(1, last + 1))
    started = {info.request_id for feed in service.feeds for info in feed.events.started_sequences}
    assert started == {f"r{number}" for number in ids}
    request = worker_pb2.ReplayRequest(after_number=3, include_token_ids=True)
    replies = service.command(worker_pb2.Command(replay=request))
    assert sum(len(reply.events.types) for reply in replies) == last - 3
    assert replies[0].events.first_number == 4
    sealed = sum(reply.events.types.count(3) for reply in replies)
    assert sum(len(reply.events.token_ids) for reply in replies) == sealed * 4 * 4
    ahead = worker_pb2.ReplayRequest(after_number=last + 1)
    assert service.command(worker_pb2.Command(replay=ahead))[0].code == 11


def test_no_map_is_ahead_of_its_events(running: Running) -> None:
    """Else a page was told with the events of who had it before."""
    service = running.ready_service()
    service.subscribe(b"d", b"e")
    service.wait(lambda: running.worker.feed.topics == {b"d", b"e"})
    ids = [service.add([number] * 9, max_tokens=60) for number in range(5)]
    service.finish(*ids)
    last, told = settled(running), 0
    service.wait(
        lambda: any(
            feed.WhichOneof("feed") == "delta" and feed.revision.number == last for feed in service.feeds
        )
    )
    for feed in service.feeds:
        if feed.WhichOneof("feed") == "events":
            told = feed.revision.number
        else:
            assert told >= feed.revision.number
    assert told == last > 0


def test_nothing_is_encoded_without_a_subscriber_and_subscribers_come_and_go(running: Running) -> None:
    service = running.ready_service()
    assert running.worker.feed.topics == set()
    service.subscribe(b"d", b"e", b"x")
    until(lambda: running.worker.feed.topics == {b"d", b"e"})
    service.unsubscribe(b"e")
    until(lambda: running.worker.feed.topics == {b"d"})
    service.wait(lambda: len(service.feeds) >= 2)  # signs of life, though nothing happens
    assert {feed.WhichOneof("feed") for feed in service.feeds} == {"delta"}
    assert service.feeds[-1].base_number == service.feeds[-1].revision.number
    service.unsubscribe(b"d")
    until(lambda: running.worker.feed.topics == set())


def test_flush_and_pins_over_the_seam(running: Running) -> None:
    service = running.ready_service()
    service.finish(service.add([7] * 12))
    pin = worker_pb2.PinPrefix(
        name="p", token_ids=array("I", [9] * 10).tobytes(), cache_salt=b"tenant\0", ttl_ms=60_000
    )
    (pinned,) = service.command(worker_pb2.Command(pin=pin))
    assert (pinned.pin.pinned_pages, pinned.pin.pinned_tokens, pinned.pin.tenant) == (2, 8, "tenant")
    assert pinned.pin.HasField("expire_time")
    until(lambda: running.metric("kvatlas_pages", state="pinned") == 2)
    (other,) = service.command(worker_pb2.Command(flush=server_pb2.FlushPrefixCacheRequest(tenant="x")))
    assert other.flush.freed_pages == 0
    (flushed,) = service.command(worker_pb2.Command(flush=server_pb2.FlushPrefixCacheRequest()))
    assert flushed.flush.freed_pages > 0
    (listed,) = service.command(worker_pb2.Command(list_pins=server_pb2.ListPinnedPrefixesRequest()))
    assert [entry.name for entry in listed.pins.pins] == ["p"]
    hit = service.add([9] * 10)
    service.finish(hit)
    start = next(start for start in service.starts if start.sequence_id == hit)
    assert start.prefix.hit_tokens == 8
    service.command(worker_pb2.Command(pin=worker_pb2.PinPrefix(name="p")))
    until(lambda: running.metric("kvatlas_pages", state="pinned") == 0)
