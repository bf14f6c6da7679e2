"""The sequences that take one token in every step, as columns.

Owns who is in the batch, at which position each stands, and which of them touch a page edge or their
last token in a given step. Knows nothing of pages or outputs.

Every member advances by one token in every step that is planned, without exception; so the step in
which it needs a page is known when it joins, and a step costs O(members that touch an edge) plus a
few list operations. Columns handed to a step are never changed: they are copied before the next change.
"""

from array import array
from collections import Counter
from collections.abc import Callable, MutableSequence
from typing import Any, NamedTuple

from worker.ids import SequenceId
from worker.pages.violation import Violation
from worker.scheduling.sequence import Place, Sequence


class SourceGroup(NamedTuple):
    """The members whose output goes to one service."""

    source: str
    indexes: list[int] | None  # in the batch; None: all of it
    sequence_ids: "array[int]"  # 'Q'


class DecodeSpans(NamedTuple):
    """The decode part of one step; entry i of the columns belongs together. Never changed."""

    sequences: list[Sequence]
    sequence_ids: list[SequenceId]
    appends: list[Callable[[int], None]]
    rows: "array[int]"  # 'i'
    starts: "array[int]"  # 'i'
    ends: "array[int]"  # 'i': starts + 1
    filling: list[Sequence]  # their page is full once this step is computed
    last: list[Sequence]  # their last token by length; no longer in the batch
    last_at: list[int]  # where those stand in the columns
    groups: list[SourceGroup]
    stop_ids: frozenset[int]  # of all members together


