"""Ledger and book → what the feed carries: coalesced deltas, and snapshots in parts.

Plain arrays and views; the wire form is the publisher's. A delta has each changed page once, with what
it is now, so a reader may miss the states between but never the last one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from worker.readers.event_arrays import U8, U16, U32, U64
from worker.readers.ledger import Ledger
from worker.readers.sequences import SequenceBook
from worker.stats import PoolTotals, SequenceView

MAX_PAGES_PER_PART = 65_536
MAX_SEQUENCE_BYTES_PER_PART = 2_000_000
SEQUENCE_BYTES = 256  # of one sequence without its pages, generously


@dataclass(frozen=True, slots=True)
class PagePlanes:
    """What some pages are; one entry per page in each plane."""

    states: U8
    flags: U8
    refs: U16
    filled: U16
    owners: U16
    hits: U16
    parents: U32
    born_ms: U32
    used_ms: U32
    fingerprints: U64


@dataclass(frozen=True, slots=True)
class FeedDelta:
    """Everything that changed between two revisions."""

    base_number: int
    page_ids: U32  # ascending
    pages: PagePlanes
    sequences: Sequence[SequenceView]  # changed, with the pages from first_page_index on
    progress_owners: U16
    progress_tokens: U32
    ended_owners: Sequence[int]
    ended_waiting: Sequence[SequenceView]  # ended while they had no owner number

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        ended = self.ended_owners or self.ended_waiting
        return not (len(self.page_ids) or self.sequences or len(self.progress_owners) or ended)


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of the whole map; parts with pages come first."""

    first_page: int
    pages: PagePlanes | None
    sequences: Sequence[SequenceView]
    parts_left: int


def planes(ledger: Ledger, pages: "U32 | slice") -> PagePlanes:
    """All planes at some pages; with a slice they share the ledger's memory until its next fold."""
    return PagePlanes(
        states=ledger.states[pages],
        flags=ledger.flags_of(pages),
        refs=ledger.refs[pages],
        filled=ledger.filled[pages],
        owners=ledger.owners[pages],
        hits=ledger.hits[pages],
        parents=ledger.parents[pages],
        born_ms=ledger.born_ms[pages],
        used_ms=ledger.used_ms[pages],
        fingerprints=ledger.fingerprints[pages],
    )


def take_delta(ledger: Ledger, book: SequenceBook, base_number: int) -> FeedDelta:
    """What changed since the last call; the next call starts from here."""
    page_ids = np.flatnonzero(ledger.dirty).astype(np.uint32)
    ledger.dirty[page_ids] = False
    changes = book.take_changes()
    return FeedDelta(
        base_number=base_number,
        page_ids=page_ids,
        pages=planes(ledger, page_ids),
        sequences=changes.changed,
        progress_owners=changes.progress_owners,
        progress_tokens=changes.progress_tokens,
        ended_owners=changes.ended_owners,
        ended_waiting=changes.ended_waiting,
    )


def forget_changes(ledger: Ledger, book: SequenceBook) -> None:
    """Nobody listens: the next delta starts from here."""
    ledger.dirty[:] = False
    book.forget_changes()


def snapshot_parts(ledger: Ledger, book: SequenceBook) -> Iterator[SnapshotPart]:
    """The whole map as of the ledger's revision, in parts that any client can take."""
    total = len(ledger.states)
    starts = range(0, total, MAX_PAGES_PER_PART)
    groups = list(_grouped(book.views()))
    left = len(starts) + len(groups)
    for start in starts:
        left -= 1
        window = slice(start, min(start + MAX_PAGES_PER_PART, total))
        yield SnapshotPart(start, planes(ledger, window), (), left)
    for group in groups:
        left -= 1
        yield SnapshotPart(0, None, group, left)


def _grouped(views: Sequence[SequenceView]) -> Iterator[list[SequenceView]]:
    group: list[SequenceView] = []
    size = 0
    for view in views:
        needed = SEQUENCE_BYTES + 4 * len(view.page_ids)
        if group and size + needed > MAX_SEQUENCE_BYTES_PER_PART:
            yield group
            group, size = [], 0
        group.append(view)
        size += needed
    if group:
        yield group


def totals(ledger: Ledger) -> PoolTotals:
    """The pool as of the ledger's revision; states add up to all pages."""
    _, free, active, cached, pinned, reserved = ledger.state_counts.tolist()
    counts = ledger.event_counts
    return PoolTotals(
        revision=ledger.revision,
        step=ledger.step,
        free_pages=free,
        active_pages=active,
        cached_pages=cached,
        pinned_pages=pinned,
        reserved_pages=reserved,
        shared_pages=ledger.shared_pages,
        references=ledger.references,
        filled_slots=ledger.filled_slots,
        unfilled_slots=active * ledger.page_size - ledger.filled_slots,
        allocations_total=int(counts[1]),
        evictions_total=int(counts[6]),
        copies_total=int(counts[8]),
    )
