"""Kernels compiled after a start, told to the log: each holds all requests up while it is made.

Every kernel should be there before the first request (kernels.compile_ahead); one that is not is a fault of
ours, and this says which. Triton tells of each kernel that it compiles or reads from its cache.
"""

import logging
from collections.abc import Callable
from threading import Lock
from typing import Any

from triton import knobs

MAX_LINES = 32
"""Of one watch: a fault that repeats is known by then, and its lines would hide others."""

log = logging.getLogger(__name__)


class CompileWatch:
    """Writes a line for each kernel from `begin` to `end`, MAX_LINES at most; the last says that it is."""

    def __init__(self) -> None:
        self._lines_left = MAX_LINES
        self._is_on = False
        self._lock = Lock()
        self._before: Callable[..., None] | None = None

    def begin(self) -> None:
        """From now on. Whoever listened before still hears."""
        if not self._is_on:
            self._is_on, self._before = True, knobs.compilation.listener
            knobs.compilation.listener = self._heard

    def end(self) -> None:
        """No more lines; idempotent."""
        if self._is_on and knobs.compilation.listener == self._heard:  # else another hears, through this one
            knobs.compilation.listener = self._before
        self._is_on = False

    def _heard(self, **event: Any) -> None:
        if self._before is not None:
            self._before(**event)
        with self._lock:
            if not self._is_on or self._lines_left == 0:
                return
            self._lines_left -= 1
            rest = "" if self._lines_left else " more=untold"
        name, seconds = getattr(event.get("src"), "name", "unknown"), _microseconds(event) / 1e6
        cached = "yes" if event.get("cache_hit") else "no"
        log.warning(
            "event=kernel_compiled_late kernel=%s seconds=%.3f cached=%s%s", name, seconds, cached, rest
        )


def _microseconds(event: dict[str, Any]) -> int:
    total = getattr(event.get("times"), "total", 0)
    return int(total)
