"""One worker's pages as the dashboard holds them: now, what changed since when, and the last minutes.

One thread applies messages, any thread reads; one lock guards all. Owns revisions of its own: each message
is one, over all epochs, and a viewer remembers the one it has seen. Knows no channels and no clock.
"""

import io
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dashboard import readings
from dashboard.facts import ViolationFacts
from dashboard.frames import USED_BIT, Columns
from dashboard.ghosts import Ghosts
from dashboard.history import History, Past
from dashboard.spectrogram import Moment, Spectrogram
from kvatlas.client.page_map import PageMap, SequencePages
from kvatlas.v1 import cache_pb2 as pb

NO_PAGE = 0xFFFFFFFF
MAX_VIOLATIONS = 100
MAX_LIST_CHANGES = 8192
RECENT_MESSAGES = 64  # whose page ids are kept, so that fast viewers cost no scan of the pool
_STAT_NAMES = tuple(field.name for field in pb.PoolStats.DESCRIPTOR.fields)


@dataclass(frozen=True, slots=True)
class Geometry:
    """A pool's shape; fixed within an epoch."""

    worker_id: str
    epoch: int
    start_ms: int
    page_count: int
    page_size: int
    page_bytes: int
    layer_count: int
    kv_head_count: int
    head_dim: int
    dtype: str
    device: str
    row_count: int
    row_width: int
    dummy_page: int
    eviction_policy: str


@dataclass(frozen=True, slots=True)
class Change:
    """What a viewer needs to come from one revision to another."""

    revision: int
    clock_ms: float
    page_ids: NDArray[np.uint32]
    columns: Columns  # of those pages, now


@dataclass(frozen=True, slots=True)
class Whole:
    """The map at one revision."""

    revision: int
    clock_ms: float
    idle_ms: NDArray[np.uint32]
    columns: Columns


