"""The observers' copy against the pool itself: folding events and views gives the snapshot, always.

B.19: the second implementation of the fold is the pool; of a mirror it is a snapshot. Random load with
small pools, sharing samples, cancels, flushes and pins, on the real control plane and the fake runner.
"""

import random
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from worker.channels import Handover
from worker.execution.fake_runner import FakeModel, FakeRunner
from worker.execution.runner import StepHandle
from worker.ids import SequenceId
from worker.pages.events import PageFlag
from worker.pages.page_cache import CacheConfig
from worker.pages.snapshot import PoolSnapshot
from worker.readers.delta import FeedDelta, planes, take_delta, totals
from worker.readers.ledger import Ledger
from worker.readers.observation import Observation
from worker.readers.observer import Fold, Observer
from worker.scheduling.request import AbortReason, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step
from worker.stats import LoadView, PoolTotals, SequenceView, WaitReason


class Load:
    """A worker's control plane under random load, one turn at a time, without threads."""

    def __init__(self, seed: int, ring: int = 65_536, *, overlap: bool = False) -> None:
        self._overlap = overlap
        self._in_flight: deque[tuple[Step, StepHandle]] = deque()
        self.draw = random.Random(seed)
        self.page_size = self.draw.choice((1, 2, 4, 16))
        self.num_pages = self.draw.randint(6, 14) * max(1, 8 // self.page_size)  # too few for six rows
        cache = CacheConfig(self.num_pages, self.page_size, event_capacity=ring, fingerprint_key=b"k")
        config = SchedulerConfig(cache, max_running=6, max_step_tokens=24, max_context_tokens=60)
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_running=6,
            row_width=64,
            model=FakeModel(50),
        )
        self.now = 0.0
        self._next_id = 1
        self._prefixes = [[self.draw.randrange(50) for _ in range(40)] for _ in range(3)]

    def turn(self) -> None:
        """Some commands, one step."""
        draw, scheduler = self.draw, self.scheduler
        self.now += draw.random() * 0.01
        if draw.random() < 0.35 and scheduler.num_live < 20:
            self._add()
        if draw.random() < 0.05:
            live = scheduler.sequence_views()
            if live:
                scheduler.abort([draw.choice(live).sequence_id], AbortReason.CLIENT, self.now)
        if draw.random() < 0.01:
            scheduler.flush(self.now, include_active=draw.random() < 0.5)
        if draw.random() < 0.02:
            name = draw.choice("ab")
            prefix = draw.choice(self._prefixes)[: 2 * self.page_size]
            if not scheduler.unpin(name, self.now):
                scheduler.pin(name, prefix, b"", None, self.now)
        step = scheduler.schedule(self.now)
        if step is not None:
            self._in_flight.append((step, self.runner.launch(step)))
        while len(self._in_flight) > (self._overlap and step is not None):
            done, handle = self._in_flight.popleft()
            scheduler.commit(done, handle.result(), self.now)
        scheduler.take_outputs()

    def _add(self) -> None:
        draw = self.draw
        prompt = draw.choice(self._prefixes)[: draw.randint(1, 40)] + [
            draw.randrange(50) for _ in range(draw.randint(0, 5))
        ]
        samples = draw.choice((1, 1, 1, 3))
        params = SamplingParams(max_tokens=draw.randint(1, 20), temperature=draw.choice((0.0, 1.0)))
        spec = RequestSpec(
            SequenceId(self._next_id),
            array("I", prompt),
            params,
            sample_count=samples,
            priority=draw.randint(-1, 1),
            deadline=self.now + 0.2 if draw.random() < 0.1 else None,
            request_id=f"r{self._next_id}",
            source="s",
        )
        self._next_id += samples
        self.scheduler.add(spec, self.now)

    def observe(self, snapshot: bool = False) -> Observation:
        """What the engine would hand over now."""
        changes, progress = self.scheduler.take_changes(), self.scheduler.progress()
        return Observation(
            revision=self.scheduler.cache.events.number,
            time_us=int(self.now * 1e6),
            changes=changes.views,
            growth=changes.growth,
            ended=changes.ended_ids,
            started=changes.started,
            ended_owners=changes.ended_owners,
            progress_owners=progress.owners,
            progress_tokens=progress.token_counts,
            counts=self.scheduler.counts(),
            rows_used=0,
            idle_seconds=0.0,
            steps=(),
            snapshot=self.scheduler.snapshot() if snapshot else None,
        )


class Kept:
    """A sink that keeps what it is lent."""

    def __init__(self) -> None:
        self.dropped_events = 0
        self.fold: Fold | None = None
        self.pool: PoolTotals | None = None

    def open(self) -> None:
        pass

    def publish(self, fold: Fold, pool: PoolTotals, now: float) -> float:
        self.fold, self.pool = fold, pool
        return 0.0

    def close(self) -> None:
        pass


