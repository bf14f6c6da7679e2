"""The page mirror against a pool simulated here: whatever is lost, doubled or restarted, it catches up.

The pool publishes as a worker does: coalesced deltas of what changed since the last one, snapshots that
lie on a delta. Messages of the feed may be lost or come twice, replies and feed may overtake one another,
the worker may restart. In the end, and whenever the mirror calls itself current and all was delivered,
mirror and watchers equal the pool.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from service.fleet.feed import (
    NO_PAGES,
    PLANES,
    EndedSequence,
    MapDelta,
    OutOfStep,
    PoolTotals,
    Revision,
    SequenceChange,
    SequenceRecord,
    SnapshotPart,
)
from service.fleet.page_mirror import FrozenMap, PageMirror, Standing
from service.fleet.page_watch import PageWatch

PAGE_COUNT = 9
PART_PAGES = 4
WAITING, PREFILL, DECODE, PREEMPTED = 1, 2, 3, 4
FREE, ACTIVE = 1, 2
WEIGHTS: Mapping[str, float] = {
    "queue": 6,
    "work": 40,
    "publish": 12,
    "restart": 0.3,
    "deliver": 14,
    "deliver_twice": 4,
    "lose": 2,
    "ask": 5,
    "deliver_part": 12,
    "read": 12,
    "reconnect": 2,
}
SITUATIONS = (
    "restart",
    "lost",
    "snapshot",
    "gap",
    "gap after a snapshot",
    "applied",
    "dropped",
    "kept",
    "resumed",
)


class Pool:
    """One life of a worker: pages, sequences, and what its feed has not told yet."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = self.base = 0
        self.planes = {name: np.zeros(PAGE_COUNT, kind) for name, kind in PLANES.items()}
        self.planes["states"][:] = FREE
        self.live: dict[str, SequenceRecord] = {}  # by request id
        self.tokens: dict[int, int] = {}  # by owner
        self.count = 0
        self._dirty: set[int] = set()
        self._changed: dict[str, int] = {}
        self._progressed: set[int] = set()
        self._ended: list[SequenceRecord] = []

    # what happens

    def queue(self) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.live[name] = SequenceRecord(
            name, 0, 0, None, WAITING, NO_PAGES, 0, receive_time_ns=self.epoch * 1000 + self.count, tenant="t"
        )
        self._changed[name] = 0

    def admit(self, name: str) -> None:
        owner = min(set(range(1, 6)) - {each.owner for each in self.live.values()}, default=0)
        if owner:
            self._set(replace(self.live[name], owner=owner, row=owner - 1, state=PREFILL), 0)
            self.tokens[owner] = 0
            self.grow(name)

    def grow(self, name: str) -> None:
        record = self.live[name]
        free = np.flatnonzero(self.planes["states"] == FREE)
        if record.owner and len(free):
            self._touch(int(free[0]), ACTIVE, record.owner)
            pages = np.append(record.pages, free[:1]).astype(np.uint32)
            self._set(replace(record, pages=pages, state=DECODE), len(record.pages))

    def progress(self, name: str) -> None:
        owner = self.live[name].owner
        if owner:
            self.tokens[owner] += 1
            self._progressed.add(owner)

    def preempt(self, name: str) -> None:
        record = self.live[name]
        if record.owner:
            self._release(record)
            self._set(replace(record, owner=0, row=None, state=PREEMPTED, pages=NO_PAGES), 0)

    def end(self, name: str) -> None:
        record = self.live.pop(name)
        self._changed.pop(name, None)
        self._release(record)
        self._ended.append(record)

    def _release(self, record: SequenceRecord) -> None:
        self._progressed.discard(record.owner)
        self.tokens.pop(record.owner, None)
        for page in record.pages.tolist():
            self._touch(page, FREE, 0)

    def _touch(self, page: int, state: int, owner: int) -> None:
        self.number += 1
        self.planes["states"][page], self.planes["owners"][page] = state, owner
        self.planes["fingerprints"][page] = self.number
        self._dirty.add(page)

    def _set(self, record: SequenceRecord, first: int) -> None:
        self.live[record.request_id] = record
        name = record.request_id
        self._changed[name] = min(first, self._changed.get(name, first))

    # what it says

    def now(self, record: SequenceRecord) -> SequenceRecord:
        return replace(record, token_count=self.tokens.get(record.owner, 0))

    def totals(self) -> PoolTotals:
        free = int((self.planes["states"] == FREE).sum())
        return PoolTotals(free_pages=free, active_pages=PAGE_COUNT - free, allocations_total=self.number)

    def publish(self) -> MapDelta:
        pages = np.array(sorted(self._dirty), np.uint32)
        changes = []
        for name, first in self._changed.items():
            record = self.now(self.live[name])
            first = min(first, len(record.pages))
            changes.append(SequenceChange(replace(record, pages=record.pages[first:]), first))
            self._progressed.discard(record.owner)
        owners = sorted(self._progressed)
        delta = MapDelta(
            base_number=self.base,
            revision=Revision(self.epoch, self.number, self.number),
            observe_time_ns=self.number,
            totals=self.totals(),
            page_ids=pages,
            planes={name: plane[pages] for name, plane in self.planes.items()},
            sequences=changes,
            progress_owners=np.array(owners, np.uint16),
            progress_tokens=np.array([self.tokens[owner] for owner in owners], np.uint32),
            ended_owners=[each.owner for each in self._ended if each.owner],
            ended=[EndedSequence(each.request_id, 0) for each in self._ended],
        )
        self._dirty, self._changed, self._progressed, self._ended = set(), {}, set(), []
        self.base = self.number
        return delta

    def snapshot(self) -> list[SnapshotPart]:
        at = Revision(self.epoch, self.number, self.number)
        starts = range(0, PAGE_COUNT, PART_PAGES)
        parts = [
            SnapshotPart(
                at,
                len(starts) - place,
                start,
                {name: plane[start : start + PART_PAGES].copy() for name, plane in self.planes.items()},
            )
            for place, start in enumerate(starts)
        ]
        changes = [SequenceChange(self.now(record)) for record in self.live.values()]
        return [*parts, SnapshotPart(at, 0, sequences=changes, totals=self.totals())]


