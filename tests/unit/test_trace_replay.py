"""Replaying a recording frame by frame: what follows what, gaps, both folds, and what is counted."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kvatlas.v1 import cache_pb2
from worker.ids import NO_PAGE
from worker.pages.events import EventColumns, PageState
from worker.pages.events import PageEventKind as Kind
from worker.readers.recording_file import DamagedRecording
from worker.readers.recording_frames import state_digest
from worker.trace.page_rules import BadEvent
from worker.trace.recording import Header, Item, MapAt
from worker.trace.replay import FoldsDiffer, NotRecorded, Replay

PAGES = 6
FIRST = 10  # revision of the first map


@dataclass
class FakeRecording:
    """Frames as a test says them."""

    frames: list[Item]
    offset: int = 77

    @property
    def header(self) -> Header:
        limits = cache_pb2.SchedulerLimits()
        return Header("r", "w", "m", "", 0, PAGES, 16, "lru", FIRST, 3, 1000, 16, limits)

    def items(self) -> Iterator[Item]:
        return iter(self.frames)


def replay_of(*frames: Item, is_checked: bool = True) -> Replay:
    return Replay(FakeRecording(list(frames)), is_checked=is_checked)  # type: ignore[arg-type]


def map_of(*held: int) -> MapAt:
    """A map on which these pages are held by one sequence."""
    count = PAGES + 1
    states = [PageState.ACTIVE if page in held else PageState.FREE for page in range(PAGES)]
    refs = array("H", [int(page in held) for page in range(count)])
    planes = cache_pb2.PageMap(
        states=bytes([*states, PageState.RESERVED]),
        flags=bytes(count),
        ref_counts=refs.tobytes(),
        owners=array("H", [5 * ref for ref in refs]).tobytes(),
        parent_page_ids=array("I", [NO_PAGE] * count).tobytes(),
        **dict.fromkeys(("filled_slots", "hit_counts"), bytes(2 * count)),
        **dict.fromkeys(("born_ms", "used_ms"), bytes(4 * count)),
        fingerprints=bytes(8 * count),
    )
    return MapAt(planes, {page: [5] for page in held})


def taken(first_number: int, *pages: int, kind: Kind = Kind.ALLOCATED) -> EventColumns:
    """Free pages that one sequence gets."""
    count = len(pages)
    return EventColumns(
        first_number=first_number,
        kinds=bytes([kind]) * count,
        pages=array("I", pages),
        owners=array("H", [5] * count),
        refs=array("H", [1] * count),
        others=array("I", [NO_PAGE] * count),
        tags=array("Q", bytes(8 * count)),
        steps=array("Q", [4] * count),
        times_us=array("Q", [1000 + 10 * (first_number + each) for each in range(count)]),
        tokens=(),
    )


def end_at(replay: Replay, number: int) -> cache_pb2.RecordingEnd:
    """The end of what was replayed so far, if that is the revision."""
    ledger = replay.ledger
    digest = state_digest(ledger.states.tobytes(), ledger.flags.tobytes(), ledger.refs.tobytes())
    return cache_pb2.RecordingEnd(cause=1, revision={"number": number}, state_digest=digest)


def test_events_without_a_map_or_out_of_order_are_damage_and_say_where() -> None:
    with pytest.raises(DamagedRecording, match="page events before a map") as damaged:
        replay_of(taken(11, 0)).run()
    assert damaged.value.offset == 77
    for number in (11, 13):
        with pytest.raises(DamagedRecording, match=f"events from {number} on follow event 11"):
            replay_of(map_of(), taken(11, 0), taken(number, 1), is_checked=False).run()


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_batch_is_applied_up_to_the_revision_and_its_rest_afterwards(is_checked: bool) -> None:
    replay = replay_of(map_of(), taken(11, 0, 1, 2), taken(14, 3), is_checked=is_checked)
    for number, active in ((10, 0), (11, 1), (13, 3), (13, 3), (14, 4)):
        ledger = replay.run_to(number)
        assert (ledger.revision, ledger.state_counts[PageState.ACTIVE]) == (number, active)
        assert replay.time_us == (1000 if number == 10 else 1000 + 10 * number)
    with pytest.raises(NotRecorded, match="revision 15: the recording ends at 14"):
        replay.run_to(15)
    with pytest.raises(NotRecorded, match="revision 13: the recording has 14 and later ones"):
        replay.run_to(13)
    with pytest.raises(NotRecorded, match="revision 9: the recording has 10 and later ones"):
        replay_of(map_of()).run_to(9)
    assert replay.report.num_events == 4
    assert replay.report.kinds == {"ALLOCATED": 4}


def test_behind_a_gap_the_map_is_that_of_the_revision_at_its_end() -> None:
    gaps = [
        cache_pb2.RecordingGap(lost_records=2),
        cache_pb2.RecordingGap(after_number=11, lost_events=4, lost_records=3),
    ]
    frames = [map_of(), taken(11, 0), *gaps, map_of(2, 3), taken(16, 4)]
    replay = replay_of(*frames)
    report = replay.run()
    assert (report.lost_events, report.lost_records) == (4, 5)
    assert report.gaps == ["2 requests, ends or steps", "4 events after 11", "3 requests, ends or steps"]
    assert replay.ledger.revision == 16
    assert replay.ledger.sharers[2] == [5]
    assert [page for page in range(PAGES) if replay.ledger.states[page] == PageState.ACTIVE] == [2, 3, 4]
    for number in (12, 14):
        with pytest.raises(NotRecorded, match=f"revision {number} lies in a gap"):
            replay_of(*frames).run_to(number)
    assert replay_of(*frames).run_to(15).revision == 15


def test_an_event_against_the_rules_is_named_unless_nobody_checks() -> None:
    frames = [map_of(0), taken(11, 1), taken(12, 0)]
    with pytest.raises(BadEvent, match="12"):
        replay_of(*frames).run()
    assert replay_of(*frames, is_checked=False).run().num_checks == 0


@pytest.mark.parametrize(
    "goes_on",
    [Replay.run, lambda replay: replay.run_to(FIRST), lambda replay: replay._advance(None)],
    ids=["at the end", "at a revision", "before another map takes its place"],
)
def test_folds_that_differ_are_found(goes_on: Callable[[Replay], object]) -> None:
    replay = replay_of(map_of(), map_of())
    replay._advance(None)
    if goes_on is Replay.run:
        next(replay._items)
    replay.ledger.refs[3] += 1
    with pytest.raises(FoldsDiffer, match="after event 10: references of page 3: 0 by the rules, 1 by the"):
        goes_on(replay)
    assert not replay_of(map_of(), map_of(1)).run().gaps


def test_the_end_must_be_of_the_last_revision_and_have_its_map() -> None:
    whole = replay_of(map_of(), taken(11, 0))
    whole.run()
    assert whole.report.end.startswith("missing")
    end = end_at(whole, 11)
    assert replay_of(map_of(), taken(11, 0), end).run().end != whole.report.end
    with pytest.raises(DamagedRecording, match="ends at revision 12, its events at 11"):
        replay_of(map_of(), taken(11, 0), end_at(whole, 12)).run()
    with pytest.raises(DamagedRecording, match="the map at its end is"):
        replay_of(map_of(), taken(11, 1), end).run()


def test_what_is_no_page_event_is_counted() -> None:
    report = replay_of(
        map_of(),
        cache_pb2.RequestRecord(),
        cache_pb2.RequestRecord(),
        cache_pb2.SequenceRecord(),
        cache_pb2.StepBatch(steps=bytes(24)),
        cache_pb2.StepBatch(steps=bytes(8)),
        cache_pb2.IntegrityViolation(subject="odd"),
        taken(11),
        taken(11, 0),
    ).run()
    assert (report.num_requests, report.num_sequences, report.num_steps, report.num_events) == (2, 1, 4, 1)
    assert len(report.violations) == 1
    assert "odd" in report.violations[0]
    assert report.num_checks == 1
