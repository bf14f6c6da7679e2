"""Threads for compiling constraints: few, with deep stacks, and never more work than the queue holds.

The library recurses along a client's chains of rules: 8 MB of stack ended at about 3,000 rules, and with it
the process. Memory of a stack is taken when it is touched.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Full, Queue

STACK_BYTES = 256 << 20
"""Room for chains of every length that MAX_CONSTRAINT_BYTES of text can hold."""

END_SECONDS = 10.0
"""How long the end of the process waits for work that runs: compiling is bounded by far less."""

_starting = threading.Lock()
_alive: "weakref.WeakSet[DeepThreads]" = weakref.WeakSet()
log = logging.getLogger("kvatlas.constraints")


class DeepThreads:
    """Runs work in its own threads, in order of arrival."""

    def __init__(self, name: str, *, num_threads: int = 1, max_waiting: int = 256) -> None:
        self._work: Queue[Callable[[], None] | None] = Queue(max_waiting)
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        with _starting:  # the size is the process's, for threads that start now
            before = threading.stack_size(STACK_BYTES)
            try:
                for thread in self._threads:
                    thread.start()
            finally:
                threading.stack_size(before)
        _alive.add(self)

    def submit(self, work: Callable[[], None]) -> bool:
        """Queues work, which must not raise; False: there is no room, or no more time."""
        if self._is_closed:
            return False
        try:
            self._work.put_nowait(work)
        except Full:
            return False
        return True

    def close(self) -> None:
        """Drops what waits, and lets what runs end; idempotent, never waits for long."""
        self._is_closed = True
        with suppress(Empty):  # never waits: a thread may take the last before us
            while True:
                self._work.get_nowait()
        for _ in self._threads:
            self._work.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the threads' end after `close`, but not for longer."""
        limit = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:  # else the thread ends, and what waits behind this work waits for ever
                log.exception("event=work_failed thread=%s", threading.current_thread().name)


@atexit.register
def _end_all() -> None:
    """A thread that comes back from the library while the interpreter is taken apart ends the process by a
    signal: the interpreter unwinds it, and the library is not made for that."""
    left = list(_alive)
    for threads in left:
        threads.close()
    for threads in left:
        threads.join(END_SECONDS)
