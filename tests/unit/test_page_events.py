"""The ring of page events: numbered without gaps, read from another thread without a lock."""

import threading
from array import array

import pytest

from worker.ids import NO_PAGE
from worker.pages.events import MAX_SPAN_US, EventColumns, EventRing, PageEventKind


def same(count: int, value: int) -> "array[int]":
    return array("H", (value,)) * count


def extend(ring: EventRing, pages: range, kind: PageEventKind = PageEventKind.ALLOCATED) -> None:
    ring.extend(kind, array("I", pages), same(len(pages), 7), same(len(pages), 1))


def pages_of(events: EventColumns | None) -> list[int]:
    assert events is not None
    return list(events.pages)


def test_kinds_have_the_numbers_of_the_public_api() -> None:
    from kvatlas.v1 import cache_pb2

    for kind in PageEventKind:
        assert cache_pb2.PageEventType.Value(f"PAGE_EVENT_TYPE_{kind.name}") == kind
    assert len(cache_pb2.PageEventType.values()) == len(PageEventKind) + 1


def test_numbers_start_at_one_and_have_no_gaps() -> None:
    ring = EventRing(8)
    assert ring.number == 0
    ring.append(PageEventKind.ALLOCATED, 3, 9, 1)
    extend(ring, range(4, 7))
    assert ring.number == 4
    events = ring.read(0)
    assert events is not None
    assert (events.first_number, events.last_number, len(events)) == (1, 4, 4)
    assert pages_of(events) == [3, 4, 5, 6]


def test_a_batch_leaves_the_same_columns_as_single_events() -> None:
    single, batch = EventRing(16), EventRing(16)
    for ring in (single, batch):
        ring.step, ring.time_us = 5, 123_456
    for page in range(10):
        single.append(PageEventKind.RELEASED, page, 7, 1, tag=2)
    batch.extend(PageEventKind.RELEASED, array("I", range(10)), same(10, 7), same(10, 1), tag=2)
    assert single.read(0, with_tokens=True) == batch.read(0, with_tokens=True)


def test_every_field_comes_back() -> None:
    ring = EventRing(4)
    ring.step, ring.time_us = 17, 2**40
    ring.append(PageEventKind.SEALED, 5, 65_535, 3, other=4, tag=2**64 - 1, tokens=b"abcd")
    events = ring.read(0, with_tokens=True)
    assert events is not None
    assert list(events.kinds) == [PageEventKind.SEALED]
    assert (events.owners[0], events.refs[0], events.others[0]) == (65_535, 3, 4)
    assert (events.tags[0], events.steps[0], events.times_us[0]) == (2**64 - 1, 17, 2**40)
    assert events.tokens == [b"abcd"]
    unasked = ring.read(0)
    assert unasked is not None
    assert not unasked.tokens, "token ids are given to those who ask for them"


def test_events_of_a_reused_place_carry_nothing_of_the_old_one() -> None:
    ring = EventRing(2)
    ring.append(PageEventKind.SEALED, 1, 1, 1, other=0, tag=9, tokens=b"x")
    ring.append(PageEventKind.SEALED, 1, 1, 1, other=0, tag=9, tokens=b"x")
    extend(ring, range(2))
    events = ring.read(2, with_tokens=True)
    assert events is not None
    assert list(events.others) == [NO_PAGE] * 2
    assert list(events.tags) == [0, 0]
    assert events.tokens == [None, None]


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("count", [1, 5, 8])
def test_a_batch_may_cross_the_end_of_the_ring(start: int, count: int) -> None:
    ring = EventRing(8)
    extend(ring, range(start))
    pages, owners, refs = (range(first, first + count) for first in (100, 200, 300))
    ring.extend(PageEventKind.RELEASED, array("I", pages), array("H", owners), array("H", refs))
    events = ring.read(start)
    assert events is not None
    assert (list(events.pages), list(events.owners), list(events.refs)) == (
        list(pages),
        list(owners),
        list(refs),
    )


