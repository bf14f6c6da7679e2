"""Whose turn it is to serve the link: its own thread's, unless the engine's has borrowed it.

Owns that decision alone. Whoever serves has the socket and the peers to itself for a turn. Who has borrowed
the link may be busy elsewhere, in a launch or a wait for the device: then its own thread stands in.
"""

import threading
from collections.abc import Callable

STAND_IN_SECONDS = 0.25  # between two looks of the link's own thread while it is lent


class Turns:
    """One turn at a time. `wake` ends the wait that a turn of the link's own thread may be in."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()  # held during a turn
        self._is_own = threading.Event()
        self._is_own.set()

    def take(self, turn: Callable[[], None], stand_in: Callable[[], None]) -> None:
        """For the link's own thread: its turn, or, while the link is lent and nobody serves it, `stand_in`.

        Waits up to STAND_IN_SECONDS first while it is lent.
        """
        if self._is_own.wait(STAND_IN_SECONDS):
            with self._lock:
                if self._is_own.is_set():  # it may have been lent since
                    turn()
        elif self._lock.acquire(blocking=False):
            try:
                stand_in()
            finally:
                self._lock.release()

    def take_lent(self, turn: Callable[[], None]) -> None:
        """For who has borrowed it."""
        with self._lock:
            turn()

    def borrow(self) -> None:
        """Turns are the caller's from now on. Waits for the end of one that is under way."""
        self._is_own.clear()
        self._wake()
        with self._lock:
            pass

    def give_back(self) -> None:
        """They are the thread's again."""
        self._is_own.set()
