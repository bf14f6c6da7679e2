"""Whether this process is to end, and how patiently: for good by a signal, by an operator until taken back.

Owns the wish. server.py carries it out.
"""

import asyncio


class DrainControl:
    """On the event loop's thread. Each change wakes who waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grace: float) -> None:
        self._loop = loop
        self._grace = grace  # seconds, where nobody says otherwise
        self._changed: asyncio.Future[None] = loop.create_future()
        self._is_final = False
        self._is_ending = False
        self.is_wanted = False
        self.is_hurried = False
        self.deadline = 0.0  # loop's clock; what runs may run until then

    def start(self, grace: float | None = None) -> None:
        """An operator's wish, with a patience of his own; the last one counts."""
        self.is_wanted = True
        self.deadline = self._loop.time() + (self._grace if grace is None else grace)
        self._notify()

    def start_for_good(self) -> None:
        """A signal's: nobody takes it back. A drain that runs keeps its patience."""
        if not self.is_wanted:
            self.start()
        self._is_final = True
        self._notify()

    def take_back(self) -> bool:
        """The process goes on; False: it is too late, or was for good."""
        if self._is_final or self._is_ending:
            return False
        self.is_wanted = False
        self._notify()
        return True

    def hurry(self) -> None:
        """Ends all patience."""
        self.is_hurried = True
        self._notify()

    def begin_end(self) -> None:
        """The patience is over: what runs is ended now."""
        self._is_ending = True

    async def wait_until_wanted(self) -> None:
        """Returns when the process is to end."""
        while not self.is_wanted:
            await asyncio.shield(self._changed)

    async def wait_for_change(self, seconds: float, *others: "asyncio.Future[None]") -> None:
        """Returns after a change, one of the others, or so many seconds."""
        waits = {self._changed, *(other for other in others if not other.done())}
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _notify(self) -> None:
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)
