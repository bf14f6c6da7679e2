"""The observer: folds what the engine hands over, and gives frozen views to metrics, feed and heartbeats.

Runs on a thread of its own, in pieces so short that few steps wait for it. When events were overwritten
before it read them, or the engine could not hand over, it asks for a snapshot and starts from that.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from worker.channels import Handover
from worker.log import log_event
from worker.pages.events import EventRing
from worker.readers.audit import AuditBook, Finding
from worker.readers.constraint_meter import ConstraintMeter
from worker.readers.delta import totals
from worker.readers.event_arrays import EventArrays
from worker.readers.ledger import Ledger
from worker.readers.load import LoadMeter
from worker.readers.memory import MemoryMeter
from worker.readers.metrics import Histograms, MetricsView, first_view
from worker.readers.observation import Observation
from worker.readers.pace import Pace
from worker.readers.pool_meters import PoolMeters
from worker.readers.sequences import Fills, SequenceBook
from worker.readers.step_meter import StepMeter
from worker.stats import EngineCounts, LoadView, PoolTotals, SequenceView

MAX_EVENTS_PER_FOLD = 4096

logger = logging.getLogger("worker.observer")


class Fold:
    """The state of all pages and sequences as of one revision. Lent to sinks for the length of a call."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.ledger = Ledger(num_pages, page_size)
        self.book = SequenceBook(page_size)
        self.counts = EngineCounts()
        self.num_rebuilds = 0
        self.started: list[SequenceView] = []  # sequences that got their owner number in this turn
        self.ended_owners: list[int] = []  # owners that ended in this turn
        self.audits = AuditBook()
        self.findings: list[Finding] = []  # of audits that came in this turn

    def pool(self) -> PoolTotals:
        """Totals as of the revision."""
        return totals(self.ledger)


class Sink(Protocol):
    """Who publishes the fold. All calls come from the observer's thread."""

    @property
    def dropped_events(self) -> int:
        """Page events that its readers were never sent."""
        ...

    def open(self) -> None:
        """First call."""
        ...

    def publish(self, fold: Fold, pool: PoolTotals, now: float) -> float:
        """Once per turn; returns the seconds after which it wants the next."""
        ...

    def close(self) -> None:
        """Last call."""
        ...


