"""What a worker encodes, the service decodes: deltas, snapshots, events; and what a caller may see of it."""

from array import array
from typing import Any

import numpy as np
import pytest

from kvatlas.v1 import cache_pb2
from kvatlas.worker.v1 import worker_pb2
from service.fleet import page_codec
from service.fleet.event_ring import EventRing as MirroredRing
from service.fleet.feed import NO_PAGES, PLANES, EndedSequence, PoolTotals, Revision, SequenceRecord
from service.fleet.page_watch import MapChange
from service.handlers import cache_messages
from service.handlers.cache_messages import Viewer
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.ids import Owner, PageId, Row, SequenceId
from worker.link import page_codec as workers_codec
from worker.pages.events import EventColumns, EventRing
from worker.readers.delta import FeedDelta, PagePlanes
from worker.stats import EngineCounts, SequenceState, SequenceView, WaitReason
from worker.stats import PoolTotals as WorkersTotals

WORKER = WorkerDescription(
    "w", 6, ModelDescription("m", 97, 128), PoolDescription(60, 4, 8, 128, "lru"), 8, 128, 1, (), "", b""
)
POOL = WorkersTotals(8, 7, 40, 11, 5, 4, 1, shared_pages=2, references=13, unfilled_slots=12)
COUNTS = EngineCounts(hit_tokens_total=64, preemptions_total=3)
ADMIN, STRANGER, OWN = Viewer(is_admin=True), Viewer("other"), Viewer("acme")


def view(**changes: Any) -> SequenceView:
    values: dict[str, Any] = {
        "sequence_id": SequenceId(1),
        "request_id": "r-1",
        "choice_index": 2,
        "owner": Owner(7),
        "row": Row(0),
        "state": SequenceState.DECODE,
        "page_ids": (PageId(3), PageId(9)),
        "first_page_index": 4,
        "token_count": 90,
        "prompt_tokens": 80,
        "prefix": (64, 0, 0, 16),
        "priority": -5,
        "preemptions": 1,
        "receive_time_ns": 1_700_000_000_123_456_789,
        "wait_reason": WaitReason.NONE,
        "needed_pages": 0,
        "tenant": "acme",
        "labels": {"team": "x"},
    }
    return SequenceView(**{**values, **changes})


def planes(count: int) -> PagePlanes:
    rng = np.random.default_rng(1)
    made = {name: rng.integers(0, 200, count).astype(kind) for name, kind in PLANES.items()}
    return PagePlanes(*made.values())  # type: ignore[arg-type]


def test_sequences_survive_the_wire() -> None:
    change = page_codec.decode_sequence(workers_codec.sequence_info(view()))
    record = change.record
    assert change.first_page_index == 4
    assert record.pages.tolist() == [3, 9]
    assert (record.owner, record.row, record.state, record.prefix) == (7, 0, 3, (64, 0, 0, 16))
    assert record.key == ("r-1", 2, 1_700_000_000_123_456_789)
    assert (record.tenant, record.labels, record.priority) == ("acme", {"team": "x"}, -5)
    waiting = page_codec.decode_sequence(workers_codec.sequence_info(view(owner=0, row=None, prefix=None)))
    assert (waiting.record.row, waiting.record.prefix) == (None, None)


def test_a_delta_survives_the_wire_with_ends_apart_from_changes() -> None:
    pages = planes(3)
    delta = FeedDelta(
        base_number=5,
        page_ids=np.array([1, 4, 8], np.uint32),
        pages=pages,
        sequences=[view()],
        progress_owners=np.array([2, 3], np.uint16),
        progress_tokens=np.array([20, 30], np.uint32),
        ended_owners=[9],
        ended_waiting=[view(request_id="w", owner=0)],
    )
    message = workers_codec.delta_feed(
        delta, description=WORKER, pool=POOL, counts=COUNTS, num_events=4, time_ns=1_700_000_000_123_456_789
    )
    decoded = page_codec.decode_delta(message.SerializeToString())
    assert (decoded.base_number, decoded.revision) == (5, Revision(epoch=6, number=8, step=7))
    assert decoded.observe_time_ns == 1_700_000_000_123_456_789
    assert (decoded.totals.free_pages, decoded.totals.shared_pages, decoded.totals.wasted_slots) == (
        40,
        2,
        12,
    )
    assert (decoded.totals.hit_tokens_total, decoded.totals.preemptions_total) == (64, 3)
    assert decoded.page_ids.tolist() == [1, 4, 8]
    for name, plane in zip(
        PLANES, (getattr(pages, field) for field in PagePlanes.__dataclass_fields__), strict=True
    ):
        assert decoded.planes[name].tolist() == plane.tolist(), name
    assert [change.record.request_id for change in decoded.sequences] == ["r-1"]
    assert dict(zip(decoded.progress_owners.tolist(), decoded.progress_tokens.tolist(), strict=True)) == {
        2: 20,
        3: 30,
    }
    assert list(decoded.ended_owners) == [9]
    assert ("w", 2) in [(ended.request_id, ended.choice_index) for ended in decoded.ended]


