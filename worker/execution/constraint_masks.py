"""Which tokens the constraints of a step's rows allow, found while the device computes the step.

Owns where each constrained row stands in its constraint, and the threads that follow it. A row's newest token
comes from the step before, which may still run: the thread waits for it, not the engine, which has queued the
forward pass meanwhile. Needs no torch.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvatlas.constraints.threads import DeepThreads
from worker.scheduling.sampling import Constraint, Progress
from worker.scheduling.step import RowStart

MAX_THREADS = 4
ROWS_PER_THREAD = 4  # a mask takes about 30 us: fewer rows are not worth another thread
WAIT_SECONDS = 60.0  # for masks; the library's limits end one after a second at most

Words = NDArray[np.int32]
Numbers = Sequence[int] | NDArray[np.int32]


class Arriving(Protocol):
    """Sampled ids on their way from the device."""

    def arrived(self) -> NDArray[np.int64]:
        """Waits for them."""
        ...


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of the sampled rows that have a constraint, and only of those."""

    indexes: list[int]  # among the sampled rows of the step
    words: Words  # [len(indexes), ceil(vocab_size / 32)]: bit t of a line is token t
    dead_ends: dict[int, str]  # index among the sampled rows → why nothing is allowed; its line is zero

    def part(self, first: int, end: int) -> "StepMasks | None":
        """Of the sampled rows [first, end), where any has one: for a step that samples some at a time."""
        lines = [line for line, index in enumerate(self.indexes) if first <= index < end]
        indexes = [self.indexes[line] - first for line in lines]
        return StepMasks(indexes, self.words[lines], {}) if lines else None


@dataclass(slots=True)
class _Line:
    """One constrained row."""

    constraint: Constraint
    output_ids: Sequence[int]  # when it entered the row
    num_prompt: int
    progress: Progress | None = None  # made and moved by the mask threads alone
    newest: tuple[int, Arriving, int] | None = None  # position, ids of a step, index: the token sampled last


@dataclass(slots=True)
class _Want:
    """The mask of one row in one step."""

    at: int  # line of the words
    index: int  # among the sampled rows
    line: _Line
    end: int  # position of the token to be sampled
    newest: tuple[int, Arriving, int] | None


@dataclass(slots=True)
class PendingMasks:
    """Masks that are being made."""

    wants: list[_Want]
    words: Words
    dead_ends: dict[int, str] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    parts: list[threading.Event] = field(default_factory=list)

    def result(self) -> StepMasks:
        """Waits for them. Raises what went wrong."""
        for part in self.parts:
            if not part.wait(WAIT_SECONDS):
                raise TimeoutError("masks of constraints took too long")
        if self.errors:
            raise RuntimeError("masks of constraints failed") from self.errors[0]
        return StepMasks([want.index for want in self.wants], self.words, self.dead_ends)


class ConstraintMasks:
    """Of one runner. All calls but the threads' own come from the engine's thread."""

    def __init__(self, vocab_size: int, *, on_masks: Callable[[int, float], None] | None = None) -> None:
        self._num_words = -(-vocab_size // 32)
        self._lines: dict[int, _Line] = {}
        self._threads: list[DeepThreads] = []  # made with the first constraint: most workers see none
        self.on_masks = on_masks  # rows and seconds of a step's masks; called by a mask thread

    def start_rows(self, starts: Sequence[RowStart]) -> None:
        """Takes over the constraints of sequences that enter a row; forgets those that left it."""
        for start in starts:
            constraint = start.params.constraint
            if constraint is None:
                self._lines.pop(start.row, None)
                continue
            num_prompt = start.num_prompt_tokens
            self._lines[start.row] = _Line(constraint, start.token_ids[num_prompt:], num_prompt)

    def begin(self, rows: Numbers, ends: Numbers) -> PendingMasks | None:
        """Begins to make the masks of a step's sampled rows; None: none has a constraint.

        ends[i]: the position of the token that rows[i] samples.
        """
        if not self._lines:
            return None
        wants: list[_Want] = []
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            line = self._lines.get(int(row))
            if line is not None:
                wants.append(_Want(len(wants), index, line, int(end), line.newest))
        if not wants:
            return None
        pending = PendingMasks(wants, np.zeros((len(wants), self._num_words), np.int32))
        num_parts = min(MAX_THREADS, -(-len(wants) // ROWS_PER_THREAD))
        for number in range(num_parts):
            self._submit(number, pending, wants[number::num_parts])
        return pending

    def sampled(self, rows: Numbers, ends: Numbers, ids: Arriving) -> None:
        """The ids that a step drew for these rows, on their way."""
        if not self._lines:
            return
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            line = self._lines.get(int(row))
            if line is not None:
                line.newest = (int(end), ids, index)

    def close(self) -> None:
        """Ends the threads; idempotent."""
        for thread in self._threads:
            thread.close()
        self._threads.clear()
        self._lines.clear()

    def _submit(self, number: int, pending: PendingMasks, wants: list[_Want]) -> None:
        while len(self._threads) <= number:
            self._threads.append(DeepThreads(f"kvatlas-masks-{len(self._threads)}"))
        part = threading.Event()
        pending.parts.append(part)

        def work() -> None:
            try:
                self._make(pending, wants)
            except BaseException as error:  # raised again where the masks are needed
                pending.errors.append(error)
            finally:
                part.set()

        if not self._threads[number].submit(work):
            pending.errors.append(RuntimeError("the mask threads are closed"))
            part.set()

    def _make(self, pending: PendingMasks, wants: list[_Want]) -> None:
        newest = {want.index: _token(want) for want in wants}  # waits for the step before, once
        began = time.perf_counter()
        for want in wants:
            why = self._write(want, newest[want.index], pending.words[want.at])
            if why is not None:
                pending.words[want.at] = 0
                pending.dead_ends[want.index] = why
        if self.on_masks is not None:
            self.on_masks(len(wants), time.perf_counter() - began)

    @staticmethod
    def _write(want: _Want, newest: int | None, words: Words) -> str | None:
        line = want.line
        if line.progress is None:
            line.progress = line.constraint.begin(line.output_ids)
        progress, wanted = line.progress, want.end - line.num_prompt  # output tokens before this one
        if progress.num_tokens > wanted:  # a step that is run once more
            progress.take_back(progress.num_tokens - wanted)
        elif progress.num_tokens == wanted - 1 and newest is not None:
            progress.take((newest,))
        assert progress.num_tokens == wanted, f"{progress.num_tokens} tokens are known of {wanted}"
        return progress.write_mask(words.ctypes.data, words.nbytes)


def _token(want: _Want) -> int | None:
    """The token before the one to be sampled, where the step before drew it."""
    if want.newest is None or want.newest[0] != want.end - 1:
        return None
    _, ids, index = want.newest
    return int(ids.arrived()[index])
