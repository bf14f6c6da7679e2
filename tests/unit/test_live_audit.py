"""The live audit: rounds never wait for the device, sweeps leave nothing out, planted faults are seen."""

from array import array
from collections.abc import Callable, Sequence

import pytest

from worker.execution.fake_runner import CopiedRows, FakeModel, FakeRunner
from worker.faults import plant
from worker.ids import SequenceId
from worker.live_audit import READ_SECONDS, LiveAudit
from worker.pages.page_cache import CacheConfig
from worker.readers.audit import AuditBook, AuditRound, SweepReport
from worker.readers.metric_table import CHECKS
from worker.scheduling.audit import RowSpan
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig

NUM_PAGES = 40


class LateCopy:
    """A copy that is on its way until the test lets it arrive."""

    def __init__(self, rows: CopiedRows, is_here: Callable[[], bool]) -> None:
        self._rows = rows
        self._is_here = is_here

    def is_ready(self) -> bool:
        return self._is_here()

    def result(self) -> list[list[int]]:
        assert self._is_here(), "the engine waited for the device"
        return self._rows.result()


class SlowRunner(FakeRunner):
    """Copies arrive when `has_arrived` is set."""

    has_arrived = True
    num_reads = 0

    def begin_read(self, spans: Sequence[RowSpan]) -> LateCopy:  # type: ignore[override]
        self.num_reads += 1
        return LateCopy(super().begin_read(spans), lambda: self.has_arrived)


class Bench:
    """Sequences that run, an audit, and a clock in the test's hands."""

    def __init__(self, num_pages: int = NUM_PAGES) -> None:
        self.now = 0.0
        config = SchedulerConfig(
            CacheConfig(num_pages, 4), max_running=8, max_step_tokens=64, max_context_tokens=64
        )
        self.scheduler = Scheduler(config)
        self.runner = SlowRunner(
            num_pages=num_pages, page_size=4, max_running=8, row_width=64, model=FakeModel(50)
        )
        self.audit = LiveAudit(
            self.scheduler, self.runner, interval_seconds=1.0, clock=lambda: self.now, now_ns=lambda: 77
        )
        for number in range(1, 5):
            spec = RequestSpec(
                SequenceId(number),
                array("I", [number] * 10),
                SamplingParams(max_tokens=40, stop_at_eos=False),
                source="s",
            )
            self.scheduler.add(spec, self.now)
        self.step()

    def step(self) -> None:
        step = self.scheduler.schedule(self.now)
        assert step is not None
        self.scheduler.commit(step, self.runner.launch(step).result(), self.now)

    def look(self, seconds: float) -> AuditRound | None:
        self.now += seconds
        return self.audit.look(self.now)


def test_a_round_ends_when_its_copy_has_arrived_and_steps_go_on_meanwhile() -> None:
    """engine.md 2, S1-35: the device's rows are those of the moment at which the copy was asked for."""
    bench = Bench()
    bench.runner.has_arrived = False
    for _ in range(20):
        assert bench.look(0.001) is None
        bench.step()
    assert bench.runner.num_reads == 1, "one copy at a time"
    bench.runner.has_arrived = True
    found = bench.look(0.001)
    assert found is not None
    assert (tuple(found.checks), list(found.findings)) == (CHECKS, [])
    assert bench.look(0.5) is None, "the next one is due a second later"
    assert bench.look(0.6) is not None


def test_a_copy_that_never_comes_is_given_up() -> None:
    bench = Bench()
    bench.runner.has_arrived = False
    assert bench.look(0.0) is None
    assert bench.look(READ_SECONDS - 0.1) is None
    found = bench.look(0.2)
    assert found is not None
    assert "device_table" not in found.checks


