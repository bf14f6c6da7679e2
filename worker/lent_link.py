"""The link in the hands of the engine's thread, while that has nothing else to do.

An idle worker's next request would wake the link's thread, which would wake the engine's; its first token
would wake the link's again. So an idle engine serves the link itself, and goes on until a short prompt's
first token is out. From then on, and wherever a step takes long, the link's own thread serves it; that
also stands in where the engine is held up with the link in its hands (worker/link/turns.py).

Owns when it is whose; what serving means is the link's (worker/link/server.py).
"""

import time
from collections.abc import Callable
from typing import Protocol

from worker.channels import CommandQueue, OutputQueue
from worker.messages import EngineCommand, LinkMessage


class Link(Protocol):
    """What can be borrowed."""

    def borrow(self) -> None:
        """Its own thread only stands in until `give_back`."""
        ...

    def give_back(self) -> None:
        """Its own thread goes on."""
        ...

    def serve(self, seconds: float) -> None:
        """Sends and receives what there is; waits so long at most for the first of it. Never raises."""
        ...

    def send_outputs(self) -> None:
        """Sends all that the engine has put out. Never raises."""
        ...


class LentLink:
    """For the engine's thread alone. Without a link the engine sleeps on its commands."""

    def __init__(
        self,
        link: Link | None,
        commands: CommandQueue[EngineCommand],
        outputs: OutputQueue[LinkMessage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._commands = commands
        self._outputs = outputs
        self._clock = clock
        self.is_held = False  # it is in the engine's hands

    def wait(self, seconds: float) -> EngineCommand | None:
        """Until a command, a wake or the time limit. A command may be in the queue instead of returned."""
        if self._link is None:
            return self._commands.wait(seconds)
        if not self.is_held:
            self._borrow(self._link)
        end, left = self._clock() + seconds, seconds
        while self._commands.is_empty:
            self._link.serve(max(0.0, left))
            left = end - self._clock()
            if left <= 0:
                break
        return None

    def look(self) -> None:
        """Between two steps: takes what has come, if nobody else would."""
        if self._link is not None and self.is_held:
            self._link.serve(0.0)

    def wake(self) -> None:
        """What was put out goes out: from here, or by the link's thread."""
        if self._link is not None and self.is_held:
            self._link.send_outputs()
        else:
            self._outputs.wake()

    def give_back(self) -> None:
        """To the link's thread, if it is not there; soon after `look` or `wait`, or a command would wait."""
        if self._link is not None and self.is_held:
            self.is_held = False
            self._commands.sleep_elsewhere(None)
            self._link.give_back()

    def _borrow(self, link: Link) -> None:
        self._commands.sleep_elsewhere(self._outputs.wakeup.notify)  # before the first look at the queue
        self.is_held = True
        link.borrow()
