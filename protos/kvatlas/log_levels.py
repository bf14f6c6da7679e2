"""Log levels set for a time, for both processes: what an operator turned up goes back by itself.

Owns what each logger goes back to. Takes loggers that the process has, so it never holds more.
"""

import logging
import time
from collections.abc import Callable


class UnknownLogger(Exception):
    """No logger of that name is in use."""


class LogLevels:
    """`expire` is called now and then; on one thread, or from the loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._back: dict[str, tuple[int, float]] = {}  # by logger: level before, and when it comes back

    def set(self, name: str, level: int, seconds: float | None) -> None:
        """Sets a logger's level, the root's for an empty name; None: it stays. Raises UnknownLogger."""
        if name and not isinstance(logging.root.manager.loggerDict.get(name), logging.Logger):
            raise UnknownLogger(name)
        logger = logging.getLogger(name or None)
        before, _ = self._back.pop(name, (logger.level, 0.0))
        if seconds is not None:
            self._back[name] = (before, self._clock() + seconds)
        logger.setLevel(level)

    def expire(self) -> None:
        """Sets back what is due."""
        now = self._clock()
        for name in [name for name, (_, until) in self._back.items() if until <= now]:
            level, _ = self._back.pop(name)
            logging.getLogger(name or None).setLevel(level)
