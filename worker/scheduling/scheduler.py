"""The scheduler: who runs next and with which pages, and what follows from what came out.

Owns the control plane's state through its books; called by the engine thread alone, nothing is locked.
Times are seconds of one monotonic clock, passed in. No tensors, no wire, no text.

One turn of an engine:

    scheduler.add(...), abort(...), ...           # commands, whenever they come
    step = scheduler.schedule(now)                # decide: frozen, pages reserved, numbered
    if step is not None: handle = runner.launch(step)
    elif scheduler.wants_commit: ...              # nothing can start before the oldest step is committed
    scheduler.commit(step, handle.result(), now)  # steps in the order in which they were scheduled
    outputs = scheduler.take_outputs()            # per service; also after add, abort, schedule

``schedule`` may be called again before the step before was committed (overlap): ids that are not known
yet come from the runner's token pool. A sequence that ends while a step in flight contains it gives its
pages and row back when that step is committed, and its token of that step is discarded.

``schedule`` returns None when nothing can be launched. Then, if ``wants_commit``, a step is in flight
and has to be committed first; otherwise there is nothing to do until a command or ``next_deadline``.
"""

from collections.abc import Callable, Iterable
from itertools import count

from worker.ids import Row, SequenceId
from worker.pages.page_cache import FlushOutcome, PageCache
from worker.pages.snapshot import PoolSnapshot
from worker.pages.violation import Violation
from worker.scheduling import views
from worker.scheduling.admission import Admission
from worker.scheduling.audit import Auditor, RowSpan
from worker.scheduling.books import Books
from worker.scheduling.commit import Committer
from worker.scheduling.output import FailureReason, FinishCode, OutputColumns
from worker.scheduling.pins import Pin, PinOutcome, Pins
from worker.scheduling.planning import Planner
from worker.scheduling.request import AbortReason, AddOutcome, AddStatus, RequestSpec
from worker.scheduling.sequence import Place, Request, Sequence
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import RowStart, Step, StepResult
from worker.scheduling.step_builder import row_start
from worker.scheduling.timers import TimerKind
from worker.stats import EngineCounts, SequenceView
from worker.traffic import Arrival, Departure

_ENDS = {
    TimerKind.DEADLINE: FinishCode.TIMED_OUT,
    TimerKind.QUEUE: FinishCode.QUEUE_TIMEOUT,
    TimerKind.DURATION: FinishCode.TIME_LIMIT,
}


