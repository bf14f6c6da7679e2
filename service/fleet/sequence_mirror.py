"""A copy of one worker's live sequences: their pages, their token counts, who has which owner number.

Owns the records and what ended lately. Part of the page mirror; pure, on the event loop's thread.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.fleet.feed import (
    MAX_OWNER,
    NO_OWNERS,
    NO_PAGES,
    EndedSequence,
    MapDelta,
    OutOfStep,
    Pages,
    Plane,
    SequenceChange,
    SequenceKey,
    SequenceRecord,
)

ENDS_REMEMBERED = 4_096
"""Ends of sequences that a reader can catch up on when it comes back."""


@dataclass(slots=True)
class SequenceNews:
    """What a delta meant for sequences, for those who follow. Ends come before changes."""

    left_owners: list[int] = field(default_factory=list)  # nobody's now, or somebody else's than before
    ended: list[EndedSequence] = field(default_factory=list)
    first_changed: dict[SequenceKey, int] = field(default_factory=dict)  # first page index that is new
    progress_owners: Plane = field(default_factory=lambda: NO_OWNERS)


@dataclass(frozen=True, slots=True)
class _End:
    number: int  # revision
    owner: int  # number that was left; 0: none
    ended: EndedSequence | None  # None: the sequence goes on without the number


class SequenceMirror:
    """Live sequences by identity, oldest first, and by owner."""

    def __init__(self) -> None:
        self.records: dict[SequenceKey, SequenceRecord] = {}
        self.token_counts: Pages = np.zeros(MAX_OWNER + 1, np.uint32)  # by owner: tokens with KV
        self._keys: dict[int, SequenceKey] = {}  # by owner
        self._changed_at: dict[SequenceKey, int] = {}  # revision number
        self._ends: deque[_End] = deque()
        self._known_from = 0  # ends at this number and later are all in _ends

    def __len__(self) -> int:
        return len(self.records)

    def by_owner(self, owner: int) -> SequenceRecord | None:
        """The sequence that has an owner number now."""
        key = self._keys.get(owner)
        return self.records[key] if key is not None else None

    def token_count(self, record: SequenceRecord) -> int:
        """Tokens with KV, now."""
        return int(self.token_counts[record.owner]) if record.owner else record.token_count

    def replace(self, changes: Iterable[SequenceChange], number: int) -> None:
        """Starts anew from a snapshot at a revision."""
        self.records, self._keys, self._changed_at = {}, {}, {}
        self._ends.clear()
        self._known_from = number
        for change in changes:
            self._change(change, number, SequenceNews())

    def apply(self, delta: MapDelta) -> SequenceNews:
        """Takes what a delta says of sequences. Raises OutOfStep where pages are missing."""
        number = delta.revision.number
        news = SequenceNews(progress_owners=delta.progress_owners)
        for owner in delta.ended_owners:
            if (key := self._keys.get(owner)) is not None:
                self._end(key, number, news)
        for ended in delta.ended:
            self._end_named(ended, number, news)
        for change in delta.sequences:
            self._change(change, number, news)
        self.token_counts[delta.progress_owners] = delta.progress_tokens
        return news

    def since(self, number: int) -> SequenceNews | None:
        """All that happened at a revision or later, for a reader that comes back; None: too long ago."""
        if number < self._known_from:
            return None
        ends = [end for end in self._ends if end.number >= number]
        return SequenceNews(
            left_owners=[end.owner for end in ends if end.owner],
            ended=[end.ended for end in ends if end.ended is not None],
            first_changed={key: 0 for key, changed in self._changed_at.items() if changed >= number},
            progress_owners=np.fromiter(self._keys, np.uint16, len(self._keys)),
        )

    def _change(self, change: SequenceChange, number: int, news: SequenceNews) -> None:
        record, first = change.record, change.first_page_index
        known = self.records.get(record.key)
        if first:
            record = record.with_pages(_extended(known, first, record))
        if known is not None and known.owner and known.owner != record.owner:
            self._leave(known.owner, number, news)
        if record.owner:
            self._take_owner(record, number, news)
        self.records[record.key] = record
        self._changed_at[record.key] = number
        news.first_changed[record.key] = min(first, news.first_changed.get(record.key, first))

    def _take_owner(self, record: SequenceRecord, number: int, news: SequenceNews) -> None:
        before = self._keys.get(record.owner)
        if before is not None and before != record.key:
            self._end(before, number, news)  # its end was in a delta that a snapshot overtook
        self._keys[record.owner] = record.key
        self.token_counts[record.owner] = record.token_count

    def _end_named(self, ended: EndedSequence, number: int, news: SequenceNews) -> None:
        named = (ended.request_id, ended.choice_index)
        found = [key for key in self.records if key[:2] == named]
        # Of two services' requests with one id the one that waits is meant: others end by owner number.
        for key in [each for each in found if not self.records[each].owner] or found:
            self._end(key, number, news)

    def _end(self, key: SequenceKey, number: int, news: SequenceNews) -> None:
        record = self.records.pop(key)
        del self._changed_at[key]
        ended = EndedSequence(record.request_id, record.choice_index, record.tenant)
        news.ended.append(ended)
        if record.owner:
            del self._keys[record.owner]
            news.left_owners.append(record.owner)
        self._remember(_End(number, record.owner, ended))

    def _leave(self, owner: int, number: int, news: SequenceNews) -> None:
        del self._keys[owner]
        news.left_owners.append(owner)
        self._remember(_End(number, owner, None))

    def _remember(self, end: _End) -> None:
        if len(self._ends) == ENDS_REMEMBERED:
            self._known_from = self._ends.popleft().number + 1
        self._ends.append(end)


def holders(records: Sequence[SequenceRecord], page: int, most: int) -> list[SequenceRecord]:
    """Sequences that have a page, at most so many. Costs a search of every page list until they are found."""
    found: list[SequenceRecord] = []
    for record in records:
        if len(found) == most:
            break
        if len(record.pages) and bool((record.pages == page).any()):
            found.append(record)
    return found


def _extended(known: SequenceRecord | None, first: int, record: SequenceRecord) -> Pages:
    kept = known.pages[:first] if known is not None else NO_PAGES
    if len(kept) < first:
        raise OutOfStep(f"sequence {record.key}: {first} pages are to be kept, {len(kept)} are known")
    return np.concatenate([kept, record.pages])