class Watched:
    """Load, and an observer of it that is turned by hand."""

    def __init__(self, seed: int, ring: int = 65_536, *, overlap: bool = False) -> None:
        self.load = Load(seed, ring, overlap=overlap)
        self.handover: Handover[Observation] = Handover(64)
        self.sink = Kept()
        self.wants_snapshot = False
        self.views: list[LoadView] = []
        self.observer = Observer(
            self.load.scheduler.cache.events,
            self.handover,
            num_pages=self.load.num_pages,
            page_size=self.load.page_size,
            ask_for_snapshot=self.ask,
            on_load=self.views.append,
            on_failure=self.ask,
            sink=self.sink,
            clock=lambda: self.load.now,
        )

    def ask(self) -> None:
        self.wants_snapshot = True

    def observe(self) -> Fold:
        wanted, self.wants_snapshot = self.wants_snapshot, False
        assert self.handover.put(self.load.observe(wanted))
        self.observer.turn()
        assert self.sink.fold is not None
        return self.sink.fold


def compare(fold: Fold, snapshot: PoolSnapshot) -> None:
    """Every plane, page by page, and every sequence."""
    ledger = fold.ledger
    assert ledger.revision == snapshot.number
    for name, mine, theirs in (
        ("states", ledger.states, np.frombuffer(snapshot.states, np.uint8)),
        ("flags", ledger.flags, np.frombuffer(snapshot.flags, np.uint8)),
        ("refs", ledger.refs, snapshot.ref_counts),
        ("filled", ledger.filled, filled_slots(ledger, snapshot)),
        ("hits", ledger.hits, snapshot.hit_counts),
        ("parents", ledger.parents, snapshot.parent_page_ids),
        ("born", ledger.born_ms, snapshot.born_ms),
        ("used", ledger.used_ms, snapshot.used_ms),
        ("fingerprints", ledger.fingerprints, snapshot.fingerprints),
    ):
        assert mine.tolist() == list(theirs), name
    compare_owners(fold, snapshot)
    for state, count in snapshot.counts.items():
        assert ledger.state_counts[state] == count, state
    pool = totals(ledger)
    assert pool.total_pages + pool.reserved_pages == len(ledger.states)
    active = ledger.states == 2
    assert pool.references == int(ledger.refs.sum())
    assert pool.shared_pages == int((ledger.refs >= 2).sum())
    assert pool.filled_slots == int(ledger.filled[active].sum())
    assert canonical(fold.book.views()) == canonical(snapshot.sequences)


def filled_slots(ledger: Ledger, snapshot: PoolSnapshot) -> list[int]:
    """From the sequences' token counts; pages that only the cache holds are full.

    What a sequence that ended has in pages that a step in flight holds for it, the ledger alone still knows.
    """
    filled = list(snapshot.filled_slots)
    held = {page for view in snapshot.sequences for page in view.page_ids}
    for page, refs in enumerate(snapshot.ref_counts):
        if refs and page not in held and not snapshot.flags[page] & PageFlag.SEALED:
            filled[page] = int(ledger.filled[page])
    for view in snapshot.sequences:
        for index, page in enumerate(view.page_ids):
            filled[page] = min(ledger.page_size, max(0, view.token_count - index * ledger.page_size))
    return filled


def compare_owners(fold: Fold, snapshot: PoolSnapshot) -> None:
    """An owner is one of those who hold the page: the first that was let in there, that took it here."""
    holders: dict[int, set[int]] = {}
    for view in snapshot.sequences:
        for page in view.page_ids:
            holders.setdefault(page, set()).add(view.owner)
    for page, owner in enumerate(fold.ledger.owners.tolist()):
        num_later = len(fold.ledger.sharers.get(page, ()))
        assert num_later == max(0, int(fold.ledger.refs[page]) - 1), "each reference has its owner"
        if fold.ledger.refs[page] == 0:
            assert owner == 0, page
        elif page in holders and fold.ledger.refs[page] == len(holders[page]):
            assert owner in holders[page], page


