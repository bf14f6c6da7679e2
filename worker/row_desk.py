"""Rows of the page table for those who ask, a few in each turn of the engine.

Runs on the engine's thread. Owns the calls that wait and what has been read for the first of them. A copy
from the device is begun and looked at again in later turns: nothing here waits for it. Slots are written
out by whoever sends them, not here.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from worker.channels import OutputQueue
from worker.description import PoolDescription
from worker.execution.runner import RowsRead, Runner
from worker.ids import Row
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    LinkMessage,
    PageSlots,
    ReadRows,
    RowsAnswer,
    TableRow,
)
from worker.scheduling.audit import RowSpan
from worker.scheduling.scheduler import Scheduler
from worker.stats import SequenceView

MAX_CALLS = 16  # that wait
BOOK_ROWS = 16  # of a turn: some 20 us each at 4,000 tokens
DEVICE_ROWS = 4  # of a turn, as in a round of the live audit: a pinned buffer, a copy and an event each
READ_SECONDS = 5.0  # after which a copy is given up: the device stands still, which others report
POLL_SECONDS = 0.002  # between two looks of an idle engine at a copy on its way


@dataclass(slots=True)
class _Reading:
    """A call that is being answered."""

    asked: ReadRows
    left: deque[int]  # rows still to be read
    done: list[TableRow] = field(default_factory=list)
    piece: list[TableRow] = field(default_factory=list)  # whose copy is on its way
    read: RowsRead | None = None
    began: float = 0.0  # of that copy


class RowDesk:
    """Calls in order, one at a time; each ends with one answer."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        outputs: OutputQueue[LinkMessage],
        pool: PoolDescription,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._outputs = outputs
        self._pool = pool
        self._clock = clock
        self._waiting: deque[ReadRows] = deque()
        self._reading: _Reading | None = None

    @property
    def next_time(self) -> float | None:
        """When an idle engine should look again; None: nobody waits."""
        if self._reading is None and not self._waiting:
            return None
        return self._clock() + (POLL_SECONDS if self._reading and self._reading.read else 0.0)

    def obey(self, asked: ReadRows) -> None:
        """Takes a call, or refuses it at once."""
        last = self._pool.max_running
        if any(row > last for row in asked.rows):
            text = f"rows: row {max(asked.rows)}, the last is {last}"
            self._refuse(asked, CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
        elif len(self._waiting) >= MAX_CALLS:
            text = f"{MAX_CALLS} calls wait for rows of the page table"
            self._refuse(asked, CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)
        else:
            self._waiting.append(asked)

    def look(self) -> None:
        """Goes on with the first call by one piece. What breaks ends that call and nothing else."""
        if self._reading is None:
            if not self._waiting:
                return
            asked = self._waiting.popleft()
            rows = asked.rows or sorted(self._scheduler.rows_in_use())
            self._reading = _Reading(asked, deque(rows))
        reading = self._reading
        try:
            is_over = self._finish_copy(reading) and self._next_piece(reading)
        except Exception as error:
            self._end(reading, CallError.INTERNAL, CallReason.INTERNAL, type(error).__name__)
            raise
        if is_over:
            self._reading = None
            self._outputs.put(RowsAnswer(reading.asked.ticket, reading.done))

    def close(self) -> None:
        """The engine ends: nobody waits on."""
        calls = [] if self._reading is None else [self._reading.asked]
        calls += self._waiting
        self._reading = None
        self._waiting.clear()
        for asked in calls:
            self._refuse(asked, CallError.UNAVAILABLE, CallReason.DRAINING, "the worker ends")

    def _next_piece(self, reading: _Reading) -> bool:
        """Reads some rows more, as they are now; whether nothing is left to wait for."""
        count = DEVICE_ROWS if reading.asked.from_device else BOOK_ROWS
        rows = [reading.left.popleft() for _ in range(min(count, len(reading.left)))]
        views = self._scheduler.row_views(rows)
        step = self._scheduler.step_number + 1
        piece = [self._row(row, views.get(Row(row)), step) for row in rows]
        if not reading.asked.from_device:
            reading.done += piece
            return not reading.left
        if piece:
            spans = [RowSpan(Row(row.row), 0, array("i", bytes(4 * len(row.slots)))) for row in piece]
            reading.piece, reading.began = piece, self._clock()
            reading.read = self._runner.begin_read(spans)
        return not piece

    def _finish_copy(self, reading: _Reading) -> bool:
        """Takes in what has arrived; False: it is still on its way, or it was given up."""
        if reading.read is None:
            return True
        if not reading.read.is_ready():
            if self._clock() - reading.began > READ_SECONDS:
                text = f"the device did not answer for {READ_SECONDS:g} s"
                self._end(reading, CallError.UNAVAILABLE, CallReason.INTERNAL, text)
            return False
        slots = reading.read.result()
        reading.done += [
            replace(row, slots=array("i", found)) for row, found in zip(reading.piece, slots, strict=True)
        ]
        reading.piece, reading.read = [], None
        return True

    def _row(self, row: int, view: SequenceView | None, step: int) -> TableRow:
        page_size, pages = self._pool.page_size, array("i")
        if row == self._pool.max_running:  # the dummy row: all its entries are the dummy page's first slot
            dummy = PageSlots(array("i", [self._pool.num_pages * page_size]) * self._pool.row_width, 1)
            return TableRow(row, 0, "", 0, 0, dummy, step)
        if view is None:
            return TableRow(row, 0, "", 0, 0, PageSlots(pages, page_size), step)
        pages.extend(view.page_ids)
        slots = PageSlots(pages, page_size)
        return TableRow(row, view.owner, view.request_id, view.choice_index, view.token_count, slots, step)

    def _end(self, reading: _Reading, error: CallError, reason: CallReason, text: str) -> None:
        self._reading = None
        self._refuse(reading.asked, error, reason, text)

    def _refuse(self, asked: ReadRows, error: CallError, reason: CallReason, text: str) -> None:
        self._outputs.put(CallFailure(asked.ticket, error, reason, text))