class LiveMap:
    """The copy of one worker's pool."""

    def __init__(self, worker_id: str, history_seconds: int = 600) -> None:
        self.worker_id = worker_id
        self.lock = threading.RLock()
        self.page_map = PageMap()
        self.revision = 0  # ours: messages that made the map whole
        self.snapshot_revision = 0  # of the last snapshot: who has seen less needs one, too
        self.clock_ms = 0.0  # the worker's, at the last message
        self.history = History(history_seconds)
        self.spectrogram = Spectrogram(history_seconds)
        self.ghosts = Ghosts(0)
        self.epoch_starts: deque[float] = deque(maxlen=64)  # clock of each epoch's first message
        # Of the live audit, the newest last.
        self.violations: deque[ViolationFacts] = deque(maxlen=MAX_VIOLATIONS)
        self._load = (0, 0)  # running sequences, waiting requests
        self._changed_at = np.zeros(0, np.int64)
        self._used_at = np.zeros(0, np.int64)
        # By owner: revision at which its page list changed; the newest last. Changes older than
        # `_lists_floor` are forgotten: who has seen less gets all lists.
        self._lists_at: dict[int, int] = {}
        self._lists_floor = 0
        self._recent: deque[tuple[int, NDArray[np.uint32]]] = deque(maxlen=RECENT_MESSAGES)
        self._unwritten: list[NDArray[np.uint32]] = []  # changed since the last entry of the history
        self._epoch = 0

    @property
    def _planes(self) -> Mapping[str, NDArray[Any]]:
        return self.page_map.planes

    # taking messages

    def apply(self, message: pb.WatchPageMapResponse) -> bool:
        """Takes one message of the watch, in order; True when the map is whole. Incomplete: see PageMap."""
        with self.lock:
            delta = message.delta if message.WhichOneof("event") == "delta" else None
            page_ids = np.frombuffer(delta.page_ids if delta else b"", "<u4")
            before = self._before(page_ids) if len(page_ids) else None
            if not self.page_map.apply(message):
                return False
            self.revision += 1
            if message.HasField("observe_time"):
                self.clock_ms = message.observe_time.ToNanoseconds() / 1e6
            self.violations.extend(readings.violation(found) for found in message.violations)
            if message.WhichOneof("event") == "snapshot":
                self._began()
            elif delta is not None:
                self._note(delta, page_ids, before)
            self._write_history()
            return True

    def take_load(self, running: int, waiting: int) -> None:
        """Sequences that run and requests that wait, for the figures of each second."""
        with self.lock:
            self._load = (running, waiting)

    def _before(self, page_ids: NDArray[np.uint32]) -> Mapping[str, NDArray[np.generic]]:
        planes = self._planes
        parents = planes["parent_page_ids"][page_ids].astype(np.int64)
        known = parents != NO_PAGE
        parent_prints = np.where(known, planes["fingerprints"][np.where(known, parents, 0)], 0)
        names = ("flags", "used_ms", "fingerprints")
        return {**{name: planes[name][page_ids] for name in names}, "parent_fingerprints": parent_prints}

    def _began(self) -> None:
        """A snapshot replaced everything."""
        count, epoch = self.page_map.page_count, self.page_map.geometry.epoch
        is_restart = bool(self._epoch) and epoch != self._epoch
        if epoch != self._epoch:
            self._epoch, self.ghosts = epoch, Ghosts(count)
            self.violations.clear()
            self.epoch_starts.append(self.clock_ms)
        if is_restart:
            self.history.restarts.append(self.clock_ms)
        self.snapshot_revision = self.revision
        if len(self._changed_at) != count:  # else in place, as the planes: these are large, and come again
            self._changed_at, self._used_at = np.empty(count, np.int64), np.empty(count, np.int64)
        self._changed_at.fill(self.revision)
        self._used_at.fill(0)
        self._lists_at, self._lists_floor = {}, self.revision
        self._recent.clear()
        self._unwritten.clear()
        self.spectrogram.resize(count, is_restart=is_restart)
        self.history.add_key(self.clock_ms, self.uptime_ms, self.columns(), self._planes["used_ms"])

    def _note(
        self,
        delta: pb.PageDelta,
        page_ids: NDArray[np.uint32],
        before: Mapping[str, NDArray[np.generic]] | None,
    ) -> None:
        """What a delta changed."""
        for owner in np.frombuffer(delta.ended_owners, "<u2").tolist():
            self._note_list(owner)
        for info in delta.sequences:
            if info.owner:
                self._note_list(info.owner)
        if before is None:
            return
        self._changed_at[page_ids] = self.revision
        is_used = self._planes["used_ms"][page_ids] != before["used_ms"]
        self._used_at[page_ids[is_used]] = self.revision
        self._recent.append((self.revision, page_ids))
        self._unwritten.append(page_ids)
        if len(self._unwritten) > RECENT_MESSAGES:  # nothing is written while a worker's clock stands still
            self._unwritten = [np.unique(np.concatenate(self._unwritten))]
        self.spectrogram.count(page_ids)
        self._follow_ghosts(page_ids, before)

    def _note_list(self, owner: int) -> None:
        self._lists_at.pop(owner, None)
        self._lists_at[owner] = self.revision
        if len(self._lists_at) > MAX_LIST_CHANGES:
            oldest = next(iter(self._lists_at))
            self._lists_floor = self._lists_at.pop(oldest)

    def _follow_ghosts(self, page_ids: NDArray[np.uint32], before: Mapping[str, NDArray[np.generic]]) -> None:
        was = before["fingerprints"]
        now = self._planes["fingerprints"][page_ids]
        changed = was != now
        left = changed & (was != 0)
        rows = zip(was[left].tolist(), before["parent_fingerprints"][left].tolist(), strict=True)
        for fingerprint, parent in rows:
            self.ghosts.leave(fingerprint, parent, self.clock_ms)
        self.ghosts.enter(now[changed & (now != 0)].tolist())

    def _write_history(self) -> None:
        planes = self._planes
        if self.history.is_due(self.clock_ms):
            if self.history.needs_key(self.clock_ms):
                self.history.add_key(self.clock_ms, self.uptime_ms, self.columns(), planes["used_ms"])
                self._unwritten.clear()
            elif self._unwritten:
                ids = np.unique(np.concatenate(self._unwritten))
                used = planes["used_ms"][ids]
                self.history.add_delta(self.clock_ms, self.uptime_ms, ids, self.columns(ids), used)
                self._unwritten.clear()
        if self.spectrogram.is_due(self.clock_ms):
            moment = Moment(planes["states"], planes["born_ms"], self.uptime_ms, self._figures())
            self.spectrogram.add(self.clock_ms, moment)

    def _figures(self) -> tuple[int, ...]:
        stats, counts = self.page_map.stats, self.page_map.counts()
        totals = (
            stats.allocations_total,
            stats.evictions_total,
            stats.preemptions_total,
            stats.hit_tokens_total,
            stats.miss_cold_tokens_total,
            stats.miss_evicted_tokens_total,
            stats.unaligned_tokens_total,
        )
        return tuple(number & 0xFFFFFFFF for number in (*counts.values(), *totals, *self._load))

    @property
    def num_unwritten(self) -> int:
        """Arrays of page ids that wait for the next entry of the history."""
        return len(self._unwritten)

    # reading; all but `locked` take the lock themselves

    @contextmanager
    def locked(self) -> Iterator[PageMap]:
        """The map itself, while nothing changes it. Be quick."""
        with self.lock:
            yield self.page_map

    @property
    def is_whole(self) -> bool:
        """Whether there is a map to show; during a resync the old one is."""
        return self.revision > 0

    @property
    def uptime_ms(self) -> int:
        """The worker's clock since its start, modulo 2^32: the zero of `born_ms` and `used_ms`."""
        start = self.page_map.geometry.start_time.ToNanoseconds() / 1e6
        return int(max(0.0, self.clock_ms - start)) & 0xFFFFFFFF

    @property
    def is_wide(self) -> bool:
        """Whether fill levels need more than a byte."""
        return self.page_map.geometry.page_size > 255

    def geometry(self) -> Geometry:
        """Shape of the pool."""
        with self.lock:
            shape = self.page_map.geometry
            return Geometry(
                worker_id=shape.worker_id or self.worker_id,
                epoch=shape.epoch,
                start_ms=shape.start_time.ToMilliseconds(),
                dummy_page=shape.dummy_page_id,
                **{
                    name: getattr(shape, name)
                    for name in Geometry.__slots__
                    if name not in ("worker_id", "epoch", "start_ms", "dummy_page")
                },
            )

    def totals(self) -> dict[str, int]:
        """PoolStats by name; counters count from the start of the epoch."""
        with self.lock:
            return {name: getattr(self.page_map.stats, name) for name in _STAT_NAMES}

    def counts(self) -> dict[str, int]:
        """Pages by state, counted in the planes."""
        with self.lock:
            return self.page_map.counts()

    def sequences(self) -> list[SequencePages]:
        """All live ones, those that wait included; oldest first."""
        with self.lock:
            both = [*self.page_map.sequences.values(), *self.page_map.waiting.values()]
        return sorted(both, key=lambda one: (one.receive_ms, one.request_id, one.choice_index))

    def planes(self, names: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Copies of some planes, all of one revision."""
        with self.lock:
            return {name: self.page_map.planes[name].copy() for name in names}

    def columns(self, page_ids: NDArray[np.uint32] | None = None) -> Columns:
        """Pages as they are drawn: these, or all. A copy."""
        at: NDArray[np.uint32] | slice = slice(None) if page_ids is None else page_ids
        with self.lock:
            planes = self._planes
            states = planes["states"][at] | ((planes["flags"][at] & 3) << 3)
            refs = np.minimum(planes["ref_counts"][at], 255)
            fill, owners = planes["filled_slots"][at], planes["owners"][at]
            return Columns(
                states.astype(np.uint8), refs.astype(np.uint8), fill.astype("u2"), owners.astype("u2")
            )

    def whole(self) -> Whole:
        """The map as of now."""
        with self.lock:
            used = self._planes["used_ms"].astype(np.uint32)
            return Whole(self.revision, self.clock_ms, np.uint32(self.uptime_ms) - used, self.columns())

    def since(self, seen: int) -> Change | None:
        """Pages that changed after revision `seen`, each once, as they are now. None: take `whole`."""
        with self.lock:
            if seen < self.snapshot_revision or not self.revision:
                return None
            page_ids = self._ids_since(seen)
            columns = self.columns(page_ids)
            columns.states[self._used_at[page_ids] > seen] |= USED_BIT
            return Change(self.revision, self.clock_ms, page_ids, columns)

    def lists_since(self, seen: int) -> tuple[bool, list[int], list[NDArray[np.uint32]]]:
        """Owners whose page lists changed after revision `seen`, with the lists; empty: it ended.

        The first value: these are all lists, others are to be forgotten.
        """
        with self.lock:
            held = self.page_map.sequences
            is_all = seen < self._lists_floor
            if is_all:
                owners = sorted(held)
            else:
                changed = takewhile(lambda item: item[1] > seen, reversed(self._lists_at.items()))
                owners = sorted(owner for owner, _ in changed)
            empty = np.empty(0, np.uint32)
            return is_all, owners, [held[owner].page_ids if owner in held else empty for owner in owners]

    def past(self, clock_ms: float) -> Past | None:
        """The map at a past moment. Takes milliseconds of work: not for an event loop."""
        with self.lock:
            return self.history.at(clock_ms)

    def snapshot_bytes(self) -> bytes:
        """All planes of one revision and that revision (epoch, number), for numpy.load."""
        with self.lock:
            planes: dict[str, Any] = self.planes(list(self.page_map.planes))
            at = self.page_map.revision
        packed = io.BytesIO()
        np.savez_compressed(packed, revision=np.array([at.epoch, at.number], np.uint64), **planes)
        return packed.getvalue()

    def _ids_since(self, seen: int) -> NDArray[np.uint32]:
        if self._recent and (len(self._recent) < RECENT_MESSAGES or self._recent[0][0] <= seen + 1):
            parts = [page_ids for revision, page_ids in self._recent if revision > seen]
            if len(parts) <= 1:
                return parts[0] if parts else np.empty(0, np.uint32)
            return np.unique(np.concatenate(parts))
        return np.flatnonzero(self._changed_at > seen).astype(np.uint32)
