"""Readers by themselves: the audit's book and clock, rates of load, the ledger's edges."""

import logging
from array import array

import pytest

from worker.ids import NO_PAGE, Row
from worker.pages.events import EventRing, PageEventKind
from worker.readers import delta
from worker.readers.audit import (
    KEPT_FINDINGS,
    LOGGED_FINDINGS,
    AuditBook,
    AuditClock,
    AuditRound,
    Finding,
    compare_spans,
)
from worker.readers.buckets import Buckets
from worker.readers.delta import snapshot_parts, take_delta, totals
from worker.readers.ledger import Ledger
from worker.readers.load import LoadMeter
from worker.readers.metric_table import CHECKS
from worker.readers.sequences import Fills, SequenceBook
from worker.scheduling.audit import RowSpan
from worker.stats import EngineCounts, PoolTotals, SequenceState, SequenceView, StepStats, WaitReason


def view(
    number: int, owner: int, pages: tuple[int, ...] = (), first: int = 0, tokens: int = 0
) -> SequenceView:
    return SequenceView(
        number,  # type: ignore[arg-type]
        f"r{number}",
        0,
        owner,  # type: ignore[arg-type]
        None,
        SequenceState.DECODE,
        pages,  # type: ignore[arg-type]
        first,
        tokens,
        1,
        None,
        0,
        0,
        0,
        WaitReason.NONE,
        0,
        "",
    )


def test_a_failed_check_is_counted_and_logged_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    book = AuditBook()
    finding = Finding("refcount", "references of page 7", "2", "3", page=7, revision=(41, 5))
    with caplog.at_level(logging.ERROR):
        book.record(AuditRound(CHECKS[:-1], [finding], 1, frozenset({"refcount"}), 0.1, 5))
    counts = book.counts()
    assert counts["refcount", "fail"] == 1
    assert counts["state_sum", "pass"] == 1
    assert counts["device_table", "pass"] == 0, "it was not looked at"
    assert (book.last_success_ns, book.results["trie"].last_pass_ns) == (0, 5)
    assert (book.results["refcount"].last_run_ns, book.results["refcount"].last_pass_ns) == (5, 0)
    line = (
        'event=audit_failed check=refcount subject="references of page 7" expected=2 found=3 event_number=41'
    )
    assert line in caplog.text
    book.record(AuditRound(CHECKS, [], 0, frozenset(), 0.1, 9))
    assert book.last_success_ns == 9
    assert list(book.findings) == [finding]


def test_only_the_newest_findings_are_kept_and_all_are_counted() -> None:
    book = AuditBook()
    for number in range(1, 31):
        findings = [Finding("trie", f"page {number}", "a", "b", page=number)] * 7
        book.record(AuditRound(CHECKS, findings, 1000, frozenset({"trie"}), 0.1, number))
    assert len(book.findings) == KEPT_FINDINGS
    assert (book.findings[-1].page, book.findings[0].page) == (30, 16)
    assert book.num_findings == 30_000


def test_a_round_logs_sixteen_findings_and_the_book_has_the_newest_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    book = AuditBook()
    findings = [Finding("trie", f"page {number}", "a", "b", page=number) for number in range(50)]
    book.record(AuditRound(CHECKS, findings, 50, frozenset({"trie"}), 0.25, 7, num_sweeps=3))
    assert caplog.text.count("event=audit_failed") == LOGGED_FINDINGS
    assert (book.num_sweeps, book.last_seconds, len(book.findings)) == (3, 0.25, 50)


def test_rows_are_compared_to_the_first_difference() -> None:
    same = compare_spans([RowSpan(Row(1), 0, array("i", (4, 5)))], [[4, 5]], (0, 0), 0)
    spans = [RowSpan(Row(1), 16, array("i", (4, 5, 6))), RowSpan(Row(2), 0, array("i", (8,)))]
    different = compare_spans(spans, [[4, 9, 9], [8]], (7, 3), 1)
    assert same == []
    assert [finding.text for finding in different] == [
        "row 1, position 17, the first of 2 that differ:"
        " expected slot 5 by the books, found slot 9 on the device"
    ]
    assert [(finding.row, finding.revision) for finding in different] == [(1, (7, 3))]


def test_rounds_cost_a_bounded_share_of_time() -> None:
    clock = AuditClock(interval_seconds=1.0, max_share=0.01)
    assert clock.is_due(0.0)
    clock.done(10.0, 0.001)
    assert not clock.is_due(10.9)
    assert clock.is_due(11.0)
    clock.done(11.0, 0.5)  # half a second: not again before 50 s have passed
    assert not clock.is_due(60.9)
    assert clock.is_due(61.0)