class Reader:
    """What a client does with the messages of a watch."""

    def __init__(self) -> None:
        self.number = -1
        self.planes: dict[str, np.ndarray] = {}
        self.pages: dict[tuple[str, int], list[int]] = {}  # by name and owner
        self.tokens: dict[int, int] = {}
        self.by_owner: dict[int, list[int]] = {}  # as readers do that go by owner numbers alone

    def start(self, frozen: FrozenMap) -> None:
        self.by_owner = {each.owner: each.pages.tolist() for each in frozen.records if each.owner}
        self.number = frozen.revision.number
        self.pages = {(each.request_id, each.owner): each.pages.tolist() for each in frozen.records}
        self.tokens = {each.owner: frozen.token_count(each) for each in frozen.records if each.owner}
        self._parts: list[dict[str, np.ndarray]] = []

    def part(self, window: dict[str, np.ndarray]) -> None:
        self._parts.append({name: plane.copy() for name, plane in window.items()})

    def whole(self) -> None:
        self.planes = {name: np.concatenate([part[name] for part in self._parts]) for name in PLANES}

    def follow(self, watch: PageWatch) -> None:
        change = watch.take()
        assert change.base_number == self.number
        self.number = change.revision.number
        for name, values in change.planes.items():
            self.planes[name][change.page_ids] = values
        left = set(change.ended_owners.tolist())
        for owner in left:
            self.by_owner.pop(owner, None)
        self.pages = {
            (name, owner): pages for (name, owner), pages in self.pages.items() if owner not in left
        }
        for ended in change.ended:
            self.pages = {key: pages for key, pages in self.pages.items() if key[0] != ended.request_id}
        for record, first, count in change.sequences:
            known = next((pages for (name, _), pages in self.pages.items() if name == record.request_id), [])
            assert len(known) >= first, "pages to be kept are known"
            self.pages = {key: pages for key, pages in self.pages.items() if key[0] != record.request_id}
            self.pages[record.request_id, record.owner] = known[:first] + record.pages[first:].tolist()
            if record.owner:
                self.tokens[record.owner] = count
                kept = self.by_owner.get(record.owner, [])[:first]
                assert len(kept) == first, "pages to be kept are known"
                self.by_owner[record.owner] = kept + record.pages[first:].tolist()
        self.tokens.update(zip(change.progress_owners.tolist(), change.progress_tokens.tolist(), strict=True))


