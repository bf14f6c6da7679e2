"""How many generations this process carries at once, and one principal. The worker decides on its queue.

Owns the count. A permit is given back once, whoever asks first.
"""

from collections.abc import Callable


class Permit:
    """The right to run one generation. Giving it back twice is the same as once."""

    __slots__ = ("_give_back",)

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Gives the place to someone else."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Admission:
    """A cap of this process; `max_calls` may change meanwhile."""

    def __init__(self, max_calls: int) -> None:
        self.max_calls = max_calls
        self.active = 0

    def enter(self) -> Permit | None:
        """A permit, or None while it is full."""
        if self.active >= self.max_calls:
            return None
        self.active += 1
        return Permit(self._leave)

    def _leave(self) -> None:
        self.active -= 1
        assert self.active >= 0, "a permit was released twice"