class Scheduler:
    """The control plane of one worker."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.wants_commit = False
        self._books = Books(config)
        self._admission = Admission(self._books)
        self._planner = Planner(self._books, self._admission)
        self._committer = Committer(self._books)
        self._pins = Pins(self._books)
        self._books.tell_hit = self._pins.hit
        self._auditor = Auditor(self._books)
        self._numbers = count(1)
        self._draining = False
        self._stalled = False  # the last schedule found nothing to do, and nothing happened since

    # Requests.
    def add(self, spec: RequestSpec, now: float) -> AddOutcome:
        """Takes a request into the queue or says why not; the answer counts for all its samples."""
        limit = self._admission.limit(spec)
        refusal = self._admission.refuse(spec, limit, now, self._draining)
        if refusal is not None:
            return refusal
        books = self._books
        request = Request(spec, now)
        urgency = self._admission.urgency(spec, now)
        for number in range(spec.sample_count):
            rank = (urgency, next(self._numbers))
            request.samples.append(Sequence(request, number, rank, limit, self.config.eos_token_ids))
        for sequence in request.samples:
            books.sequences[sequence.id] = sequence
            books.mark(sequence, 0)
        request.num_live = spec.sample_count
        first = request.leader = request.samples[0]
        books.requests[first.rank[1]] = request
        books.num_queued += 1
        position = books.queue.add(first)
        num_hits = len(self._admission.known_pages(first))
        request.uncached_tokens = len(first.tokens) - num_hits * self.config.page_size
        books.uncached_tokens += request.uncached_tokens
        self._set_timers(spec, first.rank[1])
        if books.tell is not None:
            books.tell(self._arrival(first, now))
        self._stalled = False
        return AddOutcome(
            AddStatus.ACCEPTED,
            queue_position=position,
            estimated_wait_seconds=self._admission.estimated_wait(position),
            needed_pages=self._admission.most_pages(spec, limit),
            total_pages=self.config.cache.num_pages,
        )

    def _arrival(self, first: Sequence, now: float) -> Arrival:
        spec = first.request.spec
        return Arrival(
            time_us=max(0, int((now - self.config.start_time) * 1e6)),
            number=self._books.cache.events.number,
            sequence_id=first.id,
            request_id=spec.request_id,
            token_ids=[*spec.prompt_token_ids, *spec.resume_token_ids]
            if spec.resume_token_ids
            else spec.prompt_token_ids,
            sample_count=spec.sample_count,
            max_tokens=spec.params.max_tokens - len(spec.resume_token_ids),
            priority=spec.priority,
            cache_read=spec.cache_read and spec.params.prompt_logprobs is None,
            cache_write=spec.cache_write,
            cache_salt=spec.cache_salt,
        )

    def _set_timers(self, spec: RequestSpec, key: int) -> None:
        timers = self._books.timers
        if spec.deadline is not None:
            timers.add(spec.deadline, key, TimerKind.DEADLINE)
        if spec.queue_deadline is not None:
            timers.add(spec.queue_deadline, key, TimerKind.QUEUE)

    def abort(self, sequence_ids: Iterable[int], reason: AbortReason, now: float) -> int:
        """Ends sequences as ABORTED, in whatever phase; unknown and ended ids are ignored. How many."""
        return self._end_all(sequence_ids, now, FinishCode.ABORTED, message=reason.name)

    def fail(self, sequence_ids: Iterable[int], reason: FailureReason, message: str, now: float) -> int:
        """Ends sequences as FAILED; how many."""
        return self._end_all(sequence_ids, now, FinishCode.FAILED, failure=reason, message=message)

    def _end_all(
        self,
        sequence_ids: Iterable[int],
        now: float,
        code: FinishCode,
        failure: FailureReason | None = None,
        message: str = "",
        silent: bool = False,
    ) -> int:
        books = self._books
        books.set_clock(books.step_number, now)
        ended = 0
        for sequence_id in sequence_ids:
            sequence = books.sequences.get(SequenceId(sequence_id))
            if sequence is not None:
                books.end(sequence, code, failure=failure, message=message, silent=silent)
                ended += 1
        self._stalled = self._stalled and not ended
        return ended

    def drop_source(self, source: str, now: float) -> int:
        """A service is gone or starts over: its sequences end without a word. How many."""
        books = self._books
        ids = [s.id for s in books.sequences.values() if s.request.spec.source == source]
        ended = self._end_all(ids, now, FinishCode.ABORTED, silent=True)
        books.outbox.drop(source)
        return ended

    def set_draining(self, draining: bool) -> None:
        """While draining, ``add`` refuses; what was accepted goes on."""
        self._draining = draining

    def drain_rest(self, now: float) -> int:
        """Ends what is left as DRAINED, to be resumed elsewhere; how many."""
        return self._end_all(list(self._books.sequences), now, FinishCode.DRAINED)

    # Steps.
    def schedule(self, now: float) -> Step | None:
        """The next step; see the module's text for None."""
        books = self._books
        books.set_clock(books.step_number, now)
        self._expire(now)
        step = self._planner.plan(now)
        self.wants_commit = step is None and bool(books.in_flight)
        self._stalled = step is None and not books.in_flight
        return step

    def _expire(self, now: float) -> None:
        books = self._books
        for key, kind in books.timers.due(now):
            request = books.requests.get(key)
            if request is None or (kind == TimerKind.QUEUE and request.admit_time is not None):
                continue
            for sequence in request.samples:
                if sequence.place != Place.ENDED:
                    books.end(sequence, _ENDS[kind])
        books.timers.prune(books.requests)
        self._pins.expire(now)

    def commit(
        self,
        step: Step,
        result: StepResult,
        now: float,
        on_first_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        """The oldest step in flight is over, with this outcome.

        `on_first_tokens` may take outputs: called where prompts have their first tokens, before their pages
        are sealed.
        """
        books = self._books
        record = books.in_flight.popleft()
        assert record.step is step, f"step {step.number} committed before {record.step.number}"
        books.set_clock(step.number, now)
        self._stalled = False
        self._committer.commit(record, result, on_first_tokens)

    def abandon(self, step: Step, reason: FailureReason, message: str, now: float) -> None:
        """The oldest step in flight came to nothing: its sequences end as FAILED."""
        books = self._books
        record = books.in_flight.popleft()
        assert record.step is step, f"step {step.number} abandoned before {record.step.number}"
        books.set_clock(step.number, now)
        self._stalled = False
        books.release_held(step.number)
        self.fail(step.sequence_ids, reason, message, now)

    def row_start(self, sequence_id: int) -> RowStart | None:
        """What the runner must know of a sequence to begin its row anew; None: it has no row now."""
        sequence = self._books.sequences.get(SequenceId(sequence_id))
        return None if sequence is None or not sequence.owner else row_start(sequence)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not committed."""
        return len(self._books.in_flight)

    def take_outputs(self, leaving: str | None = None) -> dict[str, OutputColumns]:
        """Tokens, starts and ends by service since the last call; those of `leaving` wait for the next."""
        return self._books.outbox.take(leaving)

    def has_work(self, now: float) -> bool:
        """Whether ``schedule`` or ``commit`` is worth calling at ``now``."""
        books = self._books
        if books.in_flight:
            return True
        deadline = self.next_deadline(now)
        if deadline is not None and deadline <= now:
            return True
        return not self._stalled and bool(books.sequences)

    def next_deadline(self, now: float) -> float | None:
        """When something ends by the clock at the earliest; None: never."""
        times = [time for time in (self._books.timers.next_time, self._pins.next_expiry) if time is not None]
        return min(times, default=None)

    # Operators.
    def flush(
        self,
        now: float,
        matches: Callable[[bytes], bool] | None = None,
        include_active: bool = False,
        include_pinned: bool = False,
    ) -> FlushOutcome:
        """Empties the prefix cache, or the part whose salt ``matches``."""
        self._books.set_clock(self._books.step_number, now)
        if include_pinned:
            self._pins.drop(matches)
        self._stalled = False
        return self._books.cache.flush(matches, include_active)

    def pin(
        self,
        name: str,
        token_ids: "list[int]",
        salt: bytes,
        expires: float | None,
        now: float,
        computed_tokens: int = 0,
    ) -> PinOutcome:
        """Keeps the whole pages of a cached prefix; idempotent by name."""
        self._books.set_clock(self._books.step_number, now)
        return self._pins.set(name, token_ids, salt, expires, computed_tokens)

    def unpin(self, name: str, now: float) -> bool:
        """Lets go of a pin; whether there was one."""
        self._books.set_clock(self._books.step_number, now)
        self._stalled = False
        return self._pins.remove(name)

    def list_pins(self) -> list[Pin]:
        """Pins by name."""
        return self._pins.all()

    # Observers.
    def tell_traffic(self, tell: Callable[[Arrival | Departure], object]) -> None:
        """From now on ``tell`` gets each request that is accepted and each sequence that ends."""
        self._books.tell = tell

    @property
    def cache(self) -> PageCache:
        """The pages; its ``events`` may be read from any thread."""
        return self._books.cache

    @property
    def step_number(self) -> int:
        """Number of the last step scheduled; 0 before the first."""
        return self._books.step_number

    @property
    def num_live(self) -> int:
        """Sequences that were accepted and did not end."""
        return len(self._books.sequences)

    def is_live(self, sequence_id: int) -> bool:
        """Whether a sequence was accepted and did not end."""
        return sequence_id in self._books.sequences

    def num_live_of(self, source: str) -> int:
        """Live sequences of one service."""
        return sum(s.request.spec.source == source for s in self._books.sequences.values())

    def counts(self) -> EngineCounts:
        """Totals and what is held now."""
        wait = self._admission.estimated_wait(self._books.num_queued)
        return views.counts(self._books, self._planner.blocked, wait)

    def sequence_views(self) -> list[SequenceView]:
        """All live sequences, oldest first, with all their pages."""
        live = sorted(self._books.sequences.values(), key=lambda sequence: sequence.rank[1])
        return [views.view(self._books, sequence) for sequence in live]

    def rows_in_use(self) -> list[Row]:
        """Rows of running sequences, in no order."""
        return views.rows_in_use(self._books)

    def row_views(self, rows: Iterable[int]) -> dict[Row, SequenceView]:
        """The running sequences of these rows, by row, with all their pages."""
        return views.row_views(self._books, rows)

    def take_changes(self) -> views.Changes:
        """What happened to sequences since the last call."""
        return views.take_changes(self._books)

    def progress(self) -> views.Progress:
        """Tokens with KV of the running sequences, as columns."""
        return views.progress(self._books)

    def unfilled_slots(self) -> int:
        """Slots of the running sequences' pages that hold no token."""
        return views.unfilled_slots(self._books)

    def snapshot(self) -> PoolSnapshot:
        """The pool and the live sequences as of the last page event."""
        return views.snapshot(self._books, tuple(self.sequence_views()))

    def row_spans(self, max_rows: int, max_slots: int) -> list[RowSpan]:
        """Parts of running sequences' rows, other ones each time, and the slots that the device must have."""
        return self._auditor.row_spans(max_rows, max_slots)

    def one_audit(self) -> Auditor:
        """For one pass over everything there is now, in pieces between steps."""
        return Auditor(self._books, once=True)

    @property
    def num_audit_sweeps(self) -> int:
        """How often the live audit has looked at every page."""
        return self._auditor.num_sweeps

    def check(self, max_pages: int | None = None) -> list[Violation]:
        """The live audit: what does not hold, with the numbers of both sides.

        None: everything, O(pages + references). Under load give ``max_pages``: then a round looks at so
        many pages one by one, others next time; what is left is 0.1 us for each reference.
        """
        return self._auditor.check(max_pages)