def canonical(views: Sequence[SequenceView]) -> list[SequenceView]:
    """By id; why one waits is as of the last time it was looked at, not of now."""
    told = [replace(view, wait_reason=WaitReason.NONE) for view in views]
    return sorted(told, key=lambda view: view.sequence_id)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_fold_of_events_is_the_pool(seed: int, overlap: bool) -> None:
    watched = Watched(seed, overlap=overlap)
    for _ in range(150):
        for _ in range(watched.load.draw.randint(1, 6)):
            watched.load.turn()
        fold = watched.observe()
        compare(fold, watched.load.scheduler.snapshot())
    assert watched.load.scheduler.counts().preemptions_total > 0, "the pool was large enough for all"
    counts = fold.ledger.event_counts
    assert counts.sum() == fold.ledger.revision, "the sum over all kinds is the revision"
    usable_not_free = watched.load.num_pages - int(fold.ledger.state_counts[1])
    assert counts[1] - counts[7] == usable_not_free, "allocated - freed = pages that are not free"
    assert watched.observer.metrics.dropped["observer"] == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_an_observer_that_lost_events_starts_from_a_snapshot(seed: int, overlap: bool) -> None:
    watched = Watched(seed, ring=64, overlap=overlap)
    rebuilds = 0
    for round_number in range(60):
        for _ in range(40 if round_number % 5 == 0 else 1):
            watched.load.turn()
        fold = watched.observe()
        if watched.wants_snapshot:
            watched.load.turn()  # between the loss and the snapshot
            fold = watched.observe()
            rebuilds += 1
        compare(fold, watched.load.scheduler.snapshot())
    assert rebuilds > 0, "the ring was large enough: the test shows nothing"
    assert fold.num_rebuilds == rebuilds
    dropped = watched.observer.metrics.dropped["observer"]
    assert dropped > 0
    assert fold.ledger.event_counts.sum() + dropped == fold.ledger.revision, "what is not counted was dropped"


class Mirror:
    """What a service would keep: planes and sequences, built from a snapshot and deltas alone."""

    def __init__(self, fold: Fold) -> None:
        self.number = fold.ledger.revision
        whole = planes(fold.ledger, slice(None))
        self.planes = {name: getattr(whole, name).copy() for name in whole.__slots__}
        self.waiting: dict[tuple[str, int], SequenceView] = {}
        self.running: dict[int, SequenceView] = {}
        for view in fold.book.views():
            self._put(view)

    def _put(self, view: SequenceView) -> None:
        key = (view.request_id, view.choice_index)
        if view.owner:
            self.waiting.pop(key, None)
            self.running[view.owner] = view
        else:
            self.waiting[key] = view

    def apply(self, delta: FeedDelta, revision: int) -> bool:
        """False: something is missing, a new snapshot is needed."""
        if delta.base_number != self.number:
            return False
        for name, plane in self.planes.items():
            plane[delta.page_ids] = getattr(delta.pages, name)
        for owner in delta.ended_owners:
            self.running.pop(owner, None)
        for view in delta.ended_waiting:
            del self.waiting[view.request_id, view.choice_index]
        for view in delta.sequences:
            before = self.running.get(view.owner) if view.owner else None
            kept = before.page_ids[: view.first_page_index] if before is not None else ()
            assert len(kept) == view.first_page_index, view
            self._put(replace(view, page_ids=kept + tuple(view.page_ids), first_page_index=0))
        for owner, tokens in zip(delta.progress_owners.tolist(), delta.progress_tokens.tolist(), strict=True):
            self.running[owner] = replace(self.running[owner], token_count=tokens)
        self.number = revision
        return True

    def sequences(self) -> list[SequenceView]:
        views = [*self.running.values(), *self.waiting.values()]
        return sorted(views, key=lambda view: view.sequence_id)


def deltas(watched: Watched, rounds: int) -> Iterator[tuple[FeedDelta, Fold]]:
    """The deltas of a run, each with the fold that it leads to."""
    base = watched.observe().ledger.revision
    take_delta(watched.sink.fold.ledger, watched.sink.fold.book, base)  # type: ignore[union-attr]
    for _ in range(rounds):
        for _ in range(watched.load.draw.randint(0, 4)):
            watched.load.turn()
        fold = watched.observe()
        delta = take_delta(fold.ledger, fold.book, base)
        base = fold.ledger.revision
        yield delta, fold


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_mirror_of_deltas_is_a_snapshot(seed: int, overlap: bool) -> None:
    watched = Watched(seed, overlap=overlap)
    mirror: Mirror | None = None
    for delta, fold in deltas(watched, 120):
        if mirror is None:
            mirror = Mirror(fold)
            continue
        assert mirror.apply(delta, fold.ledger.revision)
        whole = Mirror(fold)
        for name, plane in mirror.planes.items():
            assert plane.tolist() == whole.planes[name].tolist(), name
        assert mirror.sequences() == whole.sequences()


@pytest.mark.parametrize("seed", range(4))
def test_lost_and_doubled_deltas_are_noticed_and_healed(seed: int) -> None:
    watched = Watched(seed)
    chance = random.Random(seed)
    mirror: Mirror | None = None
    resyncs = 0
    for delta, fold in deltas(watched, 150):
        if mirror is None:
            mirror = Mirror(fold)
        if chance.random() < 0.1 and not delta.is_empty:
            continue  # lost
        for _ in range(2 if chance.random() < 0.1 else 1):
            if fold.ledger.revision < mirror.number or delta.base_number < mirror.number:
                continue  # a double: at or below what is held
            if not mirror.apply(delta, fold.ledger.revision):
                resyncs += 1
                mirror = Mirror(fold)
        assert mirror.number == fold.ledger.revision
        assert mirror.planes["states"].tolist() == fold.ledger.states.tolist()
    assert resyncs > 0
