"""A copy of one worker's pages and sequences: snapshot plus deltas, by epoch and revision.

Owns the planes and judges what a message of the feed is worth. Pure: no sockets, no wire types;
`page_codec.py` translates, `mirrors.py` asks the worker for snapshots. On the event loop's thread.

Deltas say what pages *are*, so one may be applied to any state from its base on. A snapshot at number
N makes the deltas before N worthless; a delta whose base is past the number held shows a gap.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from service.fleet.feed import (
    PLANES,
    MapDelta,
    OutOfStep,
    Pages,
    Plane,
    PoolTotals,
    Revision,
    SequenceChange,
    SequenceRecord,
    SnapshotPart,
)
from service.fleet.sequence_mirror import SequenceMirror, SequenceNews

MAX_DELTAS_WAITING = 256
"""Deltas kept while a snapshot is under way: 13 s of the feed."""


class Standing(Enum):
    """Whether the copy can be trusted to be whole."""

    EMPTY = "empty"  # no map yet
    CURRENT = "current"
    BEHIND = "behind"  # something was missed; the old map is shown until a snapshot replaces it


class MirrorReader:
    """Who follows a mirror. Called at every change; must neither wait nor fail."""

    def replaced(self, *, is_new_epoch: bool) -> None:
        """The whole map is another."""

    def changed(self, page_ids: Pages, news: SequenceNews) -> None:
        """A delta was applied."""

    def abandoned(self) -> None:
        """Nothing will ever come."""


class PageMirror:
    """The copy."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.standing = Standing.EMPTY
        self.revision = Revision(0, 0)
        self.observe_time_ns = 0  # worker's clock when it published this
        self.planes: dict[str, Plane] = {}  # by PLANES, [page_count]
        self.totals = PoolTotals()
        self.sequences = SequenceMirror()
        self.readers: list[MirrorReader] = []
        self._changed_at: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # number; 0: not since the snapshot
        self._epoch = 0  # that the worker is in
        self._expected_pages = 0
        self._assembly: _Assembly | None = None
        self._waiting: deque[MapDelta] = deque()
        self._frozen: list[FrozenMap] = []

    @property
    def page_count(self) -> int:
        """Pages of the map that is shown, the dummy page included."""
        return len(self.planes["states"]) if self.planes else 0

    def begin_life(self, epoch: int, page_count: int) -> None:
        """The worker, or the connection to it, begins. The old map is shown until a new one is whole."""
        self._epoch, self._expected_pages = epoch, page_count
        self.lose_step()
        self._waiting.clear()

    def lose_step(self) -> None:
        """Something was missed: a snapshot is needed."""
        if self.standing is Standing.CURRENT:
            self.standing = Standing.BEHIND
        self._assembly = None

    def begin_snapshot(self) -> None:
        """Parts of a new snapshot follow; those of an unfinished one are worthless."""
        self._assembly = _Assembly(self._expected_pages)

    def add_part(self, part: SnapshotPart) -> bool:
        """Takes a part; True when the map is whole. Raises OutOfStep for what does not fit together."""
        if part.revision.epoch != self._epoch:
            raise OutOfStep(f"a snapshot of epoch {part.revision.epoch} in epoch {self._epoch}")
        if self._assembly is None:
            raise OutOfStep("a part of a snapshot that was given up")
        self._assembly.add(part)
        if part.parts_left:
            return False
        assembly, self._assembly = self._assembly, None
        self._install(assembly)
        self._catch_up()
        return True

    def apply(self, delta: MapDelta) -> bool:
        """Takes a delta; False: it is old, or kept for later. Raises OutOfStep where one is missing."""
        if delta.revision.epoch != self._epoch:
            return False  # of a life that is over, or of one that was not announced yet
        if self.standing is not Standing.CURRENT:
            self._keep(delta)
            return False
        if delta.revision.number < self.revision.number:
            return False
        if delta.base_number > self.revision.number:
            self._keep(delta)
            self.lose_step()
            raise OutOfStep(f"a delta continues {delta.base_number}, the copy is at {self.revision.number}")
        self._apply(delta)
        return True

    def changes_since(self, number: int) -> tuple[Pages, SequenceNews] | None:
        """What a reader that has a revision of this epoch must be told; None: it needs a snapshot."""
        news = self.sequences.since(number)
        if news is None or number > self.revision.number:
            return None
        return np.flatnonzero(self._changed_at >= number).astype(np.uint32), news

    def freeze(self) -> "FrozenMap":
        """The map as it is now, to be read window by window while the mirror goes on. To be closed."""
        frozen = FrozenMap(self)
        self._frozen.append(frozen)
        return frozen

    def thaw(self, frozen: "FrozenMap") -> None:
        """Nobody reads it any more. Idempotent."""
        if frozen in self._frozen:
            self._frozen.remove(frozen)

    # -- inside --------------------------------------------------------------------------------------

    def _keep(self, delta: MapDelta) -> None:
        if len(self._waiting) == MAX_DELTAS_WAITING:
            self._waiting.popleft()  # if it is needed after all, the gap shows
        self._waiting.append(delta)

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for delta in waiting:
            self.apply(delta)

    def _install(self, assembly: "_Assembly") -> None:
        planes, revision, totals = assembly.finish()
        is_new_epoch = self.standing is not Standing.EMPTY and revision.epoch != self.revision.epoch
        self._frozen.clear()  # they have the old planes to themselves now
        self.planes, self.revision, self.totals = planes, revision, totals
        self.observe_time_ns = assembly.observe_time_ns
        self._changed_at = np.zeros(self.page_count, np.uint64)
        self.sequences.replace(assembly.sequences, revision.number)
        self.standing = Standing.CURRENT
        for reader in self.readers:
            reader.replaced(is_new_epoch=is_new_epoch)

    def _apply(self, delta: MapDelta) -> None:
        pages = delta.page_ids
        if len(pages):
            if (highest := int(pages.max())) >= self.page_count:
                self.lose_step()
                raise OutOfStep(f"page {highest} in a pool of {self.page_count}")
            for frozen in self._frozen:
                frozen.keep(pages)
            for name, values in delta.planes.items():
                self.planes[name][pages] = values
            self._changed_at[pages] = delta.revision.number
        self.revision, self.totals = delta.revision, delta.totals
        self.observe_time_ns = delta.observe_time_ns
        try:
            news = self.sequences.apply(delta)
        except OutOfStep:
            self.lose_step()
            raise
        for reader in self.readers:
            reader.changed(pages, news)


