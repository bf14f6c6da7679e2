"""What is measured of pages, against a fold that takes one event at a time and keeps plain dictionaries."""

import random
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import pytest

from worker.pages.events import HIT_TAG, EventColumns, PageEventKind, PageState
from worker.pages.page_cache import CacheConfig, PageCache
from worker.pages.snapshot import Planes, PoolSnapshot
from worker.readers.event_arrays import EventArrays
from worker.readers.ledger import Ledger
from worker.readers.metric_table import AGE_SECONDS, BANDS, CAPACITIES, USES
from worker.readers.pool_meters import PoolMeters

PAGE_SIZE = 2
NUM_PAGES = 24
WATERMARK = 2
SEEDS = range(6)


class Traffic:
    """Sequences that come and go on a small cache: shared prefixes, evictions, flushes, pins."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cache = PageCache(CacheConfig(NUM_PAGES, PAGE_SIZE, fingerprint_key=b"k"))
        self.time_us = 0
        self._owner = 0
        self._held: list[tuple[list[int], int]] = []
        self._pinned: list[int] = []

    def turn(self) -> None:
        draw = self.draw
        self.time_us += draw.choice((0, 400, 30_000, 900_000, 5_000_000))
        self.cache.set_clock(1, self.time_us)
        what = draw.random()
        if what < 0.55:
            self._begin()
        elif what < 0.92 and self._held:
            pages, owner = self._held.pop(draw.randrange(len(self._held)))
            self.cache.release(pages, owner)
        elif what < 0.95:
            self.cache.flush(include_active=draw.random() < 0.5)
        elif self._pinned:
            self.cache.unpin(self._pinned)
            self._pinned = []
        else:
            self._pinned = self.cache.lookup(self._prompt(), b"", 4).pages
            self.cache.pin(self._pinned)

    def _prompt(self) -> "array[int]":
        common = [self.draw.choice((1, 2))] * self.draw.randint(1, 7)
        return array("I", common + [self.draw.randrange(4) for _ in range(self.draw.randint(1, 4))])

    def _begin(self) -> None:
        tokens, cache = self._prompt(), self.cache
        self._owner = self._owner % 500 + 1
        found = cache.lookup(tokens, b"", len(tokens) // PAGE_SIZE)
        needed = cache.pages_for(len(tokens)) - len(found.pages)
        if needed + found.num_unreferenced > cache.num_available:
            return
        cache.acquire(found.pages, self._owner, is_hit=True)
        fresh = cache.allocate(array("H", (self._owner,)) * needed)
        assert fresh is not None
        pages = found.pages + fresh
        for index in range(len(found.pages), len(tokens) // PAGE_SIZE):
            parent = pages[index - 1] if index else None
            if parent is not None and not cache.pool.is_sealed(parent):
                break  # flushed
            token_bytes = tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE].tobytes()
            assert cache.seal(pages[index], parent, b"", token_bytes, self._owner) == pages[index]
        self._held.append((pages, self._owner))


@dataclass
class Page:
    """One page, as the plain fold sees it."""

    born: int = 0
    used: int = 0
    hits: int = 0
    content: int = 0
    refs: int = 0
    pinned: bool = False
    evicted: bool = False
    state: str = "free"


def bucket(value: float, edges: tuple[float, ...]) -> int:
    return bisect_left(edges, value)


@dataclass
class PlainFold:
    """The same measures, event by event."""

    pages: dict[int, Page] = field(default_factory=lambda: {page: Page() for page in range(NUM_PAGES)})
    found: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BANDS, 0.0))
    stack: list[int] = field(default_factory=list)  # contents, least recently used first
    time_us: int = 0

    def run_to(self, time_us: int) -> None:
        available = sum(page.state in ("free", "cached") for page in self.pages.values())
        band = "ok"
        if available < 0.2 * NUM_PAGES:
            band = "low"
        if available < WATERMARK:
            band = "critical"
        if available == 0:
            band = "exhausted"
        self.seconds[band] += (time_us - self.time_us) / 1e6
        self.time_us = time_us

    def age(self, name: str, since_ms: int, now_ms: int) -> None:
        self.found[name, bucket((now_ms - since_ms) / 1000, AGE_SECONDS)] += 1

    def use(self, content: int) -> None:
        if content in self.stack:
            distance = len(self.stack) - self.stack.index(content)
            self.found["distance", bucket(distance, tuple(NUM_PAGES * share for share in CAPACITIES))] += 1
            self.stack.remove(content)
        self.stack.append(content)
        del self.stack[: -8 * NUM_PAGES]

    def fold(self, events: EventColumns) -> None:
        for at, kind in enumerate(events.kinds):
            self._fold_one(events, at, PageEventKind(kind))

    def _fold_one(self, events: EventColumns, at: int, kind: PageEventKind) -> None:
        page, now = self.pages[events.pages[at]], events.times_us[at] // 1000
        self.run_to(events.times_us[at])
        page.refs = events.refs[at]
        if kind in (PageEventKind.SHARED, PageEventKind.REVIVED) and events.tags[at] == HIT_TAG:
            self.age("gap", page.used, now)
            self.use(page.content)
            page.hits += 1
        match kind:
            case PageEventKind.ALLOCATED:
                self.pages[events.pages[at]] = Page(born=now, used=now, refs=1, state="active")
            case PageEventKind.SEALED:
                page.content, page.hits = events.tags[at], 0
                self.use(page.content)
            case PageEventKind.EVICTED:
                if events.owners[at]:
                    self.age("idle", page.used, now)
                    self.found["uses", bucket(page.hits, USES)] += 1
                if not page.refs:
                    self.age("evicted", page.born, now)
                    page.evicted = True
                page.hits = 0
            case PageEventKind.FREED:
                if not page.evicted:
                    self.age("freed", page.born, now)
                page.state = "free"
            case PageEventKind.CACHED:
                page.state = "pinned" if page.pinned else "cached"
            case PageEventKind.REVIVED:
                page.state = "active"
            case PageEventKind.PINNED | PageEventKind.UNPINNED:
                page.pinned = kind == PageEventKind.PINNED
                if not page.refs:
                    page.state = "pinned" if page.pinned else "cached"
        if kind in (PageEventKind.SHARED, PageEventKind.REVIVED, PageEventKind.RELEASED):
            page.used = now


NAMES = {
    ("page_lifetime_seconds", ("freed",)): "freed",
    ("page_lifetime_seconds", ("evicted",)): "evicted",
    ("page_idle_before_eviction_seconds", ()): "idle",
    ("page_reuse_gap_seconds", ()): "gap",
    ("page_uses_at_eviction", ()): "uses",
    ("page_reuse_distance_pages", ()): "distance",
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fold_by_batches_measures_what_a_fold_event_by_event_does(seed: int) -> None:
    """Batches end anywhere, also between an eviction and the event that frees the page."""
    traffic, draw = Traffic(seed), random.Random(seed + 100)
    ledger, meters, plain = Ledger(NUM_PAGES, PAGE_SIZE), PoolMeters(NUM_PAGES, WATERMARK), PlainFold()
    ring = traffic.cache.events
    for _ in range(25):
        for _ in range(draw.randint(1, 30)):
            traffic.turn()
        while ledger.revision < ring.number:
            events = ring.read(ledger.revision, draw.choice((1, 3, 50, 4000)))
            assert events is not None
            plain.fold(events)
            arrays = EventArrays(events)
            meters.fold(ledger, arrays)
            ledger.fold_arrays(arrays)
        meters.run_to(traffic.time_us)
        plain.run_to(traffic.time_us)
        assert meters.pressure_seconds() == pytest.approx(plain.seconds)
        assert sum(meters.pressure_seconds().values()) == pytest.approx(traffic.time_us / 1e6)
    for key, (counts, _) in meters.frozen().items():
        expected = [plain.found[NAMES[key], number] for number in range(len(counts))]
        assert list(counts) == expected, key


def test_after_a_loss_it_goes_on_from_the_pool_as_it_is() -> None:
    """The lost events are not measured; those after them are, as by a fold that begins there."""
    traffic = Traffic(3)
    ledger, meters, plain = Ledger(NUM_PAGES, PAGE_SIZE), PoolMeters(NUM_PAGES, WATERMARK), PlainFold()
    ring, pool = traffic.cache.events, traffic.cache.pool
    for _ in range(150):
        traffic.turn()
    planes = pool.planes()
    snapshot = PoolSnapshot(
        number=ring.number,
        step=1,
        time_us=traffic.time_us,
        page_size=PAGE_SIZE,
        counts=pool.counts_by_state(),
        sequences=(),
        **{name: getattr(planes, name) for name in Planes.__slots__},
    )
    meters.run_to(traffic.time_us)
    ledger.restore(snapshot)
    meters.restart(ledger)
    for page in range(NUM_PAGES):
        state = PageState(planes.states[page]).name.lower()
        plain.pages[page] = Page(
            planes.born_ms[page],
            planes.used_ms[page],
            planes.hit_counts[page],
            planes.fingerprints[page],
            planes.ref_counts[page],
            pool.is_pinned(page),
            state=state,
        )
    plain.time_us = traffic.time_us
    for _ in range(300):
        traffic.turn()
    events = ring.read(ledger.revision)
    assert events is not None
    plain.fold(events)
    meters.fold(ledger, EventArrays(events))
    plain.run_to(traffic.time_us)
    meters.run_to(traffic.time_us)
    found = meters.pressure_seconds()
    assert sum(found.values()) == pytest.approx(traffic.time_us / 1e6)
    assert [found[band] for band in BANDS[1:]] == pytest.approx([plain.seconds[band] for band in BANDS[1:]])
    for key, (counts, _) in meters.frozen().items():
        expected = [plain.found[NAMES[key], number] for number in range(len(counts))]
        assert list(counts) == expected, key


def test_the_traffic_of_these_tests_reaches_every_measure() -> None:
    """Or an equality of zeros would prove nothing."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        traffic, plain = Traffic(seed), PlainFold()
        for _ in range(500):
            traffic.turn()
        events = traffic.cache.events.read(0)
        assert events is not None
        plain.fold(events)
        seen.update({name: count for (name, _), count in plain.found.items()})
        seen.update({band: seconds > 1 for band, seconds in plain.seconds.items()})
        seen.update({"pinned": events.kinds.count(PageEventKind.PINNED)})
    assert all(seen[name] >= 5 for name in (*NAMES.values(), *BANDS, "pinned")), seen
