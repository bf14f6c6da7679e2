"""What observers get: views, what changed since they looked last, progress, events."""

import random
from array import array
from dataclasses import replace

import pytest

from tests.toy_scheduler import make, request
from worker.execution.testing import Harness
from worker.ids import NO_PAGE, PageId, SequenceId
from worker.pages.events import PageEventKind
from worker.scheduling import views
from worker.scheduling.books import Books
from worker.scheduling.output import FinishCode
from worker.stats import Growth, SequenceState, SequenceView, WaitReason
from worker.traffic import Arrival, Departure


def test_a_view_says_who_it_is_and_where_it_stands() -> None:
    harness = make()
    spec = request(
        5, range(9), max_tokens=6, sample_count=2, priority=3, request_id="r5", tenant="t", labels={"a": "b"},
        receive_time_ns=77, first_choice_index=0,
    )  # fmt: skip
    harness.add(spec)
    waiting = harness.scheduler.sequence_views()
    assert [(v.sequence_id, v.state, v.owner, v.row) for v in waiting] == [
        (5, SequenceState.WAITING, 0, None),
        (6, SequenceState.WAITING, 0, None),
    ]
    assert waiting[0].needed_pages == 3
    harness.turn()
    first, second = harness.scheduler.sequence_views()
    assert (first.state, first.token_count, len(first.page_ids)) == (SequenceState.DECODE, 9, 3)
    assert first.needed_pages == 0, "it has them"
    assert (second.choice_index, second.state) == (1, SequenceState.PREFILL)
    assert first.prefix == (0, 8, 0, 1)
    assert (first.request_id, first.tenant, dict(first.labels)) == ("r5", "t", {"a": "b"})
    assert (first.priority, first.prompt_tokens, first.receive_time_ns) == (3, 9, 77)
    assert first.owner > 0
    assert first.owner != second.owner


def test_traffic_tells_each_arrival_and_each_end_with_how_long_it_waited() -> None:
    harness = make(max_running=1)
    told: list[Arrival | Departure] = []
    harness.scheduler.tell_traffic(told.append)
    harness.add(request(1, range(8), max_tokens=3))
    harness.turn()
    began, number = harness.now, harness.scheduler.cache.events.number
    spec = request(
        2, range(8), max_tokens=7, prompt_logprobs=0, request_id="r2", priority=2, cache_salt=b"x",
        resume_token_ids=[5, 6], cache_write=False,
    )  # fmt: skip
    harness.add(spec)
    harness.add(request(3, range(8)))
    harness.turn()
    harness.abort(3)
    harness.run()
    second = next(each for each in told if isinstance(each, Arrival) and each.sequence_id == 2)
    assert second == Arrival(
        int(began * 1e6), number, SequenceId(2), "r2", [*range(8), 5, 6], 1, 5, 2, False, False, b"x"
    )
    ends = {each.sequence_id: each for each in told if isinstance(each, Departure)}
    assert [type(each) for each in told].count(Arrival) == len(ends) == 3
    assert (ends[1].queue_us, ends[1].prefix, ends[1].finish_code) == (
        10_000,
        (0, 4, 0, 4),
        FinishCode.MAX_TOKENS,
    )
    start = harness.answers[2].start
    assert start is not None
    assert ends[2].queue_us == int(start.queue_seconds * 1e6) == pytest.approx(32_000, abs=1)  # three turns
    assert (list(ends[2].token_ids), ends[2].first_id) == ([*range(8), 5, 6, *harness.answers[2].tokens], 2)
    assert (ends[3].queue_us, ends[3].prefix, ends[3].finish_code) == (0, None, FinishCode.ABORTED)


def grow(book: dict[int, SequenceView], growth: Growth) -> None:
    by_owner = {view.owner: sequence_id for sequence_id, view in book.items() if view.owner}
    for owner, index, page in zip(growth.owners, growth.page_indexes, growth.page_ids, strict=True):
        if owner in by_owner:
            view = book[by_owner[owner]]
            assert index <= len(view.page_ids)
            pages = (*view.page_ids[:index], PageId(page), *view.page_ids[index + 1 :])
            book[view.sequence_id] = replace(view, page_ids=pages)