class World:
    """A pool, its mirror, one watcher and its reader, and the wires between them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = Pool(1)
        self.mirror = PageMirror("w")
        self.mirror.begin_life(1, PAGE_COUNT)
        self.feed: list[MapDelta] = []
        self.replies: list[SnapshotPart] = []
        self.watch = PageWatch(self.mirror, list(PLANES), lambda: None)
        self.reader = Reader()
        self.frozen: FrozenMap | None = None
        self.seen: Counter[str] = Counter()

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            (name,) = self.draw.choices(list(WEIGHTS), WEIGHTS.values())
            getattr(self, name)()
            self._check_moment()
            if number % 100 == 99:
                self.settle()

    # the pool

    def queue(self) -> None:
        if len(self.pool.live) < 8:
            self.pool.queue()

    def work(self) -> None:
        if not self.pool.live:
            return
        name = self.draw.choice(sorted(self.pool.live))
        if not self.pool.live[name].owner:
            what = self.draw.choice(["admit", "admit", "admit", "end"])
        else:
            what = self.draw.choices(["grow", "progress", "preempt", "end"], [5, 5, 1, 1])[0]
        getattr(self.pool, what)(name)

    def publish(self) -> None:
        self.feed.append(self.pool.publish())

    def restart(self) -> None:
        """A new life; what the old one sent may still come."""
        self.seen["restart"] += 1
        self.pool = Pool(self.pool.epoch + 1)
        self.mirror.begin_life(self.pool.epoch, PAGE_COUNT)
        self.replies.clear()

    # the wires

    def deliver(self) -> None:
        if self.feed:
            self._apply(self.feed.pop(0))

    def deliver_twice(self) -> None:
        if self.feed:
            self._apply(self.feed[0])
            self._apply(self.feed.pop(0))

    def lose(self) -> None:
        """A loss shows by the numbers, so only messages that move them are lost here."""
        if self.feed and self.feed[0].revision.number > self.feed[0].base_number:
            self.seen["lost"] += 1
            self.feed.pop(0)

    def ask(self) -> None:
        """As a worker answers: right after a delta."""
        if self.mirror.standing is not Standing.CURRENT and not self.replies:
            self.feed.append(self.pool.publish())
            self.replies = self.pool.snapshot()
            self.mirror.begin_snapshot()

    def deliver_part(self) -> None:
        if not self.replies:
            return
        try:
            if self.mirror.add_part(self.replies.pop(0)):
                self.seen["snapshot"] += 1
        except OutOfStep:
            self.seen["gap after a snapshot"] += 1
            self.replies.clear()

    def _apply(self, delta: MapDelta) -> None:
        was_current = self.mirror.standing is Standing.CURRENT
        try:
            applied = self.mirror.apply(delta)
            self.seen["applied" if applied else "dropped" if was_current else "kept"] += 1
        except OutOfStep:
            self.seen["gap"] += 1
            self.replies.clear()

    # a watcher, as slow as it likes

    def read(self) -> None:
        if self.frozen is not None:
            self._read_part()
        elif self.watch.is_current and self.watch.needs_snapshot:
            self.frozen = self.watch.begin()
            self.at_start = {name: plane.copy() for name, plane in self.mirror.planes.items()}
            self.reader.start(self.frozen)
        elif self.watch.is_current:
            self.reader.follow(self.watch)

    def _read_part(self) -> None:
        assert self.frozen is not None
        self.reader.part(self.frozen.take(2, list(PLANES)))
        if not self.frozen.pages_left:
            self.mirror.thaw(self.frozen)
            self.frozen = None
            self.reader.whole()
            # However long the parts took, all are of one moment.
            assert all((self.reader.planes[name] == plane).all() for name, plane in self.at_start.items())

    def reconnect(self) -> None:
        """Goes on after the revision it has, where that can be."""
        if self.frozen is not None or self.watch.needs_snapshot:
            return
        self.watch.close()
        self.watch = PageWatch(self.mirror, list(PLANES), lambda: None)
        if self.watch.resume(Revision(self.mirror.revision.epoch, self.reader.number)):
            self.seen["resumed"] += 1

    # promises

    def _check_moment(self) -> None:
        if self.mirror.standing is Standing.CURRENT:
            assert self.mirror.revision.epoch == self.pool.epoch
            assert self.mirror.revision.number <= self.pool.number

    def settle(self) -> None:
        """Everything is delivered and nothing more is lost: mirror and watcher equal the pool."""
        for _ in range(3):
            self.feed.append(self.pool.publish())
            while self.feed:
                self._apply(self.feed.pop(0))
            self.ask()
            while self.replies:
                self.deliver_part()
        while self.feed:
            self._apply(self.feed.pop(0))
        assert self.mirror.standing is Standing.CURRENT
        self._compare()
        for _ in range(PAGE_COUNT + 3):
            self.read()
        self._compare_reader()

    def _compare(self) -> None:
        pool, mirror = self.pool, self.mirror
        assert mirror.revision.number == pool.number
        assert mirror.totals == pool.totals()
        for name, plane in pool.planes.items():
            assert (mirror.planes[name] == plane).all(), name
        assert {each.request_id for each in mirror.sequences.records.values()} == set(pool.live)
        for record in mirror.sequences.records.values():
            right = pool.live[record.request_id]
            assert (record.owner, record.state, record.row) == (right.owner, right.state, right.row)
            assert record.pages.tolist() == right.pages.tolist()
            if record.owner:
                assert mirror.sequences.by_owner(record.owner) is record
                assert mirror.sequences.token_count(record) == pool.tokens[record.owner]

    def _compare_reader(self) -> None:
        pool, reader = self.pool, self.reader
        for name, plane in pool.planes.items():
            assert (reader.planes[name] == plane).all(), name
        assert reader.pages == {
            (each.request_id, each.owner): each.pages.tolist() for each in pool.live.values()
        }
        assert reader.by_owner == {
            each.owner: each.pages.tolist() for each in pool.live.values() if each.owner
        }
        for owner, tokens in pool.tokens.items():
            assert reader.tokens[owner] == tokens


@pytest.mark.parametrize("first_seed", [0, 100])
def test_mirror_and_watchers_equal_the_pool_after_any_loss_doubling_or_restart(first_seed: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + 100):
        world = World(seed)
        try:
            world.run(300)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen += world.seen
    rare = {name: seen[name] for name in SITUATIONS if seen[name] < 5}
    assert not rare, f"these hardly happened: {rare}"
