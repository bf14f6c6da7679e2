"""What the service's copy of the pages refuses, and its bounds; that it is right: property tests."""

from collections.abc import Sequence

import numpy as np
import pytest

from service.fleet.feed import (
    NO_PAGES,
    PLANES,
    EndedSequence,
    MapDelta,
    OutOfStep,
    PoolTotals,
    Revision,
    SequenceChange,
    SequenceRecord,
    SnapshotPart,
)
from service.fleet.page_mirror import PageMirror, Standing
from service.fleet.page_watch import PageWatch

PAGE_COUNT = 4


def part(
    number: int, parts_left: int, first: int, count: int, *, epoch: int = 1, is_last: bool = False
) -> SnapshotPart:
    planes = {name: np.ones(count, kind) for name, kind in PLANES.items()} if count else {}
    totals = PoolTotals(free_pages=number) if is_last else None
    return SnapshotPart(Revision(epoch, number, number), parts_left, first, planes, totals=totals)


def waiting(name: str) -> SequenceRecord:
    return SequenceRecord(name, 0, 0, None, 1, NO_PAGES, 0)


def delta(
    base: int, number: int, came: Sequence[str] = (), ended: Sequence[str] = (), epoch: int = 1
) -> MapDelta:
    return MapDelta(
        base_number=base,
        revision=Revision(epoch, number, number),
        observe_time_ns=number,
        totals=PoolTotals(),
        sequences=[SequenceChange(waiting(name)) for name in came],
        ended=[EndedSequence(name, 0) for name in ended],
    )


def whole(mirror: PageMirror, number: int) -> None:
    mirror.begin_snapshot()
    assert mirror.add_part(part(number, 0, 0, PAGE_COUNT, is_last=True))


@pytest.fixture
def mirror() -> PageMirror:
    made = PageMirror("w")
    made.begin_life(1, PAGE_COUNT)
    return made


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([part(5, 1, 0, 2, epoch=2)], "a snapshot of epoch 2 in epoch 1"),
        ([part(5, 1, 0, 2), part(6, 0, 2, 2, is_last=True)], "parts of .* in one snapshot"),
        ([part(5, 1, 0, 2), part(5, 0, 3, 1, is_last=True)], "pages 3 to 4 come after 2"),
        ([part(5, 1, 0, 2), part(5, 0, 0, 2, is_last=True)], "pages 0 to 2 come after 2"),
        ([part(5, 1, 0, 2), part(5, 0, 2, 3, is_last=True)], "pages 2 to 5 come after 2"),
        ([part(5, 1, 0, 2), part(5, 0, 2, 1, is_last=True)], "a snapshot of 3 pages, the pool has 4"),
        ([part(5, 1, 0, 4), part(5, 0, 0, 0)], "a snapshot without totals"),
    ],
)
def test_parts_that_do_not_fit_together_make_no_map(
    mirror: PageMirror, parts: Sequence[SnapshotPart], why: str
) -> None:
    mirror.begin_snapshot()
    for each in parts[:-1]:
        assert not mirror.add_part(each)
    with pytest.raises(OutOfStep, match=why):
        mirror.add_part(parts[-1])
    assert (mirror.standing, mirror.page_count) == (Standing.EMPTY, 0)
    whole(mirror, 7)
    assert (mirror.standing, mirror.page_count, mirror.totals.free_pages) == (Standing.CURRENT, 4, 7)


def test_a_part_of_a_snapshot_that_was_given_up_is_refused(mirror: PageMirror) -> None:
    mirror.begin_snapshot()
    mirror.add_part(part(5, 1, 0, 2))
    mirror.lose_step()
    with pytest.raises(OutOfStep, match="given up"):
        mirror.add_part(part(5, 0, 2, 2, is_last=True))


def test_only_the_newest_deltas_wait_for_a_snapshot(
    mirror: PageMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were dropped the gap shows, if the snapshot does not hold what they told."""
    monkeypatch.setattr("service.fleet.page_mirror.MAX_DELTAS_WAITING", 3)
    for number in range(1, 6):
        assert not mirror.apply(delta(number - 1, number, came=[f"r{number}"]))
    mirror.begin_snapshot()
    with pytest.raises(OutOfStep, match="continues 2, the copy is at 1"):
        mirror.add_part(part(1, 0, 0, PAGE_COUNT, is_last=True))
    assert mirror.standing is Standing.BEHIND
    whole(mirror, 5)
    for number in range(6, 11):
        mirror.lose_step()
        assert not mirror.apply(delta(number - 1, number, came=[f"r{number}"]))
    whole(mirror, 7)
    assert (mirror.standing, mirror.revision.number) == (Standing.CURRENT, 10)
    assert [key[0] for key in mirror.sequences.records] == ["r8", "r9", "r10"]


def test_a_reader_that_was_away_for_too_many_ends_needs_a_snapshot(
    mirror: PageMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.fleet.sequence_mirror.ENDS_REMEMBERED", 2)
    whole(mirror, 0)
    for number in (1, 2, 3):
        mirror.apply(delta(number - 1, number, came=[f"r{number}"]))
    for number in (4, 5, 6):
        mirror.apply(delta(number - 1, number, ended=[f"r{number - 3}"]))
    assert mirror.changes_since(4) is None
    missed = mirror.changes_since(5)
    assert missed is not None
    assert [ended.request_id for ended in missed[1].ended] == ["r2", "r3"]


def test_a_watcher_that_reads_nothing_starts_anew(
    mirror: PageMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind so many names that changed and live, or that ended; those that came and went do not count."""
    monkeypatch.setattr("service.fleet.page_watch.MAX_NAMES", 3)
    whole(mirror, 0)
    watch = PageWatch(mirror, [], lambda: None)
    watch.begin()
    mirror.apply(delta(0, 1, came=["a", "b", "c"]))
    mirror.apply(delta(1, 2, came=["d"], ended=["a"]))
    assert not watch.needs_snapshot
    change = watch.take()
    assert [record.request_id for record, _, _ in change.sequences] == ["b", "c", "d"]
    mirror.apply(delta(2, 3, came=["e", "f", "g", "h"]))
    assert (watch.needs_snapshot, watch.is_lagging) == (True, True)
    watch.begin()
    assert (watch.needs_snapshot, watch.is_lagging) == (False, False)
    mirror.apply(delta(3, 4, ended=["b", "c", "d"]))
    assert not watch.needs_snapshot
    mirror.apply(delta(4, 5, ended=["e"]))
    assert (watch.needs_snapshot, watch.is_lagging) == (True, True)
