"""The book of live sequences: their pages and token counts as of the ledger's revision.

Folds the views that the engine hands over. Owns what changed since the last delta. Holds no scheduler.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from worker.ids import Owner, PageId, SequenceId
from worker.stats import SequenceView


@dataclass(slots=True)
class Entry:
    """One live sequence; `view.page_ids` is empty, the pages stand in `pages`."""

    view: SequenceView
    pages: "array[int]"
    token_count: int
    first_changed: int | None = 0  # page index from which readers of deltas are behind; None: they are not


@dataclass(frozen=True, slots=True)
class BookChanges:
    """To be applied in this order: ended owners first, since their numbers are used again."""

    changed: Sequence[SequenceView]
    progress: Sequence[tuple[Owner, int]]  # token counts of sequences that are not in `changed`
    ended_owners: Sequence[Owner]
    ended_waiting: Sequence[SequenceView]


class SequenceBook:
    """Live sequences by id and by owner."""

    def __init__(self) -> None:
        self._entries: dict[SequenceId, Entry] = {}
        self._by_owner: dict[Owner, Entry] = {}
        self._ended_owners: list[Owner] = []  # owner numbers given up since the last delta
        self._ended_waiting: list[SequenceView] = []  # ended since then without an owner number
        self._progressed: set[Owner] = set()  # token counts that changed since the last delta

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def clear(self) -> None:
        """Forgets everything: a snapshot follows."""
        self._entries.clear()
        self._by_owner.clear()
        self._ended_owners.clear()
        self._ended_waiting.clear()
        self._progressed.clear()

    def owner(self, owner: int) -> Entry | None:
        """The sequence that has an owner number now."""
        return self._by_owner.get(Owner(owner))

    def get(self, sequence_id: SequenceId) -> Entry | None:
        """A live sequence."""
        return self._entries.get(sequence_id)

    def change(self, view: SequenceView) -> Entry:
        """A sequence is new, or its pages or state changed."""
        entry = self._entries.get(view.sequence_id)
        if entry is None:
            entry = self._entries[view.sequence_id] = Entry(view, array("I"), 0)
        assert view.first_page_index <= len(entry.pages), (view, len(entry.pages))
        if entry.view.owner and entry.view.owner != view.owner:
            self._leave(entry)  # preempted: readers drop what they have under the old number
            entry.first_changed = 0
        del entry.pages[view.first_page_index :]
        entry.pages.extend(view.page_ids)
        behind = len(entry.pages) if entry.first_changed is None else entry.first_changed
        entry.first_changed = min(behind, view.first_page_index)
        entry.view = replace(view, page_ids=(), first_page_index=0)
        entry.token_count = view.token_count
        if view.owner:
            self._by_owner[view.owner] = entry
        return entry

    def progress(self, owner: int, token_count: int) -> Entry | None:
        """A running sequence has KV of so many tokens now."""
        entry = self._by_owner.get(Owner(owner))
        if entry is not None and entry.token_count != token_count:
            entry.token_count = token_count
            self._progressed.add(Owner(owner))
        return entry

    def end(self, sequence_id: SequenceId) -> Entry | None:
        """A sequence is gone; None: it was not known."""
        entry = self._entries.pop(sequence_id, None)
        if entry is not None:
            self._leave(entry)
            if not entry.view.owner and entry.first_changed is None:
                self._ended_waiting.append(entry.view)
        return entry

    def _leave(self, entry: Entry) -> None:
        owner = entry.view.owner
        if owner and self._by_owner.get(owner) is entry:
            del self._by_owner[owner]
            self._progressed.discard(owner)
            self._ended_owners.append(owner)

    def take_changes(self) -> BookChanges:
        """What changed since the last call."""
        changed = []
        for entry in self._entries.values():
            if entry.first_changed is not None:
                changed.append(_view(entry, entry.first_changed))
                entry.first_changed = None
                self._progressed.discard(entry.view.owner)
        progress = [(owner, self._by_owner[owner].token_count) for owner in sorted(self._progressed)]
        changes = BookChanges(changed, progress, self._ended_owners, self._ended_waiting)
        self._ended_owners, self._ended_waiting = [], []
        self._progressed.clear()
        return changes

    def views(self) -> list[SequenceView]:
        """All of them with all their pages, in the order in which they came."""
        return [_view(entry, 0) for entry in self._entries.values()]


def _view(entry: Entry, first: int) -> SequenceView:
    pages = tuple(map(PageId, entry.pages[first:]))
    return replace(entry.view, page_ids=pages, first_page_index=first, token_count=entry.token_count)


def pages_between(before: int, after: int, page_size: int) -> Iterable[int]:
    """Indexes of the pages whose filling differs between two token counts of one sequence."""
    low, high = sorted((before, after))
    return range(low // page_size, -(-high // page_size))
