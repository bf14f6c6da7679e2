"""Drives a scheduler and a runner without threads or sockets, and watches both. For tests and simulation.

Owns what each sequence has put out. After every decision it audits the books, folds the page events and
compares them with the pool, and poisons the pages that became free, so a test that merely runs something
through it already proves that nothing is leaked, aliased or freed early.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from worker.execution.fake_runner import FakeHandle, FakeModel, FakeRunner
from worker.ids import SequenceId
from worker.pages.events import EventColumns, PageEventKind, PageFlag, PageState
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import (
    NO_TOKEN,
    FailureReason,
    FinishCode,
    OutputColumns,
    SequenceEnd,
    SequenceStart,
)
from worker.scheduling.request import AbortReason, AddOutcome, AddStatus, RequestSpec
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, TokenLogprob


class PageFold:
    """The second implementation of the pool: the table of page events applied to planes."""

    def __init__(self, num_pages: int) -> None:
        self.states = bytearray((PageState.FREE,)) * num_pages + bytes((PageState.RESERVED,))
        self.refs = array("H", bytes(2 * (num_pages + 1)))
        self.flags = [0] * (num_pages + 1)
        self.number = 0
        self.counts = dict.fromkeys(PageEventKind, 0)
        self.active_seconds = 0.0  # integral of active pages over time
        self._num_active = 0
        self._time_us = 0
        self._due: dict[int, tuple[PageEventKind, ...]] = {}  # what the next event of a page must be

    def apply(self, events: EventColumns) -> None:
        """Applies events in order; AssertionError where the table does not allow one."""
        assert events.first_number == self.number + 1, (events.first_number, self.number)
        columns = zip(events.kinds, events.pages, events.refs, events.times_us, strict=True)
        for kind, page, refs, time_us in columns:
            self.active_seconds += self._num_active * max(0, time_us - self._time_us) / 1e6
            self._time_us = max(time_us, self._time_us)
            was_active = self.states[page] == PageState.ACTIVE and self.refs[page] > 0
            self._apply(PageEventKind(kind), page)
            self._num_active += (self.refs[page] > 0) - was_active
            assert refs == self.refs[page], f"event of page {page} says {refs} references"
        self.number = events.last_number

    def _apply(self, kind: PageEventKind, page: int) -> None:
        state, flags = self.states[page], self.flags[page]
        due = self._due.pop(page, None)
        assert due is None or kind in due, f"page {page}: {kind.name} where {due} had to follow"
        self.counts[kind] += 1
        if kind == PageEventKind.ALLOCATED:
            assert state == PageState.FREE, (kind, page, state)
            self.states[page], self.refs[page] = PageState.ACTIVE, 1
        elif kind == PageEventKind.SHARED:
            assert state == PageState.ACTIVE, (kind, page, state)
            self.refs[page] += 1
        elif kind == PageEventKind.REVIVED:
            assert state in (PageState.CACHED, PageState.PINNED), (kind, page, state)
            self.states[page], self.refs[page] = PageState.ACTIVE, 1
        elif kind == PageEventKind.SEALED:
            assert state == PageState.ACTIVE, (kind, page, state)
            self.flags[page] |= PageFlag.SEALED
        elif kind == PageEventKind.RELEASED:
            self.refs[page] -= 1
            if not self.refs[page]:
                kept = flags & PageFlag.SEALED
                self._due[page] = (PageEventKind.CACHED,) if kept else (PageEventKind.FREED,)
        elif kind == PageEventKind.CACHED:
            assert self.refs[page] == 0, (kind, page)
            self.states[page] = PageState.PINNED if flags & PageFlag.PINNED else PageState.CACHED
        elif kind == PageEventKind.EVICTED:
            self.flags[page] &= ~PageFlag.SEALED
            if not self.refs[page]:
                self._due[page] = (PageEventKind.FREED,)
        elif kind == PageEventKind.FREED:
            assert self.refs[page] == 0, (kind, page)
            self.states[page], self.flags[page] = PageState.FREE, 0
        elif kind == PageEventKind.PINNED:
            self.flags[page] |= PageFlag.PINNED
            if not self.refs[page]:
                self.states[page] = PageState.PINNED
        elif kind == PageEventKind.UNPINNED:
            self.flags[page] &= ~PageFlag.PINNED
            if not self.refs[page]:
                self.states[page] = PageState.CACHED


@dataclass
class Answer:
    """What came out for one sequence."""

    tokens: list[int] = field(default_factory=list)
    end: SequenceEnd | None = None
    start: SequenceStart | None = None
    num_starts: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    @property
    def code(self) -> FinishCode:
        """Why it ended; NONE: it did not."""
        return self.end.code if self.end is not None else FinishCode.NONE


class Harness:
    """One scheduler, one fake runner, one clock that moves by a hundredth of a second a turn."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: FakeModel,
        *,
        overlap: bool = False,
        audit: bool = True,
        fail: Callable[[SequenceId, int], str | None] | None = None,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.overlap = overlap
        self.now = 1.0
        pool = self.scheduler.cache.pool
        size = config.page_size
        longest = min(config.max_context_tokens, config.cache.num_pages * size)
        self.runner = FakeRunner(
            num_pages=config.cache.num_pages,
            page_size=size,
            max_running=config.max_running,
            row_width=-(-longest // size) * size,
            model=model,
            lazy=overlap,
            is_held=lambda page: pool.references(page) > 0,
            fail=fail,
        )
        self.answers: dict[int, Answer] = {}
        self.steps: list[Step] = []  # the last 64
        self.fold = PageFold(config.cache.num_pages)
        self._audit = audit
        self._freed: list[int] = []  # since the last launch
        self._in_flight: deque[tuple[Step, FakeHandle]] = deque()

    def add(self, spec: RequestSpec) -> AddOutcome:
        """Adds a request now."""
        outcome = self.scheduler.add(spec, self.now)
        if outcome.status == AddStatus.ACCEPTED:
            for number in range(spec.sample_count):
                self.answers[spec.sequence_id + number] = Answer()
        self.collect()
        return outcome

    def abort(self, *sequence_ids: int) -> None:
        """Aborts sequences now."""
        self.scheduler.abort(sequence_ids, AbortReason.CLIENT, self.now)
        self.collect()
        self.audit()

    def launch(self) -> Step | None:
        """Schedules a step and launches it; None: nothing to launch."""
        self.now += 0.01
        step = self.scheduler.schedule(self.now)
        self.collect()
        self.audit()
        if step is not None:
            self._poison_freed()
            self._in_flight.append((step, self.runner.launch(step)))
            self.steps = [*self.steps[-63:], step]
        return step

    def commit(self) -> None:
        """Waits for the oldest step in flight and commits it."""
        step, handle = self._in_flight.popleft()
        result = handle.result()
        self.now += 0.001
        self.scheduler.commit(step, result, self.now)
        self.collect()
        self.audit()

    def abandon(self, reason: FailureReason, message: str) -> None:
        """The device lost the oldest step in flight."""
        step, _ = self._in_flight.popleft()
        self.scheduler.abandon(step, reason, message, self.now)
        self.collect()
        self.audit()

    def turn(self) -> Step | None:
        """One turn as the engine makes it; returns the step that was launched."""
        step = self.launch()
        keep = 1 if self.overlap and step is not None else 0
        while len(self._in_flight) > keep:
            self.commit()
        return step

    def run(self, max_turns: int = 10_000) -> int:
        """Turns until there is nothing to do; how many. AssertionError past the limit."""
        for number in range(max_turns):
            if not self.scheduler.has_work(self.now):
                return number
            self.turn()
        raise AssertionError(f"still at work after {max_turns} turns: {self.scheduler.sequence_views()}")

    def settle(self) -> None:
        """Commits everything in flight."""
        while self._in_flight:
            self.commit()

    def audit(self) -> None:
        """Books against each other, events against the pool; AssertionError with both sides' numbers."""
        ring = self.scheduler.cache.events
        events = ring.read(self.fold.number, limit=ring.capacity)
        assert events is not None, "the harness lagged behind the event ring"
        self.fold.apply(events)
        self._freed += [
            page for kind, page in zip(events.kinds, events.pages, strict=True) if kind == PageEventKind.FREED
        ]
        if not self._audit:
            return
        violations = self.scheduler.check()
        assert not violations, "\n".join(map(str, violations))
        planes = self.scheduler.cache.pool.planes()
        assert self.fold.states == planes.states, "states differ from what the events say"
        assert self.fold.refs == planes.ref_counts, "references differ from what the events say"

    def _poison_freed(self) -> None:
        self.runner.poison(self._freed)
        self._freed = []

    def audit_rows(self, limit: int = 4) -> None:
        """Rows on the device against the books."""
        spans = self.scheduler.row_spans(limit, max_slots=1 << 20)
        found = self.runner.begin_read(spans).result()
        for span, actual in zip(spans, found, strict=True):
            expected = span.slots.tolist()
            assert expected == actual, f"row {span.row}: the device has {actual}, the books {expected}"

    def collect(self) -> None:
        """Takes outputs; a second end, or a token after the end, is an AssertionError."""
        for columns in self.scheduler.take_outputs().values():
            self._collect(columns)

    def _collect(self, columns: OutputColumns) -> None:
        for start in columns.starts:
            answer = self.answers[start.sequence_id]
            answer.num_starts += 1
            if not start.resumed:
                assert answer.start is None, f"{start} came twice"
                answer.start = start
        ends = iter(columns.ends)
        entries = zip(columns.sequence_ids, columns.token_ids, columns.finish_codes, strict=True)
        for at, (sequence_id, token_id, code) in enumerate(entries):
            answer = self.answers[sequence_id]
            assert answer.end is None, f"sequence {sequence_id} goes on after {answer.end}"
            if token_id != NO_TOKEN:
                answer.tokens.append(token_id)
                if at in columns.logprobs:
                    answer.logprobs.append(columns.logprobs[at])
            if code:
                answer.end = next(ends)
                assert (answer.end.sequence_id, answer.end.code) == (sequence_id, code)
        assert next(ends, None) is None, "more ends than finish codes"
        for sequence_id, values in columns.prompt_logprobs:
            assert self.answers[sequence_id].prompt_logprobs is None, "prompt log-probabilities came twice"
            self.answers[sequence_id].prompt_logprobs = values


def small_config(
    num_pages: int = 16,
    page_size: int = 4,
    max_running: int = 8,
    max_step_tokens: int = 64,
    max_context_tokens: int = 64,
    **changes: object,
) -> SchedulerConfig:
    """A small pool without watermark; ``changes``: other fields of SchedulerConfig and CacheConfig."""
    cache_fields = set(CacheConfig.__dataclass_fields__)
    of_cache = {name: value for name, value in changes.items() if name in cache_fields}
    others = {"watermark_pages": 0} | {k: v for k, v in changes.items() if k not in cache_fields}
    cache = CacheConfig(num_pages, page_size, **{"event_capacity": 4096} | of_cache)  # type: ignore[arg-type]
    return SchedulerConfig(
        cache,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_context_tokens=max_context_tokens,
        **others,  # type: ignore[arg-type]
    )


def numbers(first: int, count: int) -> "array[int]":
    """Token ids first, first + 1, …"""
    return array("I", range(first, first + count))