def test_what_a_worker_tells_of_a_sequence_is_what_an_admin_is_told() -> None:
    waits = view(first_page_index=0, wait_reason=WaitReason.PAGES, needed_pages=5)
    told = workers_codec.sequence_info(waits)
    set_fields = {field.name for field, _ in told.ListFields()}
    assert set_fields == {field.name for field in told.DESCRIPTOR.fields} - {"first_page_index"}
    assert cache_messages.sequence(page_codec.decode_sequence(told).record, ADMIN, 90) == told


def test_a_watcher_is_told_what_changed_in_the_form_in_which_the_worker_told_it() -> None:
    change = MapChange(
        base_number=5,
        revision=Revision(6, 8, 7),
        observe_time_ns=1,
        totals=PoolTotals(),
        page_ids=np.array([1, 4], np.uint32),
        planes={"states": np.array([2, 3], np.uint8)},
        sequences=[(record(pages=3), 1, 9), (record("rest", owner=0), 0, 0)],
        progress_owners=np.array([2, 3], np.uint16),
        progress_tokens=np.array([20, 30], np.uint32),
        ended_owners=np.array([9], np.uint16),
        ended=[EndedSequence("mine", 1, "acme"), EndedSequence("other's", 2, "rest")],
    )
    told = cache_messages.delta(change, OWN, with_sequences=True, merged_events=3)
    assert (told.page_ids, told.pages.states, told.merged_events) == (
        bytes((1, 0, 0, 0, 4, 0, 0, 0)),
        b"\2\3",
        3,
    )
    assert [each.request_id for each in told.sequences] == ["r-1", "mine"]
    changed, ended = told.sequences
    assert (changed.first_page_index, changed.token_count, changed.owner) == (1, 9, 7)
    assert np.frombuffer(changed.page_ids, "<u4").tolist() == [1, 2]
    assert (ended.choice_index, ended.state) == (1, 0)
    assert (told.progress.owners, told.ended_owners) == (bytes((2, 0, 3, 0)), bytes((9, 0)))
    assert np.frombuffer(told.progress.token_counts, "<u4").tolist() == [20, 30]
    alone = cache_messages.delta(change, OWN, with_sequences=False, merged_events=3)
    assert {field.name for field, _ in alone.ListFields()} == {"page_ids", "pages", "merged_events"}


