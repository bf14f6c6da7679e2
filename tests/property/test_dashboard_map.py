"""The dashboard's copy of a pool: whatever happens and however slowly it is read, it equals the pool."""

import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dashboard import demo_messages, live_map
from dashboard.demo_checks import check_pool
from dashboard.demo_pool import DemoPool
from dashboard.frames import USED_BIT, Columns
from dashboard.live_map import LiveMap
from dashboard.mirror_checks import check_mirror
from kvatlas.client.errors import Incomplete
from kvatlas.v1 import cache_pb2 as pb

PAGE_COUNT = 96


class Screen:
    """What a browser holds: the columns, by the same rules as planes.js."""

    def __init__(self) -> None:
        self.seen = -1
        self.columns: Columns | None = None
        self.lists: dict[int, list[int]] = {}
        self.seen_lists = -1

    def read(self, live: LiveMap) -> None:
        change = live.since(self.seen) if self.seen >= 0 else None
        if change is None:
            whole = live.whole()
            self.seen, self.columns = whole.revision, whole.columns
        else:
            assert self.columns is not None
            assert (np.diff(change.page_ids.astype(np.int64)) > 0).all(), "each page once, in order"
            self.seen = change.revision
            for name in Columns.__slots__:
                getattr(self.columns, name)[change.page_ids] = getattr(change.columns, name)
        is_all, owners, page_lists = live.lists_since(self.seen_lists)
        self.seen_lists = live.revision
        if is_all:
            self.lists.clear()
        for owner, pages in zip(owners, page_lists, strict=True):
            if len(pages):
                self.lists[owner] = pages.tolist()
            else:
                self.lists.pop(owner, None)

    def equals(self, live: LiveMap) -> None:
        assert self.columns is not None
        now = live.columns()
        states = self.columns.states & ~np.uint8(USED_BIT)
        assert (states == now.states).all()
        for name in ("refs", "fill", "owners"):
            assert (getattr(self.columns, name) == getattr(now, name)).all(), name
        held = {owner: one.page_ids.tolist() for owner, one in live.page_map.sequences.items()}
        assert self.lists == {owner: pages for owner, pages in held.items() if pages}


class World:
    """A pool, its feed, one copy, and screens that read it when they like."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = DemoPool(PAGE_COUNT, page_size=4, seed=seed)
        self.live = LiveMap("w")
        self.screens = [Screen(), Screen()]
        self.number = 0
        self.connect()

    def connect(self) -> None:
        self.live.page_map.begin()
        for message in demo_messages.snapshot(self.pool):
            self.live.apply(message)
        self.number = demo_messages.forget_changes(self.pool)

    def tick(self) -> None:
        self.pool.run(self.draw.choice([0.1, 0.3, 2.0]))

    def tell(self) -> None:
        message = demo_messages.delta(self.pool, self.number)
        self.number = self.pool.number
        assert self.live.apply(message)

    def lose(self) -> None:
        """A lost message is noticed, told, and mended by a new connection."""
        before = self.number
        demo_messages.delta(self.pool, self.number)
        self.number = self.pool.number
        if self.number == before:
            return
        self.pool.tick()
        with pytest.raises(Incomplete):
            self.live.apply(demo_messages.delta(self.pool, self.number))
        self.connect()

    def repeat(self) -> None:
        message = demo_messages.delta(self.pool, self.number)
        self.number = self.pool.number
        self.live.apply(message)
        if message.base_number != self.number:
            with pytest.raises(Incomplete):
                self.live.apply(message)
            self.connect()

    def restart(self) -> None:
        """A new life of the worker."""
        epoch = self.pool.epoch + 1
        self.pool = DemoPool(PAGE_COUNT, page_size=4, seed=self.draw.randrange(1000))
        self.pool.epoch = epoch
        self.connect()

    def read(self) -> None:
        self.draw.choice(self.screens).read(self.live)

    def check(self) -> None:
        for name, plane in self.pool.planes.items():
            assert (self.live.page_map.planes[name] == plane).all(), name
        for screen in self.screens:
            screen.read(self.live)
            screen.equals(self.live)
        assert [each.name for each in check_mirror(self.live.page_map) if each.num_faults] == []
        assert check_pool(self.pool).violations == ()


ACTIONS = ("tick", "tell", "tell", "read", "read", "lose", "repeat", "restart")


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 10_000), actions=st.lists(st.sampled_from(ACTIONS), min_size=5, max_size=40))
def test_copies_and_screens_equal_the_pool_after_any_loss_repetition_or_restart(
    seed: int, actions: list[str]
) -> None:
    world = World(seed)
    for action in actions:
        getattr(world, action)()
    world.tell()
    world.check()


@pytest.mark.parametrize("seed", range(6))
def test_the_past_is_what_was_recorded_as_the_present(seed: int) -> None:
    world = World(seed)
    kept: list[tuple[float, Columns]] = [(world.live.clock_ms, world.live.columns())]
    for _ in range(40):
        world.pool.run(world.draw.choice([0.2, 1.0, 15.0]))
        world.tell()
        kept.append((world.live.clock_ms, world.live.columns()))
    start = world.live.history.start_ms
    assert start is not None
    for clock_ms, columns in kept:
        if clock_ms < start:
            continue
        past = world.live.past(clock_ms)
        assert past is not None
        assert past.clock_ms <= clock_ms  # earlier where nothing had changed since
        for name in Columns.__slots__:
            assert (getattr(past.columns, name) == getattr(columns, name)).all(), (name, clock_ms)


def test_a_merged_change_equals_the_changes_one_by_one() -> None:
    world = World(7)
    fast, slow = world.screens
    fast.read(world.live)
    slow.read(world.live)
    for _ in range(200):  # more messages than the copy remembers page ids of
        world.pool.tick()
        world.tell()
        fast.read(world.live)
    change = world.live.since(slow.seen)
    assert change is not None
    assert len(change.page_ids) > 20
    slow.read(world.live)
    fast.equals(world.live)
    slow.equals(world.live)


def test_what_the_audit_found_is_kept_with_the_map() -> None:
    world = World(3)
    world.pool.tick()
    message = demo_messages.delta(world.pool, world.number)
    found = message.violations.add(check=pb.INTEGRITY_CHECK_REFCOUNT, subject="references of page 7")
    found.page_id, found.expected, found.found = 7, "1", "2"
    world.live.apply(message)
    (kept,) = world.live.violations
    assert (kept.check, kept.page_id, kept.expected, kept.found) == ("refcount", 7, "1", "2")
    world.restart()
    assert not world.live.violations, "another life of the worker"


def test_lists_are_whole_however_many_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few changes are remembered: who has seen less gets all lists, the others only what changed."""
    monkeypatch.setattr(live_map, "MAX_LIST_CHANGES", 4)
    world = World(11)
    fast, slow = world.screens
    slow.read(world.live)
    was_part = 0
    for _ in range(60):
        world.pool.run(0.4)
        world.tell()
        was_part += not world.live.lists_since(fast.seen_lists)[0]
        fast.read(world.live)
        fast.equals(world.live)
    assert was_part > 20
    assert world.live.lists_since(slow.seen_lists)[0]
    slow.read(world.live)
    slow.equals(world.live)
