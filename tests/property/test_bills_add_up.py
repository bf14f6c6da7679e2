"""KV bills against the page events: each request's, and all of them against the integral of pages in use.

The bills are kept by the scheduler in three numbers a request; here they are computed once more from the
events alone, page by page and interval by interval, as their definition says.
"""

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest

from worker.execution.fake_runner import FakeModel, FakeRunner
from worker.ids import SequenceId
from worker.pages.events import EventColumns, PageEventKind
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import BillCounters
from worker.scheduling.request import AbortReason, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Request, Sequence
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step

TAKES = (PageEventKind.ALLOCATED, PageEventKind.SHARED, PageEventKind.REVIVED)


@dataclass
class Charges:
    """What the events say of one request."""

    page_seconds: float = 0.0
    saved: float = 0.0


@dataclass
class Fold:
    """Holders of each page, and what they are charged; owners are told as the scheduler gives them out."""

    holders: dict[int, Counter[Request]] = field(default_factory=dict)
    charges: dict[Request, Charges] = field(default_factory=dict)
    by_owner: dict[int, Request] = field(default_factory=dict)
    in_use: float = 0.0  # integral of pages with holders
    now: float = 0.0

    def run_to(self, now: float) -> None:
        seconds, self.now = now - self.now, now
        for holders in self.holders.values():
            count = holders.total()
            self.in_use += seconds if count else 0.0
            for request, times in holders.items():
                charge = self.charges.setdefault(request, Charges())
                charge.page_seconds += times * seconds / count
                charge.saved += times * seconds * (1 - 1 / count)

    def fold(self, events: EventColumns) -> None:
        for kind, page, owner, time_us in zip(
            events.kinds, events.pages, events.owners, events.times_us, strict=True
        ):
            if time_us / 1e6 > self.now:
                self.run_to(time_us / 1e6)
            if kind in TAKES:
                self.holders.setdefault(page, Counter())[self.by_owner[owner]] += 1
            elif kind == PageEventKind.RELEASED:
                holders = self.holders[page]
                holders[self.by_owner[owner]] -= 1
                self.holders[page] = +holders


class Load:
    """Random requests on a small pool: shared prompts, samples, cancels, preemption, flushes, pins."""

    def __init__(self, seed: int, *, overlap: bool, samples: tuple[int, ...] = (1, 1, 1, 3)) -> None:
        self.draw = random.Random(seed)
        self.samples = samples
        self.overlap = overlap
        page_size = self.draw.choice((1, 2, 4, 16))
        num_pages = self.draw.randint(80, 140) // page_size + 1
        config = SchedulerConfig(
            CacheConfig(num_pages, page_size), max_running=6, max_step_tokens=48, max_context_tokens=60
        )
        self.scheduler = Scheduler(config)
        self.books = self.scheduler._books
        self.runner = FakeRunner(
            num_pages=num_pages, page_size=page_size, max_running=6, row_width=64, model=FakeModel(50)
        )
        self.fold = Fold()
        self.requests: dict[int, Request] = {}  # by id of sample 0
        self.bills: dict[int, BillCounters] = {}
        self.now = 0.0
        self._flight: list[tuple[Step, object]] = []
        self._folded = 0
        self._next_id = 1
        self._prefixes = [[self.draw.randrange(50) for _ in range(40)] for _ in range(3)]
        self._seat = self.books.seat
        self.books.seat = self._seen_seat  # type: ignore[method-assign]

    def _seen_seat(self, sequence: Sequence) -> None:
        self._fold_events()  # with the owner numbers as they were
        self._seat(sequence)
        self.fold.by_owner[sequence.owner] = sequence.request

    def _fold_events(self) -> None:
        events = self.scheduler.cache.events.read(self._folded)
        assert events is not None
        self._folded = events.last_number
        self.fold.fold(events)

    def add(self) -> None:
        draw = self.draw
        prompt = draw.choice(self._prefixes)[: draw.randint(1, 40)] + [
            draw.randrange(50) for _ in range(draw.randint(0, 5))
        ]
        samples = draw.choice(self.samples)
        params = SamplingParams(max_tokens=draw.randint(1, 30), temperature=draw.choice((0.0, 1.0)))
        spec = RequestSpec(
            SequenceId(self._next_id),
            array("I", prompt),
            params,
            sample_count=samples,
            cache_write=draw.random() < 0.9,
            source="s",
        )
        if self.scheduler.add(spec, self.now).status == 1:
            self.requests[self._next_id] = self.books.sequences[spec.sequence_id].request
        self._next_id += samples

    def turn(self) -> None:
        draw, scheduler = self.draw, self.scheduler
        self.now += draw.choice((0.0, draw.random() * 0.02, draw.random()))
        if draw.random() < 0.35 and scheduler.num_live < 20:
            self.add()
        if draw.random() < 0.07 and self.books.sequences:
            scheduler.abort([draw.choice(list(self.books.sequences))], AbortReason.CLIENT, self.now)
        if draw.random() < 0.02:
            scheduler.flush(self.now, include_active=draw.random() < 0.5)
        if draw.random() < 0.03:
            prefix = draw.choice(self._prefixes)[: draw.randint(1, 8)]
            if not scheduler.unpin("a", self.now):
                scheduler.pin("a", prefix, b"", None, self.now)
        self.step()

    def step(self) -> None:
        step = self.scheduler.schedule(self.now)
        if step is not None:
            self._flight.append((step, self.runner.launch(step)))
        keep = 1 if self.overlap and step is not None else 0
        while len(self._flight) > keep:
            self.now += self.draw.random() * 0.01
            done, handle = self._flight.pop(0)
            self.scheduler.commit(done, handle.result(), self.now)  # type: ignore[attr-defined]
        self._collect()

    def _collect(self) -> None:
        for columns in self.scheduler.take_outputs().values():
            for end in columns.ends:
                if end.bill is not None:
                    first = self.books_first(end.sequence_id)
                    assert first not in self.bills
                    self.bills[first] = end.bill

    def books_first(self, sequence_id: int) -> int:
        return max(first for first in self.requests if first <= sequence_id)

    def settle(self) -> None:
        """The fold as of the last event, and no time after it."""
        self._fold_events()

    def running(self) -> list[tuple[float, float]]:
        """Charges so far of requests that did not end, as of the fold."""
        sharing = self.scheduler.cache.pool.sharing
        found = []
        for request in self.books.requests.values():
            held = [s for s in request.samples if s.id in self.books.sequences]
            saved = sum(sharing.saved(s.pages) for s in held)
            saved += sum(sharing.saved([s.copy_source]) for s in held if s.copy_source is not None)
            found.append(request.account.bill(self.fold.now, saved))
        return found

    def unbilled(self) -> float:
        """Of pages that wait for a step in flight to be over, those that were given back included."""
        sharing = self.scheduler.cache.pool.sharing
        total = self.books.totals.unbilled_page_seconds
        for held in self.books.held:
            saved = sharing.saved(held.pages) - held.saved
            total += len(held.pages) * (sharing.now - held.since) - saved
        return total