class _Assembly:
    """A snapshot that is coming in: each part is copied to its place at once, so none costs much."""

    def __init__(self, page_count: int) -> None:
        self.sequences: list[SequenceChange] = []
        self.observe_time_ns = 0
        self._planes: dict[str, Plane] = {name: np.empty(page_count, kind) for name, kind in PLANES.items()}
        self._next_page = 0
        self._page_count = page_count
        self._revision: Revision | None = None
        self._totals: PoolTotals | None = None

    def add(self, part: SnapshotPart) -> None:
        """Takes a part of the same revision as the others, the pages in order."""
        if self._revision is not None and part.revision != self._revision:
            raise OutOfStep(f"parts of {part.revision} and {self._revision} in one snapshot")
        self._revision, self.observe_time_ns = part.revision, part.observe_time_ns
        if part.planes:
            count = len(part.planes["states"])
            end = part.first_page + count
            if part.first_page != self._next_page or end > self._page_count:
                raise OutOfStep(f"pages {part.first_page} to {end} come after {self._next_page}")
            for name, plane in self._planes.items():
                plane[part.first_page : end] = part.planes[name]
            self._next_page = end
        self.sequences.extend(part.sequences)
        self._totals = part.totals or self._totals

    def finish(self) -> tuple[dict[str, Plane], Revision, PoolTotals]:
        """The whole map."""
        if self._next_page != self._page_count:
            raise OutOfStep(f"a snapshot of {self._next_page} pages, the pool has {self._page_count}")
        if self._revision is None or self._totals is None:
            raise OutOfStep("a snapshot without totals")
        return self._planes, self._revision, self._totals


class FrozenMap:
    """The map at one revision while its parts are sent; what is overwritten meanwhile is kept aside.

    Holds at most one copy of the pages that are still to be read.
    """

    def __init__(self, mirror: PageMirror) -> None:
        self.revision = mirror.revision
        self.observe_time_ns = mirror.observe_time_ns
        self.totals = mirror.totals
        self.page_count = mirror.page_count
        self.records: list[SequenceRecord] = list(mirror.sequences.records.values())
        self._counts = mirror.sequences.token_counts.copy()
        self._planes = mirror.planes
        self._next_page = 0
        self._is_kept: npt.NDArray[np.bool_] | None = None  # by page
        self._kept: list[tuple[Pages, Mapping[str, Plane]]] = []

    def token_count(self, record: SequenceRecord) -> int:
        """Tokens with KV at the revision."""
        return int(self._counts[record.owner]) if record.owner else record.token_count

    def keep(self, pages: Pages) -> None:
        """These pages are about to be overwritten in the mirror."""
        if self._is_kept is None:
            self._is_kept = np.zeros(self.page_count, np.bool_)
        pages = pages[(pages >= self._next_page) & ~self._is_kept[pages]]
        if len(pages):
            self._is_kept[pages] = True
            self._kept.append((pages, {name: plane[pages] for name, plane in self._planes.items()}))

    def take(self, count: int, names: Sequence[str]) -> dict[str, Plane]:
        """The next pages, at most so many, in the wanted planes. To be read at once: they may be views."""
        first, end = self._next_page, min(self._next_page + count, self.page_count)
        window = {name: self._planes[name][first:end] for name in names}
        if self._kept:
            window = {name: plane.copy() for name, plane in window.items()}
        for pages, values in self._kept:
            at = (pages >= first) & (pages < end)
            for name in names:
                window[name][pages[at] - first] = values[name][at]
        self._next_page = end
        return window

    @property
    def pages_left(self) -> int:
        """Pages that were not taken yet."""
        return self.page_count - self._next_page
