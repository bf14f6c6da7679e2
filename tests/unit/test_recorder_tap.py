"""The recorder beside the feed: ledgers for who lost events, and what audits find."""

from pathlib import Path
from typing import Any

from worker.execution.testing import small_config
from worker.link.recorder_tap import MAX_ASKS, RecorderTap
from worker.readers.audit import Finding
from worker.readers.ledger import Ledger
from worker.readers.metric_table import CHECKS
from worker.readers.observer import Fold
from worker.readers.recording_store import EndCause
from worker.stats import PoolTotals
from worker.trace.testing import RecordedWorker

EPOCH = 5


class Feed:
    """A sink that notes what it is told."""

    dropped_events = 7

    def __init__(self) -> None:
        self.told: list[object] = []

    def open(self) -> None:
        self.told.append("open")

    def publish(self, fold: Fold, pool: PoolTotals, now: float) -> float:
        self.told.append((fold, pool, now))
        return 0.25

    def close(self) -> None:
        self.told.append("close")


def test_all_calls_of_the_observer_reach_the_feed() -> None:
    feed, fold = Feed(), Fold(4, 16)
    tap, pool = RecorderTap(feed, EPOCH), fold.pool()
    tap.open()
    assert tap.publish(fold, pool, 9.0) == 0.25
    tap.close()
    assert feed.told == ["open", (fold, pool, 9.0), "close"]
    assert (tap.dropped_events, tap.recorder_dropped()) == (7, 0)


def test_a_ledger_is_lent_once_to_each_who_asked_and_they_are_so_many_at_most() -> None:
    tap, fold = RecorderTap(Feed(), EPOCH), Fold(4, 16)
    lent: list[tuple[int, Ledger]] = []
    for number in range(MAX_ASKS + 2):
        tap.ask_for_ledger(lambda ledger, number=number: lent.append((number, ledger)))  # type: ignore[misc]
    assert lent == []
    tap.publish(fold, fold.pool(), 0.0)
    assert [number for number, _ in lent] == list(range(MAX_ASKS))
    assert all(ledger is fold.ledger for _, ledger in lent)
    tap.publish(fold, fold.pool(), 0.0)
    assert len(lent) == MAX_ASKS


def test_what_an_audit_finds_is_recorded_with_its_reason(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60), tmp_path)
    tap, fold = RecorderTap(Feed(), EPOCH), Fold(48, 4)
    fold.findings = [Finding(CHECKS[0], "page 3", "1", "2", page=3), Finding(CHECKS[1], "row 4", "5", "6")]
    tap.publish(fold, fold.pool(), 0.0)  # before the recorder is made
    tap.recorder = worker.recorder
    worker.recorder.dropped_events = 11
    assert tap.recorder_dropped() == 11
    tap.publish(fold, fold.pool(), 0.0)
    worker.recorder.turn()
    (summary,) = worker.store.summaries()
    assert summary.cause is EndCause.AUDIT
    assert summary.note == f"{CHECKS[0]}: page 3: expected 1, found 2"
    fold.findings = []
    asked: list[Any] = []
    worker.recorder.found = lambda *given: asked.append(given)  # type: ignore[method-assign]
    tap.publish(fold, fold.pool(), 0.0)
    assert asked == []