def test_rates_are_over_the_last_ten_seconds_and_hits_over_a_minute() -> None:
    meter = LoadMeter(0.0)
    pool = PoolTotals(0, 0, 1, 0, 0, 0, 1)
    for tenth in range(1, 1200):
        now = tenth / 10
        meter.step(StepStats(tenth, 0.02 if now > 100 else 0.04, 1, 0, 1))
        tokens = tenth if now <= 100 else 1000 + (tenth - 1000) * 5
        hits = tenth if now > 50 else 0
        counts = EngineCounts(output_tokens_total=tokens, hit_tokens_total=hits, miss_cold_tokens_total=tenth)
        load = meter.view(now, counts, pool)
    assert load.output_tokens_per_second == pytest.approx(50.0, rel=0.1)
    assert load.mean_step_seconds == pytest.approx(0.02)
    assert load.prefix_hit_rate == pytest.approx(0.5, abs=0.02)


def test_an_idle_worker_has_rates_of_zero() -> None:
    meter = LoadMeter(0.0)
    load = meter.view(100.0, EngineCounts(), PoolTotals(0, 0, 1, 0, 0, 0, 1))
    rates = (load.output_tokens_per_second, load.prompt_tokens_per_second, load.mean_step_seconds)
    assert rates == (0.0, 0.0, 0.0)


def test_a_value_on_an_edge_belongs_to_the_bucket_below() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        buckets.observe(value)
    assert buckets.frozen() == ((2, 2, 1), 14.0)


def test_of_several_events_on_one_page_in_one_batch_the_last_counts() -> None:
    """A page lives, is sealed, hit, evicted and lives again, all within one fold."""
    ring = EventRing()
    ledger = Ledger(4, 16)
    ring.append(PageEventKind.ALLOCATED, 2, 5, 1)
    ring.append(PageEventKind.SEALED, 2, 5, 1, other=1, tag=77)
    ring.append(PageEventKind.SHARED, 2, 6, 2, tag=1)
    ring.append(PageEventKind.RELEASED, 2, 5, 1)
    events = ring.read(0)
    assert events is not None
    ledger.fold(events)
    assert (ledger.states[2], ledger.refs[2], ledger.owners[2]) == (2, 1, 6)
    assert (ledger.hits[2], ledger.parents[2], ledger.fingerprints[2], ledger.filled[2]) == (1, 1, 77, 16)
    ring.append(PageEventKind.RELEASED, 2, 6, 0)
    ring.append(PageEventKind.CACHED, 2, 6, 0)
    ring.append(PageEventKind.EVICTED, 2, 0, 0)
    ring.append(PageEventKind.FREED, 2, 0, 0)
    ring.append(PageEventKind.ALLOCATED, 2, 9, 1)
    events = ring.read(4)
    assert events is not None
    ledger.fold(events)
    assert (ledger.states[2], ledger.refs[2], ledger.owners[2]) == (2, 1, 9)
    assert (ledger.hits[2], ledger.parents[2], ledger.fingerprints[2], ledger.filled[2]) == (0, NO_PAGE, 0, 0)
    assert ledger.flush_evictions == 1
    pool = totals(ledger)
    assert (pool.free_pages, pool.active_pages, pool.reserved_pages, pool.revision) == (3, 1, 1, 9)
    assert (pool.filled_slots, pool.unfilled_slots) == (0, 16)


def test_events_with_a_gap_are_refused() -> None:
    ring = EventRing()
    ring.append(PageEventKind.ALLOCATED, 0, 1, 1)
    ring.append(PageEventKind.ALLOCATED, 1, 1, 1)
    later = ring.read(1)
    assert later is not None
    with pytest.raises(AssertionError):
        Ledger(4, 16).fold(later)


def test_a_snapshot_comes_in_parts_that_any_client_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MAX_SEQUENCE_BYTES_PER_PART", 2000)
    book = SequenceBook(16)
    for number in range(1, 6):
        book.change(view(number, number, tuple(range(150))), Fills())
    parts = list(snapshot_parts(Ledger(200_000, 16), book))
    pages = [part for part in parts if part.pages is not None]
    assert [(part.first_page, len(part.pages.states)) for part in pages if part.pages] == [
        (0, 65_536),
        (65_536, 65_536),
        (131_072, 65_536),
        (196_608, 3_393),
    ]
    sequences = [part for part in parts if part.pages is None]
    assert [len(part.sequences) for part in sequences] == [2, 2, 1]
    assert [part.parts_left for part in parts] == [6, 5, 4, 3, 2, 1, 0]


