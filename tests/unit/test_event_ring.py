"""Promises of the ring of page events: no gaps, newest kept, who had which owner number when."""

import numpy as np
import pytest

from service.fleet.event_ring import EventRing
from service.fleet.feed import EVENT_PLANES, NO_PAGES, EventColumns, OutOfStep, SequenceRecord


def batch(
    first: int, count: int, *, started: tuple[SequenceRecord, ...] = (), ended: tuple[int, ...] = ()
) -> EventColumns:
    """Events whose page is their number modulo 10."""
    numbers = np.arange(first, first + count)
    planes = {name: np.zeros(count, kind) for name, kind in EVENT_PLANES.items()}
    planes["page_ids"][:] = numbers % 10
    planes["steps"][:] = numbers * 100
    return EventColumns(first, planes, started, ended)


def record(name: str, owner: int) -> SequenceRecord:
    return SequenceRecord(name, 0, owner, 0, 3, NO_PAGES, 0)


def numbers(columns: EventColumns | None) -> list[int]:
    assert columns is not None
    assert (columns.planes["steps"] // 100).tolist() == list(
        range(columns.first_number, columns.last_number + 1)
    )
    return list(range(columns.first_number, columns.last_number + 1))


def test_the_newest_events_are_kept_and_told_in_order_whatever_the_batches() -> None:
    for sizes in ([1] * 40, [7, 13, 20], [40], [8, 8, 8, 8, 8], [3, 30, 7]):
        ring = EventRing(capacity=8)
        for size in sizes:
            ring.append(batch(ring.last_number + 1, size))
        assert (ring.first_number, ring.last_number, len(ring)) == (33, 40, 8)
        assert numbers(ring.after(32)) == list(range(33, 41))
        assert numbers(ring.after(36, limit=2)) == [37, 38]
        assert numbers(ring.after(40)) == []


def test_a_reader_that_fell_behind_is_told_so() -> None:
    ring = EventRing(capacity=8)
    ring.append(batch(1, 20))
    assert ring.after(11) is None
    assert numbers(ring.after(12)) == list(range(13, 21))
    assert ring.after(21) is None


def test_a_gap_is_refused_and_what_comes_twice_is_kept_once() -> None:
    ring = EventRing(capacity=8)
    ring.append(batch(1, 4))
    with pytest.raises(OutOfStep):
        ring.append(batch(6, 1))
    ring.append(batch(2, 3))
    ring.append(batch(3, 4))
    assert numbers(ring.after(0)) == [1, 2, 3, 4, 5, 6]


def test_events_of_a_page_are_its_newest_ones_oldest_first() -> None:
    ring = EventRing(capacity=64)
    ring.append(batch(1, 60))
    assert [number for number, _ in ring.of_page(3, 3, 60)] == [33, 43, 53]
    assert [number for number, _ in ring.of_page(3, 3, 52)] == [23, 33, 43], "not ahead of the map"
    assert [columns["steps"] for _, columns in ring.of_page(3, 1, 60)] == [5300]
    assert ring.of_page(11, 3, 60) == []


def test_an_owner_number_is_told_apart_by_time() -> None:
    ring = EventRing(capacity=64)
    ring.append(batch(1, 10, started=(record("a", 5),)))
    ring.append(batch(11, 10, started=(record("b", 5),), ended=(5,)))
    assert [getattr(ring.owner_at(n, 5), "request_id", None) for n in (1, 10, 11, 20)] == ["a", "a", "b", "b"]
    assert ring.owner_at(1, 6) is None
    told = ring.after(0, limit=10)
    assert told is not None
    assert ([each.request_id for each in told.started], told.ended_owners) == (["a"], [])
    told = ring.after(10)
    assert told is not None
    assert ([each.request_id for each in told.started], told.ended_owners) == (["b"], [5])
    told = ring.after(11)
    assert told is not None
    assert (list(told.started), told.ended_owners) == ([], [5]), "a start is told once"


def test_starts_are_forgotten_with_their_events() -> None:
    ring = EventRing(capacity=8)
    ring.append(batch(1, 4, started=(record("a", 5),)))
    ring.append(batch(5, 20))
    assert ring.owner_at(20, 5) is None


def test_names_without_events_are_kept_within_a_bound() -> None:
    ring = EventRing(capacity=8)
    ring.append(batch(1, 1))
    for number in range(20):
        ring.append(batch(1, 1, started=(record(str(number), 5),), ended=(number,)))
    told = ring.after(0)
    assert told is not None
    assert [each.request_id for each in told.started] == [str(number) for number in range(12, 20)]
    assert told.ended_owners == list(range(12, 20))


def test_a_restart_forgets_everything() -> None:
    ring = EventRing(capacity=8)
    ring.append(batch(1, 5))
    ring.restart(100)
    assert len(ring) == 0
    assert numbers(ring.after(100)) == []
    ring.append(batch(101, 2))
    assert numbers(ring.after(100)) == [101, 102]
