"""What an observer makes of what the engine hands over: counted once, carried over a loss, told once."""

from array import array
from collections.abc import Sequence

import pytest

from tests.quiet_turn import quiet_turn
from worker.channels import Handover
from worker.pages.events import EventRing, PageEventKind
from worker.pages.pool import PagePool
from worker.pages.snapshot import Planes, PoolSnapshot
from worker.readers.audit import AuditRound, Finding
from worker.readers.delta import totals
from worker.readers.observation import Observation
from worker.readers.observer import Fold, Observer
from worker.stats import EngineCounts, LoadView, PoolTotals, StepStats

NUM_PAGES, PAGE_SIZE = 4, 16


class Told:
    """A sink that keeps what it was told in each turn."""

    dropped_events = 5

    def __init__(self) -> None:
        self.findings: list[list[Finding]] = []

    def open(self) -> None:
        pass

    def publish(self, fold: Fold, pool: PoolTotals, now: float) -> float:
        self.findings.append(fold.findings)
        return 1.0

    def close(self) -> None:
        pass


class Bench:
    """An observer of a pool with a ring of eight events, turned by hand."""

    def __init__(self) -> None:
        self.ring = EventRing(8)
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE, self.ring)
        self.handover: Handover[Observation] = Handover(8)
        self.told = Told()
        self.asked = 0
        self.loads: list[LoadView] = []
        self.observer = Observer(
            self.ring,
            self.handover,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            ask_for_snapshot=self._ask,
            on_load=self.loads.append,
            on_failure=lambda: None,
            sink=self.told,
            recorder_dropped=lambda: 9,
            clock=lambda: 10.0,
        )

    def _ask(self) -> None:
        self.asked += 1

    def turn(
        self,
        seconds: float,
        *,
        steps: Sequence[StepStats] = (),
        audits: Sequence[AuditRound] = (),
        bills: Sequence[float] = (),
        with_snapshot: bool = False,
    ) -> None:
        time_us = int(seconds * 1e6)
        planes = self.pool.planes()
        snapshot = PoolSnapshot(
            number=self.ring.number,
            step=1,
            time_us=time_us,
            page_size=PAGE_SIZE,
            counts=self.pool.counts_by_state(),
            sequences=(),
            **{name: getattr(planes, name) for name in Planes.__slots__},
        )
        observation = quiet_turn(
            revision=self.ring.number,
            time_us=time_us,
            counts=EngineCounts(capacity_evictions_total=3),
            rows_used=2,
            idle_seconds=1.5,
            steps=steps,
            bills=bills,
            audits=audits,
            snapshot=snapshot if with_snapshot else None,
        )
        assert self.handover.put(observation)
        self.observer.turn()


def test_steps_bills_and_rounds_are_counted_once_and_findings_told_once() -> None:
    bench = Bench()
    finding = Finding("trie", "page 1", "a", "b")
    audit = AuditRound(("trie",), [finding], 1, frozenset({"trie"}), 0.25, 7_000_000_000)
    good = AuditRound(("trie",), [], 0, frozenset(), 0.25, 8_000_000_000, num_sweeps=3)
    bench.turn(1.0, steps=[StepStats(1, 0.5, 1, 0, 1)], audits=[audit], bills=[2.0])
    assert bench.observer.metrics.last_success_seconds == 0.0
    bench.turn(2.0, audits=[good])
    metrics = bench.observer.metrics
    found = {key[0]: sum(counts) for key, (counts, _) in metrics.histograms.items() if sum(counts)}
    assert found == {
        "step_seconds": 1,
        "step_tokens": 1,
        "step_sequences": 1,
        "integrity_check_seconds": 2,
        "request_page_seconds": 1,
    }
    assert bench.told.findings == [[finding], []]
    assert (metrics.rows_used, metrics.idle_seconds, metrics.last_success_seconds) == (2, 1.5, 8.0)
    assert metrics.dropped == {"observer": 0, "feed": 5, "recorder": 9}
    assert bench.loads[0].mean_step_seconds == bench.loads[1].mean_step_seconds == 0.5


def test_time_goes_on_while_nothing_happens_and_over_a_loss() -> None:
    """Up to the snapshot with what was known until then, and on with what the pool is."""
    bench = Bench()
    pages = bench.pool.allocate(array("H", (1,)) * NUM_PAGES)
    assert pages is not None
    bench.turn(2.0)
    assert bench.observer.metrics.pressure_seconds["exhausted"] == pytest.approx(2.0)
    for _ in range(3):
        bench.pool.release(pages, 1)
        pages = bench.pool.allocate(array("H", (1,)) * NUM_PAGES)
        assert pages is not None
    bench.pool.release(pages, 1)
    bench.turn(3.0)
    assert bench.asked == 1
    assert bench.observer.metrics.pressure_seconds["exhausted"] == pytest.approx(2.0)
    bench.turn(5.0, with_snapshot=True)
    bench.turn(9.0)
    metrics = bench.observer.metrics
    assert (metrics.pressure_seconds["exhausted"], metrics.pressure_seconds["ok"]) == (5.0, 4.0)
    assert metrics.dropped["observer"] == bench.ring.number - NUM_PAGES, "all but those of the first turn"
    assert (bench.asked, metrics.pool.free_pages) == (1, NUM_PAGES)


def test_what_the_recorder_looks_at_are_evictions_and_empty_slots() -> None:
    bench = Bench()
    assert bench.pool.allocate(array("H", (1, 1))) is not None
    bench.turn(1.0)
    assert bench.observer.look() == (3, 2 * PAGE_SIZE)


def test_totals_tell_kinds_of_events_apart() -> None:
    ring, fold = EventRing(), Fold(NUM_PAGES, PAGE_SIZE)
    for page in range(4):
        ring.append(PageEventKind.ALLOCATED, page, 1, 1)
    for page in range(3):
        ring.append(PageEventKind.COPIED, page, 1, 1, other=3)
    ring.append(PageEventKind.SHARED, 3, 2, 2)
    for page in range(2):
        ring.append(PageEventKind.SEALED, page, 1, 1, tag=page + 1)
        ring.append(PageEventKind.EVICTED, page, 0, 1)
    events = ring.read(0)
    assert events is not None
    fold.ledger.fold(events)
    pool = totals(fold.ledger)
    assert (pool.allocations_total, pool.copies_total, pool.evictions_total) == (4, 3, 2)
    assert fold.ledger.flush_evictions == 2
