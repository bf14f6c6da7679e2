"""Pinned host memory that steps read and write from the device, a buffer for each step in flight.

Owns the memory and the events. A buffer is written again only when the device is past the step that had it
(H9); what that step left must have been read by then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.plan_buffers import Event
from kernels.zero_copy import BATCH_COLUMNS, RESULT_COLUMNS, padded_room

DEPTH = 4
"""Buffers. The engine has two steps in flight; a caller that is further ahead waits for the device."""


class BufferShapes(NamedTuple):
    """Lines and entries of a line, int32: what the host sends, and what comes back."""

    sent: tuple[int, int]
    results: tuple[int, int]


def decode_shapes(max_batch: int) -> BufferShapes:
    """Of decode steps of up to `max_batch` spans: kernels.zero_copy."""
    room = padded_room(max_batch)
    return BufferShapes((BATCH_COLUMNS, room), (RESULT_COLUMNS, room))


class StepBuffer:
    """Memory of one step at a time. `number` says of which, counted from 1."""

    def __init__(self, shapes: BufferShapes, new_event: Callable[[], Event], *, is_pinned: bool) -> None:
        def lines(shape: tuple[int, int]) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned)

        self.batch = lines(shapes.sent)  # the host writes it, the device reads it
        self.batch_columns: NDArray[np.int32] = self.batch.numpy()
        self.results = lines(shapes.results)  # the other way round
        self.result_columns: NDArray[np.int32] = self.results.numpy()
        self.event = new_event()
        self.number = 0


class StepBuffers:
    """Buffers of the same shapes, handed out in turn."""

    def __init__(
        self, shapes: BufferShapes, new_event: Callable[[], Event], *, is_pinned: bool, depth: int = DEPTH
    ) -> None:
        self._buffers = [StepBuffer(shapes, new_event, is_pinned=is_pinned) for _ in range(depth)]
        self._count = 0

    @contextmanager
    def next(self) -> Iterator[StepBuffer]:
        """The oldest buffer: whatever reads or writes it on the device is queued before the block ends.

        Waits only where as many steps as there are buffers are queued behind a busy device.
        """
        buffer = self._buffers[self._count % len(self._buffers)]
        buffer.event.synchronize()
        self._count += 1
        buffer.number = self._count
        try:
            yield buffer
        finally:
            buffer.event.record()

    def close(self) -> None:
        """Waits until the device is past every step: the memory may be somebody else's after this.

        A device that failed is past all it will ever do; who waits for a result is told why.
        """
        for buffer in self._buffers:
            with suppress(RuntimeError):
                buffer.event.synchronize()


class StepOutcome:
    """What a step draws, once it has: read before the buffer has its next step."""

    def __init__(self, buffer: StepBuffer, num_rows: int) -> None:
        self._buffer = buffer
        self._number = buffer.number
        self._num_rows = num_rows

    def is_ready(self) -> bool:
        """Whether `arrived` would not wait."""
        return self._buffer.event.query()

    def arrived(self) -> NDArray[np.int32]:
        """Waits for the step. The lines of its results, [lines, num_rows]: a view of the buffer."""
        buffer = self._buffer
        assert buffer.number == self._number, "the buffer of this step has another one already"
        buffer.event.synchronize()
        return buffer.result_columns[:, : self._num_rows]
