"""Ends the worker when its launcher is gone. Knows one process id."""

import logging
import os
import threading
from collections.abc import Callable

from worker.log import log_event

PERIOD_SECONDS = 0.5
PATIENCE_SECONDS = 10.0  # for what runs; nobody is left who would restart or watch us

logger = logging.getLogger("worker")


class ParentWatch:
    """A thread that looks whether the parent is still the same process."""

    def __init__(
        self,
        parent: int,
        on_orphaned: Callable[[], None],
        get_parent: Callable[[], int] = os.getppid,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._parent = parent
        self._on_orphaned = on_orphaned
        self._get_parent = get_parent
        self._period_seconds = period_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-parent", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._get_parent() == self._parent:
            if self._stopping.wait(self._period_seconds):
                return
        log_event(logger, logging.WARNING, "parent_gone", parent=self._parent)
        self._on_orphaned()
        if not self._stopping.wait(PATIENCE_SECONDS):
            self._on_orphaned()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self._stopping.set()
        self._thread.join()
