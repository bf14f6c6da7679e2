"""A pool of pages that lives without a server: seeded, with a clock of its own.

A second implementation, for documents, tests and pictures: prompts share prefixes, sequences grow token by
token, whole pages are sealed and found again, the least recently used leaf is evicted when pages run out.
Its numbers are those of a small real server, its contents are made up. Owns planes and events as the wire
has them; knows no protobuf.
"""

import heapq
import random
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvatlas.client.page_map import PLANES
from kvatlas.v1 import cache_pb2 as pb

NO_PAGE = 0xFFFFFFFF
START_MS = 1_767_261_600_000  # 2026-01-01 10:00:00 UTC
TICK_MS = 100
EVENTS_PER_PAGE = 20
GHOSTS_PER_PAGE = 4  # keys that are remembered when their page was evicted
PREFILL_PAGES_PER_TICK = 6
MAX_OWNERS = 4000
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class DemoSequence:
    """A request's only sample."""

    request_id: str
    keys: list[int]  # of the prompt's whole pages: equal keys are equal prefixes
    prompt_tokens: int
    max_tokens: int
    receive_ms: int
    owner: int = 0
    pages: list[int] = field(default_factory=list)
    token_count: int = 0
    hit_tokens: int = 0
    result_tokens: tuple[int, int, int, int] = (0, 0, 0, 0)
    needed_pages: int = 0
    preemptions: int = 0
    num_kept: int = 0  # of `pages`: told to watchers already

    @property
    def is_prefill(self) -> bool:
        """Whether its prompt is not computed yet."""
        return self.token_count < self.prompt_tokens


class DemoEvent(NamedTuple):
    """A page event."""

    number: int
    kind: int
    step: int
    time_ms: int
    owner: int
    request_id: str
    ref_count: int
    other_page: int


class Workload:
    """Who asks what: a few long system prompts, conversations that go on, and tails of their own."""

    def __init__(self, draw: random.Random, page_size: int, scale: float) -> None:
        self._draw = draw
        self._page_size = page_size
        self._counter = 0
        sizes = (24, 40, 12, 8, 30, 16)
        self._roots = [self._chain([], max(1, round(size * scale))) for size in sizes]
        self._talks: deque[list[int]] = deque(maxlen=400)

    def next(self, number: int, now_ms: int) -> DemoSequence:
        """One request: one in eight is like no other, half of the rest go on with a conversation."""
        draw = self._draw
        kind = draw.random()
        if kind < 0.12:
            keys: list[int] = []
        elif kind < 0.55 and self._talks:
            keys = draw.choice(self._talks)
        else:
            keys = self._roots[min(int(draw.expovariate(0.7)), len(self._roots) - 1)]
        keys = self._chain(keys, draw.randint(1, 7))
        if kind >= 0.12:
            self._talks.append(keys)
        return DemoSequence(
            request_id=f"req-{number:04d}",
            keys=keys,
            prompt_tokens=len(keys) * self._page_size + draw.randint(1, self._page_size - 1),
            max_tokens=draw.randint(80, 900),
            receive_ms=now_ms,
        )

    def _chain(self, keys: list[int], length: int) -> list[int]:
        keys = list(keys)
        for _ in range(length):
            self._counter += 1
            keys.append(mix(keys[-1] if keys else 0, self._counter))
        return keys


def mix(parent: int, content: int) -> int:
    """A key of a page in its prefix; never 0."""
    return ((parent ^ (content * GOLDEN)) * GOLDEN + 1) & 0xFFFFFFFFFFFFFFFF or 1