def seen(load: Load) -> Counter[str]:
    """What happened, so that a test of nothing fails."""
    bills = load.bills.values()
    return Counter(
        {
            "bills": len(load.bills),
            "shared": sum(bill.shared_page_seconds_saved > 0 for bill in bills),
            "preempted": sum(bill.preemptions > 0 for bill in bills),
            "copied": sum(bill.copied_pages > 0 for bill in bills),
            "saved": sum(bill.saved_tokens > 0 for bill in bills),
        }
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_all_bills_add_up_to_the_integral_of_pages_in_use(overlap: bool) -> None:
    """api.md 3: finished and running requests together, at any moment, to the last bit of rounding."""
    happened: Counter[str] = Counter()
    for seed in range(5):
        load = Load(seed, overlap=overlap)
        for turn in range(250):
            load.turn()
            if turn % 10 == 0:
                load.settle()
                load.fold.run_to(load.scheduler.cache.pool.sharing.now)
                finished = sum(bill.page_seconds for bill in load.bills.values())
                running = sum(charge for charge, _ in load.running())
                assert finished + running + load.unbilled() == pytest.approx(load.fold.in_use, abs=1e-6)
        happened += seen(load)
    assert all(happened[name] > 10 for name in ("bills", "shared", "preempted", "copied", "saved")), happened


def test_each_bill_is_what_the_events_say() -> None:
    """Page by page and interval by interval: dt / references to each holder.

    Single samples: a page that is copied from is off the bill one step before it is given back.
    """
    happened: Counter[str] = Counter()
    for seed in range(20, 25):
        load = Load(seed, overlap=False, samples=(1,))
        for _ in range(250):
            load.turn()
        while load.scheduler.has_work(load.now):
            load.step()
        load.settle()
        for first, bill in load.bills.items():
            charges = load.fold.charges.get(load.requests[first], Charges())
            assert bill.page_seconds == pytest.approx(charges.page_seconds, abs=1e-6)
            assert bill.shared_page_seconds_saved == pytest.approx(charges.saved, abs=1e-6)
        assert set(load.bills) == set(load.requests)
        happened += seen(load)
    assert all(happened[name] > 10 for name in ("bills", "shared", "preempted", "saved")), happened


def test_a_request_alone_pays_for_its_pages_and_two_of_one_prompt_share_the_price() -> None:
    """By hand: 2 pages of prompt for 3 s alone, then 1 s shared by two."""
    config = SchedulerConfig(CacheConfig(16, 4), max_running=4, max_step_tokens=64, max_context_tokens=64)
    scheduler = Scheduler(config)
    runner = FakeRunner(num_pages=16, page_size=4, max_running=4, row_width=64, model=FakeModel(50))

    def run(now: float) -> None:
        step = scheduler.schedule(now)
        assert step is not None
        scheduler.commit(step, runner.launch(step).result(), now)

    params = SamplingParams(max_tokens=30, stop_at_eos=False)
    scheduler.add(RequestSpec(SequenceId(1), array("I", range(9)), params, source="s"), 0.0)
    run(0.0)  # 3 pages: two sealed ones and the tail
    scheduler.add(RequestSpec(SequenceId(2), array("I", range(9)), params, source="s"), 3.0)
    run(3.0)  # the second takes over two pages and has a tail of its own
    scheduler.abort([1, 2], AbortReason.CLIENT, 4.0)
    bills = {end.sequence_id: end.bill for end in scheduler.take_outputs()["s"].ends}
    first, second = bills[SequenceId(1)], bills[SequenceId(2)]
    assert first is not None
    assert second is not None
    assert first.page_seconds == pytest.approx(3 * 3 + 2 * 0.5 + 1)
    assert second.page_seconds == pytest.approx(2 * 0.5 + 1)
    assert first.shared_page_seconds_saved == second.shared_page_seconds_saved == pytest.approx(1.0)
    assert (first.saved_tokens, second.saved_tokens) == (0, 8)