def test_a_sequence_larger_than_a_part_is_one_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MAX_SEQUENCE_BYTES_PER_PART", 2000)
    book = SequenceBook(16)
    for number, pages in ((1, 1000), (2, 1), (3, 1000)):
        book.change(view(number, number, tuple(range(pages))), Fills())
    _, *parts = snapshot_parts(Ledger(8, 16), book)
    assert [[each.owner for each in part.sequences] for part in parts] == [[1], [2], [3]]
    empty = list(snapshot_parts(Ledger(1, 16), SequenceBook(16)))
    assert [(part.first_page, part.parts_left) for part in empty] == [(0, 0)]


def test_an_end_alone_is_a_change() -> None:
    ledger, book = Ledger(4, 16), SequenceBook(16)
    assert take_delta(ledger, book, 0).is_empty
    book.change(view(1, 7), Fills())
    book.change(view(2, 0), Fills())
    assert not take_delta(ledger, book, 0).is_empty
    for number in (1, 2):
        book.end(number)  # type: ignore[arg-type]
        assert not take_delta(ledger, book, 0).is_empty
    assert take_delta(ledger, book, 0).is_empty


def test_an_owner_number_that_is_given_again_within_one_delta_is_ended_first() -> None:
    book = SequenceBook(4)
    book.change(view(1, 7, (3, 4), tokens=6), Fills())
    assert [change.owner for change in book.take_changes().changed] == [7]
    book.end(1)  # type: ignore[arg-type]
    book.change(view(2, 7, (5,), tokens=1), Fills())
    changes = book.take_changes()
    assert list(changes.ended_owners) == [7]
    assert [(change.request_id, change.page_ids) for change in changes.changed] == [("r2", (5,))]


def test_only_the_pages_that_changed_are_said_again() -> None:
    book = SequenceBook(4)
    book.change(view(1, 7, (3, 4), tokens=6), Fills())
    book.take_changes()
    book.change(view(1, 7, (9,), first=2, tokens=9), Fills())
    book.change(view(1, 7, (8, 9), first=1, tokens=9), Fills())
    (change,) = book.take_changes().changed
    assert (change.first_page_index, change.page_ids) == (1, (8, 9))
    fills = Fills()
    book.progress(array("H", (7,)), array("I", (11,)), fills)
    assert (list(fills.pages), list(fills.slots)) == ([9], [3])
    changes = book.take_changes()
    assert (changes.changed, changes.progress_owners.tolist(), changes.progress_tokens.tolist()) == (
        [],
        [7],
        [11],
    )


def test_one_that_ends_while_it_waits_is_named_if_it_was_ever_told() -> None:
    book = SequenceBook(4)
    book.change(view(1, 0), Fills())
    book.end(1)  # type: ignore[arg-type]
    assert list(book.take_changes().ended_waiting) == [], "nobody was told of it"
    book.change(view(2, 0), Fills())
    book.take_changes()
    book.end(2)  # type: ignore[arg-type]
    assert [ended.request_id for ended in book.take_changes().ended_waiting] == ["r2"]
    book.change(view(3, 0), Fills())
    book.take_changes()
    book.change(view(3, 5), Fills())
    book.end(3)  # type: ignore[arg-type]
    ended = book.take_changes().ended_waiting
    assert [each.request_id for each in ended] == ["r3"], "nobody was told of its owner number"


def test_fills_of_many_pages_at_once_keep_the_sums() -> None:
    ring = EventRing()
    for page in range(3):
        ring.append(PageEventKind.ALLOCATED, page, 1, 1)
    events = ring.read(0)
    assert events is not None
    ledger = Ledger(4, 4)
    ledger.fold(events)
    fills = Fills()
    fills.add(array("I", (0, 1, 2)), 0, 6, 4)
    ledger.fill(fills.pages, fills.slots)
    assert ledger.filled.tolist() == [4, 2, 0, 0, 0]
    assert ledger.filled_slots == 6
    twice = Fills()
    twice.add(array("I", (0, 1, 2)), 1, 7, 4)
    twice.add(array("I", (0, 1, 2)), 1, 9, 4)
    ledger.fill(twice.pages, twice.slots)
    assert ledger.filled.tolist() == [4, 4, 1, 0, 0]
    assert ledger.filled_slots == 9