class DemoPool:
    """Pages, prefix index and sequences. `tick` moves the clock by a tenth of a second."""

    def __init__(
        self,
        page_count: int = 4096,
        page_size: int = 16,
        seed: int = 20,
        load_of: int = 0,
        keeps_events: bool = True,
    ) -> None:
        """`load_of`: requests as they come to a pool of so many pages; 0: of this one."""
        self.page_size, self.page_count, self.seed = page_size, page_count, seed
        self.load_of = load_of or page_count
        self.keeps_events = keeps_events
        self.dummy_page = page_count - 1
        self.draw = random.Random(seed)
        # A little more than the pool holds, and no more than Python can play in real time.
        self.rate = min(self.load_of / 480, 16.0)  # requests a second
        self.workload = Workload(self.draw, page_size, max(0.2, min(1.0, self.load_of / 4096)))
        self.now_ms, self.epoch, self.step = START_MS, START_MS * 1_000_000, 0
        self.number = 0  # of the last event
        # Arrays for single pages, which they read and write faster than numpy; planes are the same memory.
        self.cells = {
            name: array(kind.char, bytes(kind.itemsize * page_count)) for name, kind in PLANES.items()
        }
        self.planes = {name: np.frombuffer(self.cells[name], kind) for name, kind in PLANES.items()}
        self.planes["states"][:] = pb.PAGE_STATE_FREE
        self.planes["parent_page_ids"][:] = NO_PAGE
        self.planes["states"][self.dummy_page] = pb.PAGE_STATE_RESERVED
        self.free = list(range(page_count - 2, -1, -1))
        self.index: dict[int, int] = {}  # key → page
        self.children: dict[int, int] = {}  # page → sealed children
        self.cached: set[int] = set()
        self._idle_leaves: list[tuple[int, int]] = []  # heap of (last use, page); some are out of date
        self.ghosts: OrderedDict[int, None] = OrderedDict()  # keys that were evicted, the newest last
        self.running: list[DemoSequence] = []
        self.waiting: deque[DemoSequence] = deque()
        self.ended: list[int] = []  # owners, since the last `take_changes`
        self.left_queue: list[DemoSequence] = []
        self.dirty: set[int] = set()
        self.events: dict[int, deque[DemoEvent]] = {}
        self.totals = dict.fromkeys((f.name for f in pb.PoolStats.DESCRIPTOR.fields), 0)
        self._owners = deque(range(1, MAX_OWNERS))
        self._made = 0
        self._due = 0.0
        self._pin(min(8, page_count // 64))

    # the clock

    def run(self, seconds: float) -> "DemoPool":
        """Moves the clock."""
        for _ in range(round(seconds * 1000 / TICK_MS)):
            self.tick()
        return self

    def tick(self) -> None:
        """A tenth of a second: requests come, prompts are computed, tokens appear, sequences end."""
        self.now_ms += TICK_MS
        self.step += 4
        wave = 1.0 + 0.4 * np.sin(self.now_ms / 45_000.0)
        self._due += self.rate * float(wave) * TICK_MS / 1000
        while self._due >= 1:
            self._due -= 1
            self._made += 1
            self.waiting.append(self.workload.next(self._made, self.now_ms))
        self._admit()
        for sequence in list(self.running):
            if sequence.owner:  # another one may have taken its pages
                self._advance(sequence)

    # sequences

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            found = self._match(sequence)
            needed = len(sequence.keys) + 1 - len(found)
            sequence.needed_pages = needed
            if needed > len(self.free) + len(self.cached) - len(found) - 4:
                return
            self.waiting.popleft()
            self.left_queue.append(sequence)
            sequence.owner = self._owners.popleft()
            for page in found:
                self._share(page, sequence)
            sequence.pages = list(found)
            sequence.token_count = sequence.hit_tokens = len(found) * self.page_size
            self._count_results(sequence, len(found))
            self.running.append(sequence)

    def _match(self, sequence: DemoSequence) -> list[int]:
        found = []
        for key in sequence.keys:
            page = self.index.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def _count_results(self, sequence: DemoSequence, num_found: int) -> None:
        evicted = 0
        for key in sequence.keys[num_found:]:
            evicted += self.page_size if key in self.ghosts else 0
        unaligned = sequence.prompt_tokens - len(sequence.keys) * self.page_size
        cold = sequence.prompt_tokens - sequence.hit_tokens - evicted - unaligned
        sequence.result_tokens = (sequence.hit_tokens, cold, evicted, unaligned)
        names = ("hit", "miss_cold", "miss_evicted", "unaligned")
        for name, tokens in zip(names, sequence.result_tokens, strict=True):
            self.totals[f"{name}_tokens_total"] += tokens

    def _advance(self, sequence: DemoSequence) -> None:
        budget = PREFILL_PAGES_PER_TICK * self.page_size if sequence.is_prefill else 4
        last = sequence.prompt_tokens if sequence.is_prefill else sequence.prompt_tokens + sequence.max_tokens
        target = min(sequence.token_count + budget, last)
        while sequence.token_count < target:
            place = sequence.token_count // self.page_size
            if place == len(sequence.pages) and not self._allocate(sequence):
                self._preempt(self.running[-1])
                return
            page = sequence.pages[place]
            size = min(target - sequence.token_count, self.page_size - sequence.token_count % self.page_size)
            sequence.token_count += size
            self.cells["filled_slots"][page] += size
            self._touch(page)
            if sequence.token_count % self.page_size == 0:
                self._seal(sequence, place)
        if sequence.token_count == sequence.prompt_tokens + sequence.max_tokens:
            self._finish(sequence)

    def _finish(self, sequence: DemoSequence) -> None:
        self.running.remove(sequence)
        for page in reversed(sequence.pages):
            self._release(page, sequence)
        self.ended.append(sequence.owner)
        self._owners.append(sequence.owner)

    def _preempt(self, sequence: DemoSequence) -> None:
        self.totals["preemptions_total"] += 1
        self._finish(sequence)
        sequence.owner, sequence.pages, sequence.token_count, sequence.num_kept = 0, [], 0, 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    # pages

    def _allocate(self, sequence: DemoSequence) -> bool:
        if not self.free and not self._evict(sequence):
            return False
        page = self.free.pop()
        self._set(
            page, states=pb.PAGE_STATE_ACTIVE, ref_counts=1, owners=sequence.owner, born_ms=self._uptime
        )
        self._touch(page)
        self.totals["allocations_total"] += 1
        sequence.pages.append(page)
        self._event(pb.PAGE_EVENT_TYPE_ALLOCATED, page, sequence)
        return True

    def _share(self, page: int, sequence: DemoSequence) -> None:
        was_idle = self.cells["ref_counts"][page] == 0
        self.cached.discard(page)
        self.cells["ref_counts"][page] += 1
        self.cells["hit_counts"][page] += 1
        if was_idle:
            self._set(page, states=pb.PAGE_STATE_ACTIVE, owners=sequence.owner)
        self._touch(page)
        kind = pb.PAGE_EVENT_TYPE_REVIVED if was_idle else pb.PAGE_EVENT_TYPE_SHARED
        self._event(kind, page, sequence)

    def _seal(self, sequence: DemoSequence, place: int) -> None:
        page = sequence.pages[place]
        parent = sequence.pages[place - 1] if place else NO_PAGE
        above = int(self.cells["fingerprints"][parent]) if place else 0
        key = sequence.keys[place] if place < len(sequence.keys) else mix(above, page + self.number)
        if key in self.index or (place and not self.cells["flags"][parent] & pb.PAGE_FLAG_SEALED):
            return  # a twin was sealed meanwhile
        self.index[key] = page
        self.ghosts.pop(key, None)
        self._set(page, flags=pb.PAGE_FLAG_SEALED, parent_page_ids=parent, fingerprints=key)
        if place:
            self.children[parent] = self.children.get(parent, 0) + 1
        self._event(pb.PAGE_EVENT_TYPE_SEALED, page, sequence, parent)

    def _release(self, page: int, sequence: DemoSequence) -> None:
        self.cells["ref_counts"][page] -= 1
        self.dirty.add(page)
        self._event(pb.PAGE_EVENT_TYPE_RELEASED, page, sequence)
        if self.cells["ref_counts"][page]:
            holders = [each for each in self.running if page in each.pages]
            self.cells["owners"][page] = holders[0].owner if holders else 0
            return
        self.cells["owners"][page] = 0
        if self.cells["flags"][page] & pb.PAGE_FLAG_PINNED:
            self._set(page, states=pb.PAGE_STATE_PINNED)
        elif self.cells["flags"][page] & pb.PAGE_FLAG_SEALED:
            self._set(page, states=pb.PAGE_STATE_CACHED)
            self.cached.add(page)
            self._note_leaf(page)
            self._event(pb.PAGE_EVENT_TYPE_CACHED, page, sequence)
        else:
            self._free(page, sequence)

    def _evict(self, sequence: DemoSequence) -> bool:
        page = self._next_victim()
        if page is None:
            return False
        self.cached.remove(page)
        key, parent = int(self.cells["fingerprints"][page]), int(self.cells["parent_page_ids"][page])
        del self.index[key]
        self.ghosts[key] = None
        if len(self.ghosts) > GHOSTS_PER_PAGE * self.page_count:
            self.ghosts.popitem(last=False)
        if parent != NO_PAGE:
            self.children[parent] -= 1
            self._note_leaf(parent)
        self.totals["evictions_total"] += 1
        self._event(pb.PAGE_EVENT_TYPE_EVICTED, page, sequence)
        self._free(page, sequence)
        return True

    def _note_leaf(self, page: int) -> None:
        if page in self.cached and not self.children.get(page):
            heapq.heappush(self._idle_leaves, (int(self.cells["used_ms"][page]), page))

    def _next_victim(self) -> int | None:
        while self._idle_leaves:
            used_ms, page = heapq.heappop(self._idle_leaves)
            is_same = page in self.cached and int(self.cells["used_ms"][page]) == used_ms
            if is_same and not self.children.get(page):
                return page
        return None

    def _free(self, page: int, sequence: DemoSequence) -> None:
        self._set(page, states=pb.PAGE_STATE_FREE, flags=0, filled_slots=0, hit_counts=0, owners=0)
        self._set(page, parent_page_ids=NO_PAGE, fingerprints=0)
        self.free.append(page)
        self._event(pb.PAGE_EVENT_TYPE_FREED, page, sequence)

    def _pin(self, count: int) -> None:
        """A system prompt that is kept by order."""
        keys = self.workload.next(0, self.now_ms).keys[:count]
        for place, key in enumerate(keys):
            page = self.free.pop()
            parent = NO_PAGE if not place else self.index[keys[place - 1]]
            self.index[key] = page
            flags = pb.PAGE_FLAG_SEALED | pb.PAGE_FLAG_PINNED
            self._set(page, states=pb.PAGE_STATE_PINNED, flags=flags, filled_slots=self.page_size)
            self._set(page, parent_page_ids=parent, fingerprints=key)
            if place:
                self.children[parent] = self.children.get(parent, 0) + 1

    @property
    def _uptime(self) -> int:
        return self.now_ms - START_MS

    def _touch(self, page: int) -> None:
        self._set(page, used_ms=self._uptime)

    def _set(self, page: int, **values: int) -> None:
        for name, value in values.items():
            self.cells[name][page] = value
        self.dirty.add(page)

    def _event(self, kind: int, page: int, sequence: DemoSequence, other: int = NO_PAGE) -> None:
        self.number += 1
        if not self.keeps_events:
            return
        refs = int(self.cells["ref_counts"][page])
        past = self.events.setdefault(page, deque(maxlen=EVENTS_PER_PAGE))
        past.append(
            DemoEvent(
                self.number, kind, self.step, self.now_ms, sequence.owner, sequence.request_id, refs, other
            )
        )