def test_a_slot_that_differs_on_the_device_is_found_with_both_sides() -> None:
    bench = Bench()
    row = bench.scheduler.sequence_views()[1].row
    assert row is not None
    wanted = bench.runner.page_table[row][6]
    bench.runner.page_table[row][6] = 99
    rounds = [bench.look(1.1) for _ in range(3)]
    found = [finding for audit in rounds if audit for finding in audit.findings]
    assert {finding.check for finding in found} == {"device_table"}
    assert (found[0].row, found[0].expected, found[0].found) == (
        row,
        f"slot {wanted} by the books",
        "slot 99 on the device",
    )
    assert found[0].time_ns == 77


def test_an_idle_engine_looks_again_while_a_copy_is_on_its_way() -> None:
    bench = Bench()
    assert bench.audit.next_time(bench.now) is None
    bench.runner.has_arrived = False
    bench.look(0.0)
    due = bench.audit.next_time(bench.now)
    assert due is not None
    assert bench.now < due < bench.now + 0.1


def test_a_sweep_looks_at_every_page_and_row_once_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.live_audit.SWEEP_PAGES", 7)
    monkeypatch.setattr("worker.live_audit.SWEEP_ROWS", 1)
    bench = Bench()
    reports: list[SweepReport] = []
    bench.audit.sweep(reports.append)
    for _ in range(50):
        bench.look(0.01)
        bench.step() if bench.scheduler.has_work(bench.now) else None
        if reports:
            break
    (report,) = reports
    assert not bench.audit.is_sweeping
    assert (report.num_pages, report.num_rows, report.num_findings) == (NUM_PAGES, 4, 0)
    assert report.num_rounds == -(-NUM_PAGES // 7)
    assert report.first_revision <= report.last_revision


def test_a_planted_leak_is_found_by_the_next_round_that_looks_at_the_page() -> None:
    """S1-35: a page that no row holds keeps its reference; named with both numbers."""
    bench = Bench()
    before = bench.scheduler.cache.pool.num_active
    plant("page_leak", bench.scheduler, bench.runner)
    assert bench.scheduler.cache.pool.num_active == before + 1
    found = bench.look(1.0)
    assert found is not None
    page = next(finding for finding in found.findings if finding.page is not None)
    assert (page.check, page.expected, page.found) == ("refcount", "0", "1")
    assert {"refcount", "state_sum"} == set(found.broken)


@pytest.mark.parametrize("part", ["books", "device", "wait", "copy"])
def test_a_check_that_breaks_is_a_finding_and_no_crash(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Books so broken that looking at them raises; a device that does not answer any more."""
    bench = Bench()

    def broken(*_: object) -> None:
        raise KeyError("nobody knows this page")

    if part == "books":
        bench.scheduler._books.by_owner[9] = None  # type: ignore[index, assignment]
    elif part == "device":
        monkeypatch.setattr(bench.runner, "begin_read", broken)
    else:
        monkeypatch.setattr(LateCopy, "result" if part == "copy" else "is_ready", broken)
    found = bench.look(1.0)
    assert found is not None
    checks = {finding.check for finding in found.findings if finding.subject == "the check itself"}
    assert checks >= ({"state_sum"} if part == "books" else {"device_table"})
    assert checks == set(found.broken)
    book = AuditBook()
    book.record(found)
    failed = {check for check, result in book.results.items() if result.fails}
    passed = {check for check, result in book.results.items() if result.passes}
    assert failed == checks, "what breaks has failed"
    assert passed == (set() if part == "books" else set(CHECKS) - checks), "what was not looked at is no pass"
    again = bench.look(3.0)
    assert again is not None, "the next round comes all the same"


def test_findings_never_hold_token_ids() -> None:
    bench = Bench()
    books = bench.scheduler._books
    sequence = next(iter(books.by_owner.values()))
    sequence.tokens[1] = 48_879
    (finding,) = [f for f in bench.scheduler.check() if f.check == "trie"]
    text = str(finding)
    assert "other tokens at the beginning" in text
    assert "48879" not in text
    assert "48_879" not in text