def rebuild(book: dict[int, SequenceView], harness: Harness) -> None:
    """What an observer does with changes: keep first_page_index pages, replace the rest."""
    changes = harness.scheduler.take_changes()
    for sequence_id in changes.ended_ids:
        book.pop(sequence_id, None)
    grow(book, changes.growth)
    for view in changes.views:
        old = book.get(view.sequence_id)
        kept = old.page_ids[: view.first_page_index] if old is not None else ()
        assert len(kept) == view.first_page_index
        pages = kept + view.page_ids
        book[view.sequence_id] = SequenceView(
            **{name: getattr(view, name) for name in SequenceView.__slots__}
            | {"page_ids": pages, "first_page_index": 0}
        )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_changes_in_any_steps_add_up_to_the_views(every: int, overlap: bool) -> None:
    harness = make(overlap, num_pages=10, max_running=4, max_context_tokens=32)
    book: dict[int, SequenceView] = {}
    for number in range(1, 13):
        count = 1 + number % 3
        spec = request(10 * number, [number % 3] * 7, max_tokens=9, sample_count=count, temperature=1.0)
        harness.add(spec)
    turns = 0
    while harness.scheduler.has_work(harness.now):
        harness.turn()
        turns += 1
        if turns == 9:
            harness.abort(*list(book)[:3])
        if turns % every == 0:
            rebuild(book, harness)
            views = {view.sequence_id: view for view in harness.scheduler.sequence_views()}
            assert set(book) == set(views)
            for sequence_id, view in views.items():
                known = book[sequence_id]
                assert known.page_ids == view.page_ids
                assert (known.state, known.owner, known.row) == (view.state, view.owner, view.row)
    rebuild(book, harness)
    assert book == {}
    assert harness.scheduler.counts().preemptions_total > 0


def test_nothing_is_kept_for_an_observer_that_does_not_exist() -> None:
    harness = make()
    for number in range(1, 40):
        harness.add(request(number, range(4), max_tokens=2))
        harness.run()
    books = harness.scheduler._books
    assert (books.changed, books.growth, books.started) == ({}, Growth(), [])
    assert (books.ended_ids, books.ended_owners, books.bills) == ([], [], [])
    harness.add(request(99, range(4), max_tokens=20))
    harness.turn()
    changes = harness.scheduler.take_changes()
    assert [view.sequence_id for view in changes.views] == [99]
    assert [(view.sequence_id, view.owner) for view in changes.started] == [(99, changes.views[0].owner)]


def test_one_that_begins_and_ends_between_two_looks_is_told_with_its_owner_number() -> None:
    harness = make(max_running=2)
    harness.scheduler.take_changes()
    for number in range(1, 6):
        harness.add(request(number, range(4), max_tokens=2))
    harness.run()
    changes = harness.scheduler.take_changes()
    assert [view.sequence_id for view in changes.started] == [1, 2, 3, 4, 5]
    assert [view.owner for view in changes.started] == list(changes.ended_owners)
    assert all(view.owner and not view.page_ids for view in changes.started)
    assert changes.views == ()


def test_one_that_is_preempted_is_told_with_each_of_its_owner_numbers() -> None:
    harness = make(num_pages=6, max_running=2, max_context_tokens=24)
    harness.scheduler.take_changes()
    for number in (1, 2):
        harness.add(request(number, range(50 * number, 50 * number + 8), max_tokens=12))
    harness.run()
    assert harness.scheduler.counts().preemptions_total > 0
    changes = harness.scheduler.take_changes()
    assert len(changes.started) == 2 + harness.scheduler.counts().preemptions_total
    assert sorted(view.owner for view in changes.started) == sorted(changes.ended_owners)


def test_a_new_reason_to_wait_is_a_change() -> None:
    harness = make(num_pages=8, max_running=1, max_context_tokens=24)
    harness.add(request(1, range(4), max_tokens=12))
    harness.turn()
    harness.add(request(2, range(50, 54), max_tokens=4))
    harness.scheduler.take_changes()
    harness.turn()
    (view,) = [view for view in harness.scheduler.take_changes().views if view.sequence_id == 2]
    assert view.wait_reason == WaitReason.ROWS
    harness.turn()
    assert [
        view.sequence_id for view in harness.scheduler.take_changes().views if view.sequence_id == 2
    ] == []


def test_waiting_requests_by_reason_add_up_though_samples_of_one_wait_one_by_one() -> None:
    harness = make(num_pages=10, max_running=4, max_context_tokens=40)
    for number in (10, 20, 30):
        harness.add(request(number, [number] * 6, max_tokens=24, sample_count=3, temperature=1.0))
    preempted_twice = 0
    while harness.scheduler.has_work(harness.now):
        harness.turn()
        counts = harness.scheduler.counts()
        waiting = [r for r in harness.scheduler._books.requests.values() if not r.num_with_row]
        assert sum(counts.waiting_by_reason.values()) == counts.waiting_requests == len(waiting)
        assert min(counts.waiting_by_reason.values()) >= 0
        preempted_twice += any(sum(s.preemptions > 0 for s in r.samples) > 1 for r in waiting)
    assert preempted_twice > 0


