"""How many generations this process carries at once, and one principal. The worker decides on its queue.

Owns the counts. A permit is given back once, whoever asks first.
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


class Share:
    """One generation's part of a quota: it waits until `started`, and counts until `release`."""

    __slots__ = ("_active", "_queued")

    def __init__(self, active: Permit, queued: Permit) -> None:
        self._active = active
        self._queued = queued

    def started(self) -> None:
        """It has left the queue. May be called twice."""
        self._queued.release()

    def release(self) -> None:
        """It is over, wherever it stood. May be called twice."""
        self._queued.release()
        self._active.release()


class Quota:
    """What one principal may have in this process: generations in progress, and waiting ones among them.

    Apart from them it may have as many calls that need the tokenizer alone.
    """

    def __init__(self) -> None:
        self._active = Admission(0)
        self._queued = Admission(0)
        self._text_calls = Admission(0)

    @property
    def active(self) -> int:
        """Generations in progress."""
        return self._active.active

    @property
    def queued(self) -> int:
        """Those of them that no worker has admitted yet."""
        return self._queued.active

    def limit(self, max_active: int, max_queued: int) -> None:
        """Sets the limits; 0: none. Those in progress go on whatever they are."""
        self._active.max_calls = self._text_calls.max_calls = max_active or _UNLIMITED
        self._queued.max_calls = max_queued or _UNLIMITED

    def full(self) -> tuple[str, int] | None:
        """The limit that is reached, by its name in the auth file, and its value; None: there is room."""
        if self.active >= self._active.max_calls:
            return "max_active_requests", self._active.max_calls
        if self.queued >= self._queued.max_calls:
            return "max_queued_requests", self._queued.max_calls
        return None

    def full_of_text_calls(self) -> tuple[str, int] | None:
        """The same of calls that need the tokenizer alone."""
        limit = self._text_calls.max_calls
        return ("max_active_requests", limit) if self._text_calls.active >= limit else None

    def enter_text_call(self) -> Permit:
        """A place for one of them; only while the quota is not full of them."""
        permit = self._text_calls.enter()
        assert permit is not None, self.full_of_text_calls()
        return permit

    def enter(self) -> Share:
        """A share; only while the quota is not full."""
        active, queued = self._active.enter(), self._queued.enter()
        assert active is not None, self.full()
        assert queued is not None, self.full()
        return Share(active, queued)


_UNLIMITED = 1 << 62