def test_a_batch_larger_than_the_ring_keeps_its_end() -> None:
    ring = EventRing(8)
    extend(ring, range(30))
    assert ring.number == 30
    assert pages_of(ring.read(22)) == list(range(22, 30))
    assert ring.read(21) is None


def test_a_reader_that_lagged_is_told() -> None:
    ring = EventRing(4)
    extend(ring, range(4))
    assert pages_of(ring.read(0)) == [0, 1, 2, 3]
    extend(ring, range(4, 5))
    assert ring.read(0) is None
    assert pages_of(ring.read(1)) == [1, 2, 3, 4]


def test_the_limit_cuts_and_reading_goes_on_behind_it() -> None:
    ring = EventRing(16)
    extend(ring, range(10))
    events = ring.read(0, limit=4)
    assert pages_of(events) == [0, 1, 2, 3]
    assert events is not None
    assert pages_of(ring.read(events.last_number, limit=4)) == [4, 5, 6, 7]
    assert pages_of(ring.read(10)) == []


def test_events_that_are_read_together_lie_within_32_bits_of_microseconds() -> None:
    ring = EventRing(8)
    for number, time_us in enumerate([5, 9, 5 + MAX_SPAN_US, 6 + MAX_SPAN_US, 3 * MAX_SPAN_US]):
        ring.time_us = time_us
        extend(ring, range(number, number + 1))
    read: list[list[int]] = []
    while sum(map(len, read)) < ring.number:
        read.append(pages_of(ring.read(sum(map(len, read)))))
    assert read == [[0, 1, 2], [3], [4]]
    assert pages_of(ring.read(0, limit=2)) == [0, 1]


@pytest.mark.parametrize("number", [1, -1])
def test_a_number_that_was_never_given_is_an_error(number: int) -> None:
    with pytest.raises(ValueError, match="the last is 0"):
        EventRing(4).read(number)


@pytest.mark.parametrize("capacity", [0, 3, 1000])
def test_the_capacity_is_a_power_of_two(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        EventRing(capacity)


def test_a_reader_that_is_overtaken_while_it_copies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes on between two columns of the copy: what was copied is thrown away."""
    ring = EventRing(4)
    extend(ring, range(4))
    copy = ring._copy

    def slow(after: int, count: int, with_tokens: bool) -> EventColumns:
        columns = copy(after, count, with_tokens)
        ring.append(PageEventKind.FREED, 9, 0, 0)
        return columns

    monkeypatch.setattr(ring, "_copy", slow)
    assert ring.read(0) is None
    assert pages_of(ring.read(2)) == [2, 3, 9]


def test_a_place_is_claimed_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes while an event is half written finds the oldest one gone already."""
    ring = EventRing(4)
    extend(ring, range(4))

    class Watched(bytearray):
        def __setitem__(self, *arguments: object) -> None:
            assert ring.read(0) is None
            super().__setitem__(*arguments)  # type: ignore[arg-type]

    ring._kinds = Watched(ring._kinds)
    ring.append(PageEventKind.FREED, 9, 0, 0)
    extend(ring, range(2))
    assert ring.number == 7


def test_a_reader_on_another_thread_never_sees_a_torn_event() -> None:
    """Every event carries its page number in all columns; the reader checks that they agree."""
    ring = EventRing(64)
    done = threading.Event()
    problems: list[str] = []
    seen = lagged = 0

    def read() -> None:
        nonlocal seen, lagged
        after = 0
        while not done.is_set() or after < ring.number:
            events = ring.read(after, limit=48)
            if events is None:
                lagged += 1
                after = max(after, ring.number - 16)
                continue
            for at, page in enumerate(events.pages):
                expected = (page % 60_000, page % 50_000, page, page)
                found = (events.owners[at], events.refs[at], events.tags[at], events.others[at])
                if found != expected or page != events.first_number + at:
                    problems.append(f"{found} of event {events.first_number + at}, page {page}")
            seen += len(events)
            after = events.last_number

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 40_001):
        ring.append(PageEventKind.SEALED, number, number % 60_000, number % 50_000, other=number, tag=number)
    done.set()
    reader.join(20)
    assert not reader.is_alive()
    assert problems == []
    assert seen > 0
