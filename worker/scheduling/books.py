"""The books of the control plane: every collection that scheduling reads and writes, in one place.

Owns the sequences and how they leave: each one ends exactly once, and its row and pages go back
exactly once, when no step in flight contains it any more (H3, H6). Decides nothing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.ids import Owner, SequenceId
from worker.pages.page_cache import PageCache
from worker.scheduling.decode_batch import DecodeBatch, DecodeSpans
from worker.scheduling.outbox import Outbox
from worker.scheduling.output import BillCounters, FailureReason, FinishCode, SequenceEnd
from worker.scheduling.ranked import RankedSequences
from worker.scheduling.rows import Rows
from worker.scheduling.sequence import NO_OWNER, NO_ROW, Place, Request, Sequence
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step
from worker.scheduling.timers import Timers
from worker.stats import Growth, SequenceState, WaitReason
from worker.traffic import Arrival, Departure


@dataclass(slots=True)
class InFlight:
    """A step that was planned and not yet committed."""

    step: Step
    decodes: DecodeSpans
    prefills: list[Sequence]  # by span, after the decodes
    dead: set[Sequence] = field(default_factory=set)  # ended since: their tokens are discarded


@dataclass(slots=True)
class Totals:
    """Counted since the start; see EngineCounts."""

    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    miss_cold_tokens: int = 0
    miss_evicted_tokens: int = 0
    unaligned_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    recomputed_tokens: int = 0  # of those, not found again
    allocation_failures: int = 0  # decisions: somebody has to wait or to stop for want of pages
    billed_page_seconds: float = 0.0  # over all requests that ended
    unbilled_page_seconds: float = 0.0  # of pages that outlived their use until a step in flight was over


@dataclass(slots=True)
class Held:
    """References that outlive their use until a step in flight is over."""

    after_step: int
    pages: list[int]
    owner: Owner
    sequence: Sequence | None  # ended: its row goes back, too
    since: float  # when they were taken off a bill, seconds of the page events' clock
    saved: float  # sum of S over the pages then; see pages/sharing.py


class Books:
    """Mutable state of the scheduler; one engine thread, no locks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.page_size = config.page_size
        self.is_simulated = config.is_simulated
        self.cache = PageCache(config.cache)
        self.rows = Rows(config.max_running)
        # Waits: one entry per request that was not admitted (its leader), and per preempted sequence.
        self.queue = RankedSequences()
        self.prefills = RankedSequences()  # PREFILL and SIBLING
        self.batch = DecodeBatch(config.page_size)
        self.in_flight: deque[InFlight] = deque()
        self.held: list[Held] = []
        self.sequences: dict[SequenceId, Sequence] = {}  # live
        self.requests: dict[int, Request] = {}  # with live sequences, by number of the first
        self.by_owner: dict[Owner, Sequence] = {}
        self.timers = Timers()
        self.outbox = Outbox()
        self.totals = Totals()
        self.step_number = 0  # last step planned
        self.num_queued = 0  # requests that were not admitted yet
        self.num_running_requests = 0
        self.uncached_tokens = 0  # of the requests that were not admitted yet
        self.repointed: list[tuple[Sequence, int]] = []  # page indexes to be written to their rows again
        self.tell: Callable[[Arrival | Departure], object] | None = None  # requests that come and end
        self.tell_hit: Callable[[list[int]], object] = lambda pages: None  # a prompt found these pages
        # For observers: from which page on a sequence changed, and who is gone.
        self.is_observed = False  # nothing is kept for nobody
        self.changed: dict[Sequence, int] = {}
        self.growth = Growth()
        self.started: list[tuple[Sequence, Owner]] = []  # got this owner number
        self.ended_owners: list[Owner] = []
        self.ended_ids: list[SequenceId] = []
        self.bills: list[float] = []  # page-seconds of requests that ended

    def set_clock(self, step: int, now: float) -> None:
        """Page events from here on carry this step and time. Neither goes back from one event to the next: a
        step may be committed when the one behind it has been planned, and then that one counts.
        """
        events, time_us = self.cache.events, int((now - self.config.start_time) * 1e6)
        self.cache.set_clock(max(step, events.step), max(time_us, events.time_us))

    def mark(self, sequence: Sequence, first_page: int) -> None:
        """The state changed, and maybe pages from ``first_page`` on."""
        if self.is_observed and self.changed.setdefault(sequence, first_page) > first_page:
            self.changed[sequence] = first_page

    def mark_pages(self, sequence: Sequence, first_page: int, pages: list[int]) -> None:
        """Pages from number ``first_page`` on are these now, and nothing else changed."""
        if self.is_observed:
            growth, count = self.growth, len(pages)
            growth.owners.extend((sequence.owner,) * count)
            growth.page_indexes.extend(range(first_page, first_page + count))
            growth.page_ids.extend(pages)

    def num_running(self) -> int:
        """Sequences with a row that did not end."""
        return len(self.by_owner)

    def requeue(self, sequence: Sequence) -> None:
        """Lost its row; it waits again, where its arrival puts it."""
        sequence.place = Place.QUEUE
        self.queue.add(sequence)
        self.mark(sequence, 0)

    # Rows.
    def seat(self, sequence: Sequence) -> None:
        """Gives it a row and an owner number."""
        sequence.row, sequence.owner = self.rows.take()
        sequence.state = SequenceState.PREFILL
        sequence.wait_reason = WaitReason.NONE
        self.by_owner[sequence.owner] = sequence
        if self.is_observed:
            self.started.append((sequence, sequence.owner))
        request = sequence.request
        request.num_with_row += 1
        if request.num_with_row == 1:
            self.num_running_requests += 1
        self.mark(sequence, 0)

    def take_pages(self, sequence: Sequence, pages: list[int], is_hit: bool) -> None:
        """Shares ``pages`` with it, as the next ones of its row."""
        self.cache.acquire(pages, sequence.owner, is_hit)
        self.mark_pages(sequence, len(sequence.pages), pages)
        sequence.pages.extend(pages)
        self.charge(sequence.request, pages)

    def charge(self, request: Request, pages: list[int]) -> None:
        """The request refers to pages that others may hold, too."""
        if self.is_simulated:
            return
        sharing = self.cache.pool.sharing
        request.took(pages)
        request.account.took(len(pages), sharing.now, sharing.saved(pages))

    def discharge(self, request: Request, pages: list[int]) -> None:
        """The request refers to these pages no longer; called before they are released."""
        if self.is_simulated:
            return
        sharing = self.cache.pool.sharing
        request.gave(pages)
        request.account.gave(len(pages), sharing.now, sharing.saved(pages))

    def _unseat(self, sequence: Sequence) -> None:
        """Row, owner number and pages go back: now, or when the last step that contains it is over."""
        last_step = self.step_number if sequence.place == Place.BATCH else sequence.last_step
        request = sequence.request
        request.num_with_row -= 1
        if not request.num_with_row:
            self.num_running_requests -= 1
        pages = sequence.held_pages
        self.discharge(request, pages)
        del self.by_owner[sequence.owner]
        if self.is_observed:
            self.ended_owners.append(sequence.owner)
        if self.in_flight and last_step >= self.in_flight[0].step.number:
            self.held.append(self._held(last_step, pages, sequence.owner, sequence))
        else:
            self._give_back(pages, sequence.owner, sequence)

    def hold_until_committed(self, page: int, owner: Owner, step: int) -> None:
        """Keeps one reference until ``step`` is over: something in it still reads the page."""
        self.held.append(self._held(step, [page], owner, None))

    def _held(self, step: int, pages: list[int], owner: Owner, sequence: Sequence | None) -> Held:
        sharing = self.cache.pool.sharing
        return Held(step, pages, owner, sequence, sharing.now, sharing.saved(pages))

    def _give_back(self, pages: list[int], owner: Owner, sequence: Sequence | None) -> None:
        self.cache.release(pages, owner)
        if sequence is not None:
            self.rows.give_back(sequence.row, owner)
            sequence.row = NO_ROW
            sequence.owner = NO_OWNER

    def release_held(self, committed: int) -> None:
        """Step ``committed`` is over."""
        if not self.held:
            return
        due = [held for held in self.held if held.after_step <= committed]
        self.held = [held for held in self.held if held.after_step > committed]
        sharing = self.cache.pool.sharing
        for held in due:
            saved = sharing.saved(held.pages) - held.saved
            self.totals.unbilled_page_seconds += len(held.pages) * (sharing.now - held.since) - saved
            self._give_back(held.pages, held.owner, held.sequence)

    # Leaving.
    def take_out(self, sequence: Sequence) -> None:
        """Out of the collection it is in, and its row and pages back; its tokens in flight are void."""
        place = sequence.place
        if place == Place.QUEUE:
            self.queue.remove(sequence)
            return
        if place == Place.BATCH:
            self.batch.remove(sequence)
        elif place in (Place.PREFILL, Place.SIBLING):
            self.prefills.remove(sequence)
        for record in self.in_flight:
            record.dead.add(sequence)
        self._unseat(sequence)
        if sequence.request.leader is sequence:
            self._elect(sequence.request)

    def _elect(self, request: Request) -> None:
        """The next sample that waits for the prompt computes it itself, for those after it."""
        request.leader = next((s for s in request.samples if s.place == Place.SIBLING), None)
        if request.leader is not None:
            request.leader.place = Place.PREFILL

    def end(
        self,
        sequence: Sequence,
        code: FinishCode,
        *,
        with_token: bool = False,
        failure: FailureReason | None = None,
        message: str = "",
        silent: bool = False,
    ) -> None:
        """The one end of a sequence."""
        assert sequence.place != Place.ENDED, f"{sequence} ended twice, now as {code.name}"
        request = sequence.request
        room = len(sequence.pages) * self.page_size
        request.tail_waste_slots += max(0, room - sequence.computed)
        self._leave_queue(sequence)
        place = sequence.place
        if place != Place.QUEUE or self.is_queued(sequence):
            self.take_out(sequence)
        sequence.place = Place.ENDED
        del self.sequences[sequence.id]
        if self.is_observed:
            self.ended_ids.append(sequence.id)
            self.changed.pop(sequence, None)
        if self.tell is not None:
            self.tell(self._departure(sequence, code))
        request.num_live -= 1
        bill = None
        if not request.num_live:
            bill = None if self.is_simulated else self._bill(request)
            del self.requests[request.samples[0].rank[1]]
            request.forget_samples()
        if not silent:
            end = SequenceEnd(sequence.id, code, sequence.num_output, bill, failure, message)
            self.outbox.add_end(request.spec.source, end, with_token)

    def _departure(self, sequence: Sequence, code: FinishCode) -> Departure:
        request, events = sequence.request, self.cache.events
        prefix = request.prefix
        waited = 0.0 if request.admit_time is None else request.admit_time - request.arrival
        return Departure(
            time_us=events.time_us,
            number=events.number,
            first_id=request.spec.sequence_id,
            sequence_id=sequence.id,
            token_ids=sequence.tokens,
            finish_code=code,
            preemptions=sequence.preemptions,
            prefix=None
            if prefix is None
            else (
                prefix.hit_tokens,
                prefix.miss_cold_tokens,
                prefix.miss_evicted_tokens,
                prefix.unaligned_tokens,
            ),
            queue_us=int(waited * 1e6),
        )

    def is_queued(self, sequence: Sequence) -> bool:
        """Whether the queue has an entry for it: samples that were not admitted share one."""
        request = sequence.request
        return request.admit_time is not None or request.leader is sequence

    def _leave_queue(self, sequence: Sequence) -> None:
        """A sample ends before its request was admitted: the entry passes to the next one."""
        request = sequence.request
        if request.admit_time is not None:
            return
        if request.num_live == 1:
            self.num_queued -= 1
            self.uncached_tokens -= request.uncached_tokens
        elif request.leader is sequence:
            self.queue.remove(sequence)
            heir = next(s for s in request.samples if s.place == Place.QUEUE and s is not sequence)
            request.leader = heir
            self.queue.add(heir)

    def _bill(self, request: Request) -> BillCounters:
        page_seconds, saved = request.account.bill(self.cache.pool.sharing.now)
        self.totals.billed_page_seconds += page_seconds
        if self.is_observed:
            self.bills.append(page_seconds)
        return BillCounters(
            page_seconds=page_seconds,
            shared_page_seconds_saved=saved,
            saved_tokens=request.saved_tokens,
            peak_pages=request.peak_pages,
            reused_pages=request.reused_pages,
            copied_pages=request.copied_pages,
            tail_waste_slots=request.tail_waste_slots,
            evictions_caused=request.evictions_caused,
            preemptions=request.preemptions,
            recomputed_tokens=request.recomputed_tokens,
        )
