"""A device that is as slow as a test wants it: what is queued runs late, in order.

For tests of memory that the host must not write again before the device has read it (H9, B083).
"""

from collections import deque
from collections.abc import Callable


class SlowStream:
    """A device's queue: work runs when somebody waits for it, or when it pleases the device.

    `waits` counts those that found work to wait for.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.done = self.queued = self.waits = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.queued += 1

    def run(self, until: int) -> None:
        while self.done < until:
            self._queue.popleft()()
            self.done += 1


class SlowEvent:
    """An event of such a stream."""

    def __init__(self, stream: SlowStream) -> None:
        self._stream = stream
        self._at = 0

    def record(self) -> None:
        self._at = self._stream.queued

    def synchronize(self) -> None:
        self._stream.waits += self._stream.done < self._at
        self._stream.run(self._at)

    def query(self) -> bool:
        return self._stream.done >= self._at
