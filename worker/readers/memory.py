"""Memory of the GPU by use, read a few times a minute on the observer's thread.

Knows no torch: a runner that has a GPU hands in the function that reads it.
"""

import logging
from collections.abc import Callable, Mapping

from worker.log import log_event
from worker.readers.metric_table import MEMORY_KINDS

READ_SECONDS = 5.0

logger = logging.getLogger("worker.memory")


class MemoryMeter:
    """The last reading; all 0 without a GPU."""

    def __init__(self) -> None:
        self.bytes_by_kind: Mapping[str, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self._read: Callable[[], Mapping[str, int]] | None = None
        self._next = 0.0

    def read_from(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Says who knows; ``read`` is called on the observer's thread and gives bytes by kind."""
        self._read = read

    def look(self, now: float) -> None:
        """Reads, if it is time."""
        if self._read is None or now < self._next:
            return
        self._next = now + READ_SECONDS
        try:
            found = self._read()
        except Exception as error:  # a number that is missing ends no worker; who uses the device will tell
            log_event(logger, logging.WARNING, "memory_unknown", why=repr(error))
            return
        self.bytes_by_kind = {kind: max(0, found.get(kind, 0)) for kind in MEMORY_KINDS}
