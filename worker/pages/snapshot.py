"""A frozen copy of the whole pool as of one page event, for readers on other threads.

Owns nothing. Made on the engine thread by copying columns: about 40 bytes a page, no object per page.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.pages.events import PageState
from worker.stats import SequenceView


@dataclass(frozen=True, slots=True)
class Planes:
    """Columns with one entry per page, the dummy page included."""

    states: bytes
    flags: bytes
    ref_counts: "array[int]"  # 'H'
    filled_slots: "array[int]"  # 'H': page_size where sealed, otherwise 0: only sequences know
    owners: "array[int]"  # 'H': the first since the page was unreferenced, 0: FREE
    hit_counts: "array[int]"  # 'H'
    parent_page_ids: "array[int]"  # 'I'
    born_ms: "array[int]"  # 'I'
    used_ms: "array[int]"  # 'I'
    fingerprints: "array[int]"  # 'Q'


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Planes with one entry per page, the dummy page included, as PageMap of cache.proto has them."""

    number: int  # last page event that it includes
    step: int
    time_us: int  # since the start of the epoch
    page_size: int
    states: bytes  # PageState
    flags: bytes  # PageFlag
    ref_counts: "array[int]"  # 'H'
    filled_slots: "array[int]"  # 'H'
    owners: "array[int]"  # 'H': of those that refer to the page the first that was let in; 0: none
    hit_counts: "array[int]"  # 'H'
    parent_page_ids: "array[int]"  # 'I'
    born_ms: "array[int]"  # 'I'
    used_ms: "array[int]"  # 'I'
    fingerprints: "array[int]"  # 'Q'
    counts: Mapping[PageState, int]
    sequences: tuple[SequenceView, ...]  # live, oldest first
    # References that no row has, by owner: what a step in flight still reads, and what is yet to be copied.
    held: Sequence[tuple[int, Sequence[int]]] = ()
