"""What one watcher of the page map has not been told yet: merged, bounded, however slow it reads.

Owns a byte per page and the names of changed sequences. Pure, on the event loop's thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.fleet.feed import (
    MAX_OWNER,
    EndedSequence,
    Pages,
    Plane,
    PoolTotals,
    Revision,
    SequenceKey,
    SequenceRecord,
)
from service.fleet.page_mirror import FrozenMap, MirrorReader, PageMirror, Standing
from service.fleet.sequence_mirror import SequenceNews

MAX_NAMES = 65_536
"""Changed or ended sequences that are remembered for one watcher; past it a snapshot is cheaper."""


@dataclass(frozen=True, slots=True)
class MapChange:
    """Everything between two revisions that a watcher is told, with the values as they are now."""

    base_number: int
    revision: Revision
    observe_time_ns: int
    totals: PoolTotals
    page_ids: Pages  # ascending
    planes: dict[str, Plane]  # those that are wanted, one entry per page id
    # Each with the first page index that is new to the watcher, and its tokens with KV.
    sequences: Sequence[tuple[SequenceRecord, int, int]]
    progress_owners: Plane
    progress_tokens: Pages
    ended_owners: Plane  # before `sequences`: a number may have been given again
    ended: Sequence[EndedSequence]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (
            len(self.page_ids)
            or self.sequences
            or len(self.progress_owners)
            or len(self.ended_owners)
            or self.ended
        )


class PageWatch(MirrorReader):
    """One watcher's place in the history of a mirror. `wake` is called whenever there may be news."""

    def __init__(self, mirror: PageMirror, planes: Sequence[str], wake: Callable[[], None]) -> None:
        self._mirror = mirror
        self._planes = planes
        self._wake = wake
        self._number = 0
        self._dirty: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # by page
        self._progressed: npt.NDArray[np.bool_] = np.zeros(MAX_OWNER + 1, np.bool_)  # by owner
        self._first_changed: dict[SequenceKey, int] = {}
        self._ended_owners: set[int] = set()
        self._ended: list[EndedSequence] = []
        self.needs_snapshot = True
        self.saw_new_epoch = False
        self.is_lagging = False  # the snapshot is needed because the watcher was too slow
        mirror.readers.append(self)

    @property
    def is_current(self) -> bool:
        """Whether the mirror can be told from: while it has missed something, watchers hear nothing."""
        return self._mirror.standing is Standing.CURRENT

    def close(self) -> None:
        """Follows no more. Idempotent."""
        if self in self._mirror.readers:
            self._mirror.readers.remove(self)

    # MirrorReader

    def replaced(self, *, is_new_epoch: bool) -> None:
        """All that was collected is worthless."""
        self.needs_snapshot = True
        self.saw_new_epoch |= is_new_epoch
        self._reset()
        self._wake()

    def changed(self, page_ids: Pages, news: SequenceNews) -> None:
        """Adds to what is to be told."""
        if not self.needs_snapshot:
            self._collect(page_ids, news)
        self._wake()

    def abandoned(self) -> None:
        """There is an end to tell."""
        self._wake()

    # What to tell

    def begin(self) -> FrozenMap:
        """Starts from a snapshot: the map of now, and only what changes after it."""
        assert self.is_current, "a snapshot of a map that is not whole"
        self.needs_snapshot = self.saw_new_epoch = self.is_lagging = False
        self._reset()
        return self._mirror.freeze()

    def resume(self, after: Revision) -> bool:
        """Starts from a revision that the watcher has; False: it must start from a snapshot."""
        if not self.is_current or after.epoch != self._mirror.revision.epoch:
            return False
        missed = self._mirror.changes_since(after.number)
        if missed is None:
            return False
        self._reset()
        self.needs_snapshot = False
        self._number = after.number
        self._collect(*missed)
        return True

    def take(self) -> MapChange:
        """Everything since the last call."""
        mirror = self._mirror
        page_ids = np.flatnonzero(self._dirty).astype(np.uint32)
        self._dirty[page_ids] = False
        sequences = self._take_sequences()
        owners = np.flatnonzero(self._progressed).astype(np.uint16)
        self._progressed[owners] = False
        change = MapChange(
            base_number=self._number,
            revision=mirror.revision,
            observe_time_ns=mirror.observe_time_ns,
            totals=mirror.totals,
            page_ids=page_ids,
            planes={name: mirror.planes[name][page_ids] for name in self._planes},
            sequences=sequences,
            progress_owners=owners,
            progress_tokens=mirror.sequences.token_counts[owners],
            ended_owners=np.array(sorted(self._ended_owners), dtype=np.uint16),
            ended=self._ended,
        )
        self._number = mirror.revision.number
        self._ended_owners, self._ended = set(), []
        return change

    def skip(self) -> None:
        """Drops what there is to tell."""
        self._reset()

    def _take_sequences(self) -> list[tuple[SequenceRecord, int, int]]:
        book = self._mirror.sequences
        found = []
        for key, first in self._first_changed.items():
            record = book.records.get(key)
            if record is not None:  # else it ended since
                found.append((record, min(first, len(record.pages)), book.token_count(record)))
                self._progressed[record.owner] = False  # told with the record
        self._first_changed = {}
        return found

    def _collect(self, page_ids: Pages, news: SequenceNews) -> None:
        self._dirty[page_ids] = True
        self._ended_owners.update(news.left_owners)
        self._progressed[news.left_owners] = False
        self._ended.extend(news.ended)
        for key, first in news.first_changed.items():
            self._first_changed[key] = min(first, self._first_changed.get(key, first))
        self._progressed[news.progress_owners] = True
        self._bound()

    def _bound(self) -> None:
        """A watcher that reads nothing costs no more than its bytes and so many names."""
        if len(self._first_changed) > MAX_NAMES:
            live = self._mirror.sequences.records
            self._first_changed = {key: first for key, first in self._first_changed.items() if key in live}
        if len(self._ended) > MAX_NAMES or len(self._first_changed) > MAX_NAMES:
            self.needs_snapshot = self.is_lagging = True
            self._reset()

    def _reset(self) -> None:
        self._number = self._mirror.revision.number
        self._dirty = np.zeros(self._mirror.page_count, np.bool_)
        self._progressed[:] = False
        self._first_changed = {}
        self._ended_owners, self._ended = set(), []
