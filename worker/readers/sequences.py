"""The book of live sequences: their pages and token counts as of the ledger's revision.

Folds the views that the engine hands over. Owns what changed since the last delta. Token counts of
running sequences stand in planes by owner number, so that the turn of a full batch is a few array
operations. Holds no scheduler.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from worker.ids import PageId, SequenceId
from worker.stats import Growth, SequenceView

NUM_OWNERS = 1 << 16

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Entry:
    """One live sequence; its pages stand in `pages`, not in the view."""

    view: SequenceView  # as it came last
    pages: "array[int]"
    first_changed: int | None = 0  # page index from which readers of deltas are behind; None: they are not
    told_owner: int | None = None  # owner number under which readers of deltas know it; None: not at all


@dataclass(frozen=True, slots=True)
class BookChanges:
    """To be applied in this order: ended owners first, since their numbers are used again."""

    ended_owners: Sequence[int]
    ended_waiting: Sequence[SequenceView]
    changed: Sequence[SequenceView]
    progress_owners: U16  # token counts of sequences that are not in `changed`
    progress_tokens: U32


class Fills:
    """How many tokens some pages hold now; of several entries for one page the last counts."""

    def __init__(self) -> None:
        self.pages = array("I")
        self.slots = array("H")

    def add(self, pages: "array[int]", first: int, token_count: int, page_size: int) -> None:
        """The pages of one sequence from number `first` on."""
        count = len(pages) - first
        if count <= 0:
            return
        self.pages.extend(pages[first:])
        whole = min(count, max(0, token_count // page_size - first))
        self.slots.extend((page_size,) * whole)
        if whole < count:
            self.slots.append(max(0, token_count - (first + whole) * page_size))
            self.slots.extend((0,) * (count - whole - 1))


class SequenceBook:
    """Live sequences by id and by owner number."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._entries: dict[SequenceId, Entry] = {}
        self._by_owner: dict[int, Entry] = {}
        self._tokens: U32 = np.zeros(NUM_OWNERS, dtype=np.uint32)  # by owner
        self._has_progressed = np.zeros(NUM_OWNERS, dtype=np.bool_)  # since the last delta, by owner
        self._ended_owners: list[int] = []  # owner numbers given up since the last delta
        self._ended_waiting: list[SequenceView] = []  # ended since then without an owner number

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def clear(self) -> None:
        """Forgets everything: a snapshot follows."""
        self._entries.clear()
        self._by_owner.clear()
        self._has_progressed[:] = False
        self._ended_owners.clear()
        self._ended_waiting.clear()

    def get(self, sequence_id: SequenceId) -> Entry | None:
        """A live sequence."""
        return self._entries.get(sequence_id)

    def change(self, view: SequenceView, fills: Fills) -> None:
        """A sequence is new, or its pages or state changed; says how its pages are filled."""
        entry = self._entries.get(view.sequence_id)
        if entry is None:
            entry = self._entries[view.sequence_id] = Entry(view, array("I"))
        pages, first, owner = entry.pages, view.first_page_index, view.owner
        assert first <= len(pages), (view, len(pages))
        before = self.token_count(entry)
        if entry.view.owner and entry.view.owner != owner:
            self._leave(entry)  # preempted: readers drop what they have under the old number
            entry.first_changed = 0
        behind = len(pages) if entry.first_changed is None else entry.first_changed
        del pages[first:]
        pages.extend(view.page_ids)
        entry.first_changed = min(behind, first)
        entry.view = view
        if owner:
            self._by_owner[owner] = entry
            self._tokens[owner] = view.token_count
        fills.add(pages, min(first, before // self._page_size), view.token_count, self._page_size)

    def grow(self, growth: Growth) -> None:
        """Running sequences got pages; how full they are, `progress` says.

        Owners that are not known are left out: they ended since, or their first view follows.
        """
        by_owner = self._by_owner
        for owner, index, page in zip(growth.owners, growth.page_indexes, growth.page_ids, strict=True):
            entry = by_owner.get(owner)
            if entry is None:
                continue
            pages = entry.pages
            if index < len(pages):
                pages[index] = page
            else:
                assert index == len(pages), (owner, index, len(pages))
                pages.append(page)
            if entry.first_changed is None or index < entry.first_changed:
                entry.first_changed = index

    def progress(self, owners: "array[int]", tokens: "array[int]", fills: Fills) -> None:
        """Running sequences have KV of so many tokens now."""
        if not owners:
            return
        at, now = np.frombuffer(owners, np.uint16), np.frombuffer(tokens, np.uint32)
        before = self._tokens[at]
        moved = np.flatnonzero(before != now)
        self._tokens[at] = now
        self._has_progressed[at[moved]] = True
        page_size, by_owner = self._page_size, self._by_owner
        first_pages = (np.minimum(before[moved], now[moved]) // page_size).tolist()
        last_pages = (now[moved].astype(np.int64) - 1) // page_size
        fill = now[moved] - last_pages * page_size
        columns = zip(at[moved].tolist(), first_pages, last_pages.tolist(), fill.tolist(), strict=True)
        for owner, first, last, slots in columns:
            entry = by_owner.get(owner)
            if entry is None or last >= len(entry.pages):
                continue
            if first == last:
                fills.pages.append(entry.pages[last])
                fills.slots.append(slots)
            else:
                fills.add(entry.pages, first, int(self._tokens[owner]), page_size)

    def end(self, sequence_id: SequenceId) -> Entry | None:
        """A sequence is gone; None: it was not known."""
        entry = self._entries.pop(sequence_id, None)
        if entry is not None:
            self._leave(entry)
            if entry.told_owner == 0:  # told while it waited, so readers know it by name only
                self._ended_waiting.append(entry.view)
        return entry

    def _leave(self, entry: Entry) -> None:
        owner = entry.view.owner
        if owner and self._by_owner.get(owner) is entry:
            del self._by_owner[owner]
            self._has_progressed[owner] = False
            self._ended_owners.append(owner)

    def token_count(self, entry: Entry) -> int:
        """Tokens with KV of a live sequence."""
        owner = entry.view.owner
        if owner and self._by_owner.get(owner) is entry:
            return int(self._tokens[owner])
        return entry.view.token_count

    def take_changes(self) -> BookChanges:
        """What changed since the last call."""
        changed = []
        for entry in self._entries.values():
            if entry.first_changed is not None:
                changed.append(self._view(entry, entry.first_changed))
                entry.first_changed, entry.told_owner = None, entry.view.owner
                self._has_progressed[entry.view.owner] = False
        owners = np.flatnonzero(self._has_progressed).astype(np.uint16)
        self._has_progressed[owners] = False
        tokens = self._tokens[owners]
        changes = BookChanges(self._ended_owners, self._ended_waiting, changed, owners, tokens)
        self._ended_owners, self._ended_waiting = [], []
        return changes

    def forget_changes(self) -> None:
        """As take_changes, for nobody."""
        for entry in self._entries.values():
            entry.first_changed, entry.told_owner = None, entry.view.owner
        self._has_progressed[:] = False
        self._ended_owners, self._ended_waiting = [], []

    def views(self) -> list[SequenceView]:
        """All of them with all their pages, in the order in which they came."""
        return [self._view(entry, 0) for entry in self._entries.values()]

    def _view(self, entry: Entry, first: int) -> SequenceView:
        """Written out: dataclasses.replace costs ten times as much, and a full batch is 256 of them."""
        view = entry.view
        return SequenceView(
            view.sequence_id,
            view.request_id,
            view.choice_index,
            view.owner,
            view.row,
            view.state,
            cast("tuple[PageId, ...]", tuple(entry.pages[first:])),
            first,
            self.token_count(entry),
            view.prompt_tokens,
            view.prefix,
            view.priority,
            view.preemptions,
            view.receive_time_ns,
            view.wait_reason,
            view.needed_pages,
            view.tenant,
            view.labels,
        )