class Observer:
    """The thread and the fold."""

    def __init__(
        self,
        ring: EventRing,
        handover: Handover[Observation],
        *,
        num_pages: int,
        page_size: int,
        watermark_pages: int = 0,
        ask_for_snapshot: Callable[[], None],
        on_load: Callable[[LoadView], None],
        on_failure: Callable[[], None],
        sink: Sink,
        recorder_dropped: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = ring
        self._handover = handover
        self._ask_for_snapshot = ask_for_snapshot
        self._on_load = on_load
        self._on_failure = on_failure
        self._sink = sink
        self._recorder_dropped = recorder_dropped
        self._clock = clock
        self._fold = Fold(num_pages, page_size)
        self._pace = Pace()
        self._waits_for_snapshot = False
        self._lost_events = 0
        self._meter = StepMeter()
        self._pool_meters = PoolMeters(num_pages, watermark_pages)
        self.memory = MemoryMeter()
        self.constraints = ConstraintMeter()
        self._load = LoadMeter(clock())
        self._rows_used = 0
        self._idle_seconds = 0.0
        self.metrics: MetricsView = first_view(self._fold.pool())
        self._wake = threading.Event()
        self._is_stopping = False
        self.thread = threading.Thread(target=self._run, name="kvatlas-observer", daemon=True)

    def look(self) -> tuple[int, int]:
        """Evictions for room since the start, and slots of active pages without a token; from any thread."""
        metrics = self.metrics
        return metrics.counts.capacity_evictions_total, metrics.pool.unfilled_slots

    def start(self) -> None:
        """Begins to fold."""
        self.thread.start()

    def wake(self) -> None:
        """There is something to answer before the next turn."""
        self._wake.set()

    def close(self) -> None:
        """Folds what is there, publishes it, ends the thread; idempotent."""
        self._is_stopping = True
        self._wake.set()
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        try:
            self._sink.open()
            while not self._is_stopping:
                began = self._clock()
                self._pace.begin()
                pause = self.turn()
                self._wake.wait(max(0.0, began + pause - self._clock()))
                self._wake.clear()
            self.turn()
        except Exception:
            logger.exception("event=observer_failed")
            self._on_failure()
        finally:
            self._sink.close()

    def turn(self) -> float:
        """Folds and publishes once; returns the seconds until the next turn."""
        fold, now = self._fold, self._clock()
        for observation in self._handover.take_all():
            self._take(observation)
        pool = fold.pool()
        self._on_load(self._load.view(now, fold.counts, pool))
        self.memory.look(now)
        self.metrics = self._view(pool)
        self._rest()
        pause = self._sink.publish(fold, pool, now)
        fold.started, fold.ended_owners, fold.findings = [], [], []
        return pause

    def _rest(self) -> None:
        """Not while the ring fills up: what is overwritten before it was read costs more than a late step."""
        is_late = self._ring.number - self._fold.ledger.revision > self._ring.capacity // 4
        if not is_late and not self._is_stopping:
            self._pace.rest()

    def _take(self, observation: Observation) -> None:
        self._take_numbers(observation)
        if observation.snapshot is not None:
            self._rebuild(observation)
        elif self._waits_for_snapshot or not self._fold_events(observation.revision):
            return
        else:
            self._fold_sequences(observation)
        self._pool_meters.run_to(observation.time_us)

    def _take_numbers(self, observation: Observation) -> None:
        self._fold.counts = observation.counts
        self._rows_used = observation.rows_used
        self._idle_seconds = observation.idle_seconds
        for step in observation.steps:
            self._meter.step(step)
            self._load.step(step)
        self._meter.bills(observation.bills)
        for audit in observation.audits:
            self._fold.audits.record(audit)
            self._fold.findings += audit.findings
            self._meter.check(audit.seconds)

    def _fold_events(self, revision: int) -> bool:
        ledger = self._fold.ledger
        while ledger.revision < revision:
            events = self._ring.read(ledger.revision, min(revision - ledger.revision, MAX_EVENTS_PER_FOLD))
            if events is None:
                self._lose(revision)
                return False
            arrays = EventArrays(events)
            self._pool_meters.fold(ledger, arrays)
            self._rest()
            ledger.fold_arrays(arrays)
            self._rest()
        return True

    def _lose(self, revision: int) -> None:
        lost = revision - self._fold.ledger.revision  # so far: those up to the snapshot go with them
        self._waits_for_snapshot = True
        log_event(logger, logging.WARNING, "observer_lagged", lost_events=lost)
        self._ask_for_snapshot()

    def _fold_sequences(self, observation: Observation) -> None:
        book = self._fold.book
        self._fold.started += observation.started
        self._fold.ended_owners += observation.ended_owners
        for sequence_id in observation.ended:
            book.end(sequence_id)
        fills = Fills()
        book.grow(observation.growth)
        for view in observation.changes:
            book.change(view, fills)
        self._rest()
        book.progress(observation.progress_owners, observation.progress_tokens, fills)
        self._fold.ledger.fill(fills.pages, fills.slots)
        self._rest()

    def _rebuild(self, observation: Observation) -> None:
        fold = self._fold
        assert observation.snapshot is not None
        self._lost_events += observation.snapshot.number - fold.ledger.revision
        fold.book.clear()
        self._pool_meters.run_to(observation.time_us)  # with what was known until now
        fold.ledger.restore(observation.snapshot)
        self._pool_meters.restart(fold.ledger)
        fold.num_rebuilds += 1
        self._waits_for_snapshot = False
        for view in observation.snapshot.sequences:
            fold.book.change(view, Fills())  # the snapshot has the planes as well
        log_event(logger, logging.INFO, "observer_rebuilt", revision=fold.ledger.revision)

    def _view(self, pool: PoolTotals) -> MetricsView:
        return MetricsView(
            counts=self._fold.counts,
            pool=pool,
            events_by_kind=tuple(self._fold.ledger.event_counts.tolist()),
            flush_evictions=self._fold.ledger.flush_evictions,
            rows_used=self._rows_used,
            idle_seconds=self._idle_seconds,
            checks=self._fold.audits.counts(),
            last_success_seconds=self._fold.audits.last_success_ns / 1e9,
            dropped={
                "observer": self._lost_events,
                "feed": self._sink.dropped_events,
                "recorder": self._recorder_dropped(),
            },
            pressure_seconds=self._pool_meters.pressure_seconds(),
            graphs=self._meter.graphs,
            memory_bytes=self.memory.bytes_by_kind,
            constraint_lookups=self.constraints.lookups,
            histograms=self._histograms(),
        )

    def _histograms(self) -> Histograms:
        return {**self._meter.frozen(), **self._pool_meters.frozen(), **self.constraints.frozen()}
