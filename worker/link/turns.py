"""Whose turn it is to serve the link: its own thread's, unless the engine's has borrowed it.

Owns that decision alone: whoever serves has the socket and the peers to itself.
"""

import threading
from collections.abc import Callable


class Turns:
    """One turn at a time. `wake` ends the wait that a turn of the link's own thread may be in."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()  # held during a turn, and while it is lent
        self._is_own = threading.Event()
        self._is_own.set()

    def take(self, turn: Callable[[], None]) -> None:
        """A turn of the link's own thread; waits first while it is lent."""
        self._is_own.wait()
        with self._lock:
            if self._is_own.is_set():  # it may have been lent since
                turn()

    def borrow(self) -> None:
        """All turns are the caller's from now on. Waits for the end of one that is under way."""
        self._is_own.clear()
        self._wake()
        self._lock.acquire()

    def give_back(self) -> None:
        """They are the thread's again."""
        self._lock.release()
        self._is_own.set()