def test_a_page_more_is_told_without_the_rest_of_the_sequence() -> None:
    harness = make()
    harness.add(request(1, range(6), max_tokens=20))
    harness.turn()
    harness.scheduler.take_changes()
    while not len((changes := harness.scheduler.take_changes()).growth.owners):
        harness.turn()
    (view,) = harness.scheduler.sequence_views()
    growth = changes.growth
    assert (list(growth.owners), list(growth.page_indexes)) == ([view.owner], [2])
    assert list(growth.page_ids) == [view.page_ids[2]]
    assert changes.views == ()


@pytest.mark.parametrize("overlap", [False, True])
def test_progress_is_what_views_say_after_every_turn(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """While all decode it is read off the batch; else one by one. Both, through arrivals, ends and aborts."""
    slow, num_slow, num_turns = views._progress_one_by_one, 0, 0

    def one_by_one(books: Books) -> views.Progress:
        nonlocal num_slow
        num_slow += 1
        return slow(books)

    monkeypatch.setattr(views, "_progress_one_by_one", one_by_one)
    harness, draw = make(overlap=overlap, num_pages=60), random.Random(5)
    scheduler = harness.scheduler
    for number in range(1, 400):
        if draw.random() < 0.15 and scheduler.num_live < 6:
            samples = draw.choice((1, 1, 2))
            harness.add(
                request(10 * number, range(draw.randint(1, 12)), draw.randint(1, 25), sample_count=samples)
            )
        if draw.random() < 0.03 and (live := scheduler.sequence_views()):
            harness.abort(draw.choice(live).sequence_id)
        harness.turn()
        running = {view.owner: view.token_count for view in scheduler.sequence_views() if view.owner}
        progress = scheduler.progress()
        assert dict(zip(progress.owners, progress.token_counts, strict=True)) == running
        num_turns += bool(running)
    assert 10 < num_slow < num_turns - 10, (num_slow, num_turns)


def test_progress_counts_every_step_in_flight() -> None:
    """Two are, between a launch and the commit of the step before."""
    harness = make(overlap=True)
    harness.add(request(1, range(5), max_tokens=20))
    for _ in range(2):
        harness.turn()
    harness.launch()
    assert harness.scheduler.num_in_flight == 2
    (view,) = harness.scheduler.sequence_views()
    assert list(harness.scheduler.progress().token_counts) == [view.token_count] == [5]


def test_progress_counts_tokens_with_kv() -> None:
    harness = make()
    harness.add(request(1, range(6), max_tokens=8))
    harness.add(request(2, range(50, 53), max_tokens=8))
    for _ in range(3):
        harness.turn()
    progress = harness.scheduler.progress()
    owners = {view.owner: view.token_count for view in harness.scheduler.sequence_views()}
    assert dict(zip(progress.owners, progress.token_counts, strict=True)) == owners
    assert sorted(progress.token_counts) == [5, 8]


def test_events_carry_step_time_owner_and_parent() -> None:
    harness = make()
    harness.add(request(1, range(8), max_tokens=2))
    harness.turn()
    events = harness.scheduler.cache.events.read(0, with_tokens=True)
    assert events is not None
    kinds = [PageEventKind(kind) for kind in events.kinds]
    assert kinds == [PageEventKind.ALLOCATED] * 2 + [PageEventKind.SEALED] * 2
    assert list(events.steps) == [1] * 4
    assert list(events.times_us) == pytest.approx([1_010_000] * 2 + [1_011_000] * 2, abs=1)
    assert len(set(events.owners)) == 1
    assert list(events.others[2:]) == [NO_PAGE, events.pages[2]]
    assert events.tokens[3] == array("I", range(4, 8)).tobytes()


def test_owner_numbers_are_small_and_not_used_again_at_once() -> None:
    harness = make(max_running=2)
    seen: list[int] = []
    for number in range(1, 80):
        harness.add(request(number, range(4), max_tokens=2))
        harness.turn()
        seen += [view.owner for view in harness.scheduler.sequence_views()]
        harness.run()
    assert all(1 <= owner <= 65_535 for owner in seen)
    assert all(owner not in seen[at + 1 : at + 30] for at, owner in enumerate(seen))
    assert len(set(seen)) < 80
