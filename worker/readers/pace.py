"""How threads that observe leave the interpreter to the engine: a little work, then a rest.

A thread that computes for 40 ms takes as much from an engine that starts a step with prompts: each of its
calls that let go of the interpreter, dozens in such a step, waits for it anew, however soon it is given up.
On an H200 with 256 prompts at once (given up after 0.2, 1 or 5 ms) the device waited so for 35 to 90 ms of
5.1 s.
"""

import time
from collections.abc import Callable

WORK_SECONDS = 0.0005
REST_SECONDS = 0.002


class Pace:
    """Of a thread: `begin` at the start of its turn, `rest` between pieces of work; without a begin, none."""

    def __init__(
        self,
        rest_seconds: float = REST_SECONDS,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rest_seconds = rest_seconds
        self._clock = clock
        self._sleep = sleep
        self._tired_at: float | None = None

    def begin(self) -> None:
        """The thread has work from now on."""
        self._tired_at = self._clock() + WORK_SECONDS

    def rest(self) -> None:
        """Sleeps where enough was done since the last time."""
        if self._tired_at is not None and self._clock() >= self._tired_at:
            self._sleep(self._rest_seconds)
            self.begin()
