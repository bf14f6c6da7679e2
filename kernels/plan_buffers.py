"""Pinned host memory for plans that a library copies to the device by itself, a piece for each in flight.

A plan function writes a schedule into pinned memory, queues its copy and returns. If the next plan wrote the
same memory before the copy has run, the device would get half of each (H9). So pieces are taken in turn, and
one is handed out again only when the copy out of it is over. Owns the memory and the events.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Of torch.cuda.Event, what is used."""

    def record(self) -> None:
        """Marks this moment of the current stream."""
        ...

    def synchronize(self) -> None:
        """Waits until the stream has come that far; at once when nothing was recorded."""
        ...

    def query(self) -> bool:
        """Whether `synchronize` would not wait."""
        ...


def new_event(device: torch.device) -> Event:
    """An event of the device's current stream; where there are no streams everything is over at once."""
    if device.type != "cuda":
        return _NoEvent()
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


class _NoEvent:
    def record(self) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything is over."""
        return True


class PlanBuffers:
    """`count` pieces of `num_bytes` each, handed out in turn."""

    def __init__(self, count: int, num_bytes: int, new_event: Callable[[], Event]) -> None:
        is_pinned = torch.cuda.is_available()
        self._pieces = [
            (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned), new_event())
            for _ in range(count)
        ]
        self._turn = 0

    @contextmanager
    def piece(self) -> Iterator[Tensor]:
        """uint8 [num_bytes]: whoever plans queues its copy before the block ends.

        Waits only where `count` plans are queued behind a busy device.
        """
        buffer, event = self._pieces[self._turn]
        self._turn = (self._turn + 1) % len(self._pieces)
        event.synchronize()
        try:
            yield buffer
        finally:
            event.record()