class DecodeBatch:
    """Members of the next step."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tick = 0  # steps planned
        self.sequences: list[Sequence] = []
        self._sequence_ids: list[SequenceId] = []
        self._appends: list[Callable[[int], None]] = []
        self._rows = array("i")
        self.starts = array("i")  # position that the next step computes
        self._shared = False  # whether a step holds these columns
        # By tick modulo page size: members that need a page for that step. Dicts: in order, O(1) removal.
        self._edges: list[dict[Sequence, None]] = [{} for _ in range(page_size)]
        self._lasts: dict[int, dict[Sequence, None]] = {}  # by tick: members for whom it is the last
        self._sources: Counter[str] = Counter()
        self._stop_counts: Counter[int] = Counter()
        self._groups: list[SourceGroup] | None = None  # None: to be computed
        self._owners: array[int] | None = None  # likewise
        self._stop_ids: frozenset[int] | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence, start: int) -> None:
        """Joins from the next step on, computing position ``start`` first."""
        self._own()
        sequence.place = Place.BATCH
        sequence.batch_index = len(self.sequences)
        sequence.edge = (self._tick - start) % self._page_size
        sequence.last_tick = self._tick + sequence.limit - 2 - start
        assert sequence.last_tick >= self._tick, f"{sequence} has no token left at {start}"
        self._edges[sequence.edge][sequence] = None
        self._lasts.setdefault(sequence.last_tick, {})[sequence] = None
        self.sequences.append(sequence)
        self._sequence_ids.append(sequence.id)
        self._appends.append(sequence.append)
        self._rows.append(sequence.row)
        self.starts.append(start)
        self._sources[sequence.request.spec.source] += 1
        for token_id in sequence.stop_ids:
            if not self._stop_counts[token_id]:
                self._stop_ids = None
            self._stop_counts[token_id] += 1

    def remove(self, sequence: Sequence) -> None:
        """Leaves; the last member takes its index."""
        self._own()
        at = sequence.batch_index
        assert self.sequences[at] is sequence, f"{sequence} is not in the batch"
        sequence.num_launched = self.starts[at]
        columns: list[MutableSequence[Any]] = [
            self.sequences,
            self._sequence_ids,
            self._appends,
            self._rows,
            self.starts,
        ]
        for column in columns:
            column[at] = column[-1]
            del column[-1]
        if at < len(self.sequences):
            self.sequences[at].batch_index = at
        sequence.batch_index = -1
        del self._edges[sequence.edge][sequence]
        self._forget_last(sequence)
        self._forget_names(sequence)

    def _forget_last(self, sequence: Sequence) -> None:
        lasts = self._lasts.get(sequence.last_tick)
        if lasts is not None and sequence in lasts:
            del lasts[sequence]
            if not lasts:
                del self._lasts[sequence.last_tick]

    def _forget_names(self, sequence: Sequence) -> None:
        source = sequence.request.spec.source
        self._sources[source] -= 1
        if not self._sources[source]:
            del self._sources[source]
        for token_id in sequence.stop_ids:
            self._stop_counts[token_id] -= 1
            if not self._stop_counts[token_id]:
                del self._stop_counts[token_id]
                self._stop_ids = None

    def _own(self) -> None:
        """Before a change: columns that a step holds are replaced by copies."""
        self._groups = self._owners = None
        if self._shared:
            self._shared = False
            self.sequences = self.sequences[:]
            self._sequence_ids = self._sequence_ids[:]
            self._appends = self._appends[:]
            self._rows = self._rows[:]
            self.starts = self.starts[:]

    def at_edge(self) -> list[Sequence]:
        """Members that need a page for the next step: their position is the first of a page."""
        return list(self._edges[self._tick % self._page_size])

    @property
    def owners(self) -> "array[int]":
        """'H': owner numbers of the members, beside ``starts``; not to be changed."""
        if self._owners is None:
            self._owners = array("H", [sequence.owner for sequence in self.sequences])
        return self._owners

    @property
    def num_at_edge(self) -> int:
        """How many those are."""
        return len(self._edges[self._tick % self._page_size])

    def advance(self) -> DecodeSpans:
        """The spans of the next step; all members move on, those that are done by length leave."""
        starts, last = self.starts, list(self._lasts.pop(self._tick, ()))
        spans = DecodeSpans(
            sequences=self.sequences,
            sequence_ids=self._sequence_ids,
            appends=self._appends,
            rows=self._rows,
            starts=starts,
            ends=array("i", [start + 1 for start in starts]),
            filling=list(self._edges[(self._tick + 1) % self._page_size]),
            last=last,
            last_at=[sequence.batch_index for sequence in last],
            groups=self._source_groups(),
            stop_ids=self._all_stop_ids(),
        )
        self._tick += 1
        self.starts = spans.ends
        self._shared = True
        for sequence in last:
            self.remove(sequence)
            sequence.place = Place.LAST
        return spans

    def _source_groups(self) -> list[SourceGroup]:
        if self._groups is None:
            if len(self._sources) == 1:
                ids = array("Q", self._sequence_ids)
                self._groups = [SourceGroup(next(iter(self._sources)), None, ids)]
            else:
                self._groups = group_by_source(self.sequences)
        return self._groups

    def _all_stop_ids(self) -> frozenset[int]:
        if self._stop_ids is None:
            self._stop_ids = frozenset(self._stop_counts)
        return self._stop_ids

    def check(self) -> list[Violation]:
        """What does not hold between the columns and the calendars."""
        found = []
        for at, sequence in enumerate(self.sequences):
            start = self.starts[at]
            stands = (sequence.batch_index, sequence.place.name)
            if stands != (at, Place.BATCH.name):
                subject = f"index and place of {sequence.name}"
                found.append(Violation("page_table", subject, (at, Place.BATCH.name), stands))
            edge = self._edges[(self._tick - start) % self._page_size]
            last = self._lasts.get(self._tick + sequence.limit - 2 - start, {})
            for which, listed in (("page edge", edge), ("last step", last)):
                if sequence not in listed:
                    subject = f"{sequence.name} at position {start} in the list of its {which}"
                    found.append(Violation("page_table", subject, True, False))
        for which, lists in (("page edges", self._edges), ("last steps", self._lasts.values())):
            if (number := sum(map(len, lists))) != len(self):
                found.append(Violation("page_table", f"sequences in lists of {which}", len(self), number))
        return found


def group_by_source(sequences: list[Sequence]) -> list[SourceGroup]:
    """Sequences by service, in order."""
    by_source: dict[str, list[int]] = {}
    for at, sequence in enumerate(sequences):
        by_source.setdefault(sequence.request.spec.source, []).append(at)
    return [
        SourceGroup(source, indexes, array("Q", [sequences[at].id for at in indexes]))
        for source, indexes in by_source.items()
    ]
