"""The last page events of one worker, by number without gaps.

Owns preallocated columns. Pure, on the event loop's thread.
"""

from collections import deque

import numpy as np

from service.fleet.feed import EVENT_PLANES, EventColumns, OutOfStep, Plane, SequenceRecord

CAPACITY = 65_536
"""Events that are kept: 2.5 MB."""

MAX_SPAN_US = np.uint64(0xFFFFFFFF)
"""From the first to the last event of one answer: they are told as offsets of 32 bits."""


class EventRing:
    """Events `first_number` .. `last_number`; empty while first_number > last_number."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.last_number = 0
        self._size = 0
        self._columns: dict[str, Plane] = {
            name: np.zeros(capacity, kind) for name, kind in EVENT_PLANES.items()
        }
        self.named_from = 1  # events from this number on came with the starts of their sequences
        # Starts with the first number of their batch, ends with the last. Each has an event of its own, so
        # there are never more than events, whatever a worker that is broken sends without any.
        self._started: deque[tuple[int, SequenceRecord]] = deque(maxlen=capacity)
        self._ended: deque[tuple[int, int]] = deque(maxlen=capacity)

    @property
    def first_number(self) -> int:
        """Number of the oldest event."""
        return self.last_number - self._size + 1

    def __len__(self) -> int:
        return self._size

    def restart(self, last_number: int) -> None:
        """Forgets everything; the next event is the one after `last_number`."""
        self.last_number, self._size = last_number, 0
        self.named_from = last_number + 1
        self._started.clear()
        self._ended.clear()

    def append(self, events: EventColumns) -> None:
        """Adds events that follow the last one; those it has are skipped. OutOfStep: some are missing."""
        if events.first_number > self.last_number + 1:
            raise OutOfStep(f"event {events.first_number} follows {self.last_number}")
        skip = self.last_number + 1 - events.first_number
        count = len(events) - skip
        if count > 0:
            skip += max(0, count - self.capacity)  # only the newest fit
            numbers = np.arange(events.first_number + skip, events.last_number + 1)
            for name, column in self._columns.items():
                column[numbers % self.capacity] = events.planes[name][skip:]
            self._size = min(self._size + count, self.capacity)
            self.last_number = events.last_number
        self._started.extend((events.first_number, record) for record in events.started)
        self._ended.extend((events.last_number, owner) for owner in events.ended_owners)
        self._forget_before(self.first_number)

    def after(self, number: int, limit: int = CAPACITY) -> EventColumns | None:
        """Events after a number, at most so many, and of MAX_SPAN_US; None: some are no longer there."""
        if number + 1 < self.first_number or number > self.last_number:
            return None
        last = self._last_in_span(number, min(self.last_number, number + limit))
        numbers = np.arange(number + 1, last + 1)
        return EventColumns(
            first_number=number + 1,
            planes={name: column[numbers % self.capacity] for name, column in self._columns.items()},
            started=[record for at, record in self._started if number < at <= last],
            ended_owners=[owner for at, owner in self._ended if number < at <= last],
        )

    def _last_in_span(self, after: int, last: int) -> int:
        if last <= after:
            return last
        times = self._columns["times_us"]
        end = times[(after + 1) % self.capacity] + MAX_SPAN_US
        if times[last % self.capacity] <= end:
            return last
        numbers = np.arange(after + 1, last + 1)
        return after + int(np.searchsorted(times[numbers % self.capacity], end, "right"))

    def of_page(self, page: int, limit: int, last_number: int) -> list[tuple[int, dict[str, int]]]:
        """The newest events of one page up to a number, oldest first: number and columns."""
        held = np.arange(self.first_number, min(self.last_number, last_number) + 1)
        mine = held[self._columns["page_ids"][held % self.capacity] == page][-limit:]
        return [
            (number, {name: int(column[number % self.capacity]) for name, column in self._columns.items()})
            for number in mine.tolist()
        ]

    def owner_at(self, number: int, owner: int) -> SequenceRecord | None:
        """The sequence that had an owner number at an event, if it began within what is held."""
        began = [record for first, record in self._started if first <= number and record.owner == owner]
        return began[-1] if began else None

    def _forget_before(self, number: int) -> None:
        while self._started and self._started[0][0] < number:
            self._started.popleft()
        while self._ended and self._ended[0][0] < number:
            self._ended.popleft()
