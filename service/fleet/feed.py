"""What a worker's page feed says, as plain values: planes, totals, sequences, deltas, snapshot parts, events.

Owns nothing and knows no wire: `page_codec.py` makes these, the mirrors read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Plane = npt.NDArray[np.unsignedinteger]
Pages = npt.NDArray[np.uint32]

PLANES: Mapping[str, str] = {
    "states": "<u1",
    "flags": "<u1",
    "ref_counts": "<u2",
    "filled_slots": "<u2",
    "owners": "<u2",
    "hit_counts": "<u2",
    "parent_page_ids": "<u4",
    "born_ms": "<u4",
    "used_ms": "<u4",
    "fingerprints": "<u8",
}
"""Planes of the page map, named as in cache.proto: one entry per page, 30 bytes in all."""

EVENT_PLANES: Mapping[str, str] = {
    "types": "<u1",
    "page_ids": "<u4",
    "owners": "<u2",
    "ref_counts": "<u2",
    "steps": "<u8",
    "times_us": "<u8",
    "other_page_ids": "<u4",
    "fingerprints": "<u8",
}
"""Planes of page events; steps and times are absolute here (microseconds since 1970)."""

NO_PAGE = 0xFFFFFFFF
NO_PAGES: Pages = np.zeros(0, dtype=np.uint32)
NO_OWNERS: Plane = np.zeros(0, dtype=np.uint16)
MAX_OWNER = 65_535


class OutOfStep(Exception):
    """What came does not fit what is held: a snapshot is needed."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A moment in the history of a pool."""

    epoch: int
    number: int  # of the last page event that is included
    step: int = 0


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """Totals at a revision, named as in cache.proto."""

    free_pages: int = 0
    active_pages: int = 0
    cached_pages: int = 0
    pinned_pages: int = 0
    reserved_pages: int = 0
    shared_pages: int = 0
    references: int = 0
    wasted_slots: int = 0
    allocations_total: int = 0
    evictions_total: int = 0
    copies_total: int = 0
    hit_tokens_total: int = 0
    miss_cold_tokens_total: int = 0
    miss_evicted_tokens_total: int = 0
    unaligned_tokens_total: int = 0
    preemptions_total: int = 0


SequenceKey = tuple[str, int, int]
"""Request id, choice, time of receipt: several services may use one request id."""


@dataclass(slots=True)
class SequenceRecord:
    """A live sequence. Never changed; not frozen only because that would triple the cost of making one."""

    request_id: str
    choice_index: int
    owner: int  # 0: it waits
    row: int | None
    state: int  # number of SequenceState
    pages: Pages  # in token order; never written to
    token_count: int  # when the record was made; the present one is in SequenceMirror.token_counts
    prompt_tokens: int = 0
    prefix: tuple[int, int, int, int] | None = None  # hit, miss_cold, miss_evicted, unaligned tokens
    priority: int = 0
    preemptions: int = 0
    receive_time_ns: int = 0
    wait_reason: int = 0  # number of WaitReason
    needed_pages: int = 0
    tenant: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> SequenceKey:
        """Identity over its whole life, preemptions included."""
        return self.request_id, self.choice_index, self.receive_time_ns

    def with_pages(self, pages: Pages) -> "SequenceRecord":
        """The same with other pages; written out, since dataclasses.replace takes four times as long."""
        return SequenceRecord(
            self.request_id,
            self.choice_index,
            self.owner,
            self.row,
            self.state,
            pages,
            self.token_count,
            self.prompt_tokens,
            self.prefix,
            self.priority,
            self.preemptions,
            self.receive_time_ns,
            self.wait_reason,
            self.needed_pages,
            self.tenant,
            self.labels,
        )


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """A sequence that ended, by name: readers may not have heard of its last owner number."""

    request_id: str
    choice_index: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class SequenceChange:
    """A sequence with its pages from `first_page_index` on; those before did not change."""

    record: SequenceRecord
    first_page_index: int = 0


@dataclass(frozen=True, slots=True)
class MapDelta:
    """A message of the feed: everything that changed between two revisions, each thing once."""

    base_number: int
    revision: Revision
    observe_time_ns: int
    totals: PoolTotals
    page_ids: Pages = field(default_factory=lambda: NO_PAGES)  # ascending
    planes: Mapping[str, Plane] = field(default_factory=dict)  # one entry per page id
    sequences: Sequence[SequenceChange] = ()
    progress_owners: Plane = field(default_factory=lambda: NO_OWNERS)
    progress_tokens: Pages = field(default_factory=lambda: NO_PAGES)
    # Ends come before `sequences`: names and owner numbers may have been given again.
    ended_owners: Sequence[int] = ()
    ended: Sequence[EndedSequence] = ()  # at least those that have no owner number


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of the whole map, pages first. The last one has totals."""

    revision: Revision
    parts_left: int
    first_page: int = 0
    planes: Mapping[str, Plane] = field(default_factory=dict)  # empty: sequences only
    sequences: Sequence[SequenceChange] = ()
    totals: PoolTotals | None = None
    observe_time_ns: int = 0


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Page events first_number, first_number + 1, ...: entry i of every plane belongs together."""

    first_number: int
    planes: Mapping[str, Plane]  # by EVENT_PLANES
    started: Sequence[SequenceRecord] = ()  # got their owner number within these events
    ended_owners: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.planes["types"])

    @property
    def last_number(self) -> int:
        """Number of the last event; first_number - 1 when there is none."""
        return self.first_number + len(self) - 1