def test_events_survive_the_wire_both_ways() -> None:
    """Steps and times are relative on the wire and absolute here."""
    count, start_ns = 4, 1_700_000_000_000_000_000
    columns = EventColumns(
        first_number=100,
        kinds=bytes([1, 3, 4, 7]),
        pages=array("I", [5, 5, 5, 5]),
        owners=array("H", [2, 2, 2, 0]),
        refs=array("H", [1, 1, 0, 0]),
        others=array("I", [0xFFFFFFFF] * count),
        tags=array("Q", [0, 77, 0, 0]),
        steps=array("Q", [50, 51, 52, 53]),
        times_us=array("Q", [10, 20, 30, 40]),
        tokens=(),
    )
    wire = workers_codec.event_batch(
        columns, epoch_ns=start_ns, page_size=16, started=[view()], ended_owners=[2]
    )
    decoded = page_codec.decode_events(wire)
    assert (decoded.first_number, decoded.last_number) == (100, 103)
    assert decoded.planes["steps"].tolist() == [50, 51, 52, 53]
    assert decoded.planes["times_us"].tolist() == [start_ns // 1000 + t for t in (10, 20, 30, 40)]
    assert decoded.planes["fingerprints"].tolist() == [0, 77, 0, 0]
    again = cache_messages.events(decoded, ADMIN)
    for name in (
        "types",
        "page_ids",
        "owners",
        "ref_counts",
        "step_offsets",
        "time_offsets_us",
        "fingerprints",
    ):
        assert getattr(again, name) == getattr(wire, name), name
    assert (again.first_step, again.first_time) == (wire.first_step, wire.first_time)
    assert again.ended_owners == wire.ended_owners


HOUR_US = 3_600_000_000


def test_events_of_a_worker_that_idled_for_hours_keep_their_times() -> None:
    """Offsets in a batch have 32 bits: after 71 minutes times began again at its first event's."""
    ring, times = EventRing(64), []
    for number in range(1, 41):
        ring.time_us = number // 4 * HOUR_US
        times.append(ring.time_us)
        ring.append(kind=3, page=number, owner=1, refs=1)
    mirrored, after, batches = MirroredRing(64), 0, 0
    while after < ring.number:
        events = ring.read(after)
        assert events is not None
        decoded = page_codec.decode_events(workers_codec.event_batch(events, epoch_ns=0, page_size=16))
        mirrored.append(decoded)
        after, batches = decoded.last_number, batches + 1
    assert batches == 6, "two of those hours fit a batch"
    assert [mirrored.of_page(number, 1, after)[0][1]["times_us"] for number in range(1, 41)] == times
    told: list[int] = []
    while len(told) < len(times):
        columns = mirrored.after(len(told))
        assert columns is not None
        again = page_codec.decode_events(cache_messages.events(columns, ADMIN))
        told += again.planes["times_us"].tolist()
    assert told == times


def test_planes_that_do_not_fit_together_are_refused() -> None:
    feed = worker_pb2.PageFeed()
    feed.delta.page_ids = array("I", [1, 2]).tobytes()
    with pytest.raises(ValueError, match="2 entries"):
        page_codec.decode_delta(feed.SerializeToString())
    feed = worker_pb2.PageFeed()
    feed.delta.progress.owners = array("H", [1, 2]).tobytes()
    with pytest.raises(ValueError, match="2 owners with 0"):
        page_codec.decode_delta(feed.SerializeToString())
    with pytest.raises(ValueError, match="differ in length"):
        page_codec.decode_events(cache_pb2.PageEventBatch(types=b"\1\2", page_ids=b"\0\0\0\0"))


def test_totals_survive_the_wire() -> None:
    totals = PoolTotals(*range(1, 17))
    assert page_codec.decode_totals(cache_messages.stats(totals)) == totals


# -- privacy -----------------------------------------------------------------------------------------------


def record(tenant: str = "acme", owner: int = 7, pages: int = 3) -> SequenceRecord:
    ids = np.arange(pages, dtype=np.uint32)
    return SequenceRecord(
        "r-1", 0, owner, 0, 3, ids, 9, tenant=tenant, labels={"team": "x"}, receive_time_ns=1
    )


@pytest.mark.parametrize(
    ("viewer", "request_id", "tenant", "labels"),
    [(ADMIN, "r-1", "acme", {"team": "x"}), (OWN, "r-1", "", {}), (STRANGER, "", "", {})],
)
def test_names_labels_and_tenants_are_for_those_who_may_see_them(
    viewer: Viewer, request_id: str, tenant: str, labels: dict[str, str]
) -> None:
    info = cache_messages.sequence(record(), viewer, 9)
    assert (info.request_id, info.tenant, dict(info.labels)) == (request_id, tenant, labels)
    assert np.frombuffer(info.page_ids, "<u4").tolist() == [0, 1, 2]


def test_a_watcher_is_not_told_of_waiting_sequences_that_he_may_not_name() -> None:
    """They have no name but their request id, so he could not follow them either."""
    waiting = record(owner=0)
    assert [cache_messages.is_followed(waiting, viewer) for viewer in (ADMIN, OWN, STRANGER)] == [
        True,
        True,
        False,
    ]
    assert cache_messages.is_followed(record(), STRANGER)


# -- size --------------------------------------------------------------------------------------------------


def test_sequences_are_cut_into_parts_that_any_client_can_take() -> None:
    """A part holds at most 2 MiB; the pages of a long sequence go on in the next."""
    records = [record(pages=count) for count in (0, 10, 600_000, 5, 524_288, 1)]
    groups = cache_messages.parts_of_sequences(records)
    sizes = []
    pages: list[list[int]] = []
    for group in groups:
        infos = [cache_messages.sequence(run.record, ADMIN, 0, first=run.first, end=run.end) for run in group]
        sizes.append(sum(info.ByteSize() + 4 for info in infos))
        for info in infos:
            if info.first_page_index:
                assert info.first_page_index == len(pages[-1])
                pages[-1] += np.frombuffer(info.page_ids, "<u4").tolist()
            else:
                pages.append(np.frombuffer(info.page_ids, "<u4").tolist())
    assert max(sizes) <= 2 * 1024 * 1024
    assert [len(each) for each in pages] == [0, 10, 600_000, 5, 524_288, 1]
    assert all(each == list(range(len(each))) for each in pages)
    assert cache_messages.parts_of_sequences([]) == []


def test_a_list_is_cut_where_it_would_not_fit_but_never_empty() -> None:
    infos = [cache_messages.sequence(record(pages=1000), ADMIN, 0) for _ in range(3)]
    size = infos[0].ByteSize()
    assert len(list(cache_messages.within_bytes(infos, 2 * size + 20))) == 2
    assert len(list(cache_messages.within_bytes(infos, 10))) == 1
    assert NO_PAGES.tolist() == []
