"""The hand-overs between threads, each bounded, and what happens at each bound.

    CommandQueue   I/O thread -> engine   full: the I/O thread stops reading its socket, so services
                                          are held up by their own high-water marks; nothing is lost
    OutputQueue    engine -> I/O thread   full: the engine decides no further step until it is half
                                          empty; nothing is lost, nothing blocks on a socket
    Handover       engine -> observer     full: the newest is refused and counted; the reader asks for
                                          a snapshot, as after any loss

Knows nothing of what is handed over.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Wakeup:
    """Wakes a thread that sleeps in poll() on `fileno()`. At most one byte is in flight."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_signalled = False

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._reader.fileno()

    def notify(self) -> None:
        """Wakes the sleeper; called after the thing to be seen was put in place."""
        if not self._is_signalled:
            self._is_signalled = True
            with contextlib.suppress(OSError):  # full or closed: the sleeper is awake or gone
                self._writer.send(b"\0")

    def clear(self) -> None:
        """Called by the woken thread before it looks, so that no notice falls in between."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        self._is_signalled = False

    def close(self) -> None:
        """Gives back both descriptors; idempotent."""
        self._reader.close()
        self._writer.close()


class CommandQueue(Generic[T]):
    """Commands for one reader that sleeps when there are none."""

    def __init__(self, limit: int) -> None:
        # SimpleQueue.put is reentrant: a signal handler may wake the reader with it. A Condition or
        # an Event would deadlock when the signal comes while the reader holds its lock.
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._limit = limit
        self._poke: Callable[[], None] | None = None
        self._reader = 0  # the thread that sleeps elsewhere

    @property
    def has_room(self) -> bool:
        """Whether the writer may read its socket further."""
        return self._queue.qsize() < self._limit

    @property
    def is_empty(self) -> bool:
        """Whether the reader has taken everything."""
        return self._queue.empty()

    def put(self, command: T) -> None:
        """Adds one. Ends of services are put even past the bound: they are few, and must not be lost."""
        self._queue.put(command)
        poke = self._poke
        if poke is not None and threading.get_ident() != self._reader:
            poke()

    def wake(self) -> None:
        """Ends the reader's sleep without a command; safe in a signal handler."""
        self._queue.put(None)
        poke = self._poke
        if poke is not None:  # also on the reader's own thread: a signal may have come within its sleep
            poke()

    def sleep_elsewhere(self, poke: Callable[[], None] | None) -> None:
        """The calling reader will sleep in something that `poke` ends; None: in `wait` again.

        What was put before may not have poked: the reader looks at the queue before it sleeps.
        """
        self._reader, self._poke = threading.get_ident(), poke

    def drain(self, most: int | None = None) -> list[T]:
        """What is there now, at most so many or the bound, without waiting."""
        commands: list[T] = []
        for _ in range(min(self._queue.qsize(), most or self._limit)):
            try:
                command = self._queue.get_nowait()
            except Empty:
                break
            if command is not None:
                commands.append(command)
        return commands

    def wait(self, timeout_seconds: float | None) -> T | None:
        """Sleeps until a command, a wake or the time limit; None for the last two."""
        try:
            return self._queue.get(timeout=timeout_seconds)
        except Empty:
            return None


class OutputQueue(Generic[T]):
    """Results for one reader that sleeps in poll(). Written by several threads."""

    def __init__(self, limit: int) -> None:
        self.wakeup = Wakeup()
        self._items: deque[T] = deque()
        self._limit = limit
        self._has_room = threading.Event()
        self._has_room.set()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, *, wakes: bool = True) -> None:
        """Adds one and wakes the reader, or leaves that to a `wake` soon after; never waits."""
        self._items.append(item)
        if len(self._items) >= self._limit:
            self._has_room.clear()
        if wakes:
            self.wakeup.notify()

    def wake(self) -> None:
        """Wakes the reader if there is something to read."""
        if self._items:
            self.wakeup.notify()

    def take(self, most: int) -> list[T]:
        """The oldest items, at most so many."""
        items = [self._items.popleft() for _ in range(min(most, len(self._items)))]
        if len(self._items) * 2 <= self._limit:
            self._has_room.set()
        return items

    @property
    def is_full(self) -> bool:
        """Whether the writer should produce no more for now."""
        if not self._has_room.is_set() and len(self._items) * 2 <= self._limit:
            self._has_room.set()  # a put and a take crossed: the last of them decides by the length
        return not self._has_room.is_set()

    def wait_for_room(self, timeout_seconds: float) -> bool:
        """Sleeps until the reader has caught up, or the time limit; whether there is room."""
        self._has_room.wait(timeout_seconds)
        return not self.is_full

    def close(self) -> None:
        """Gives back the descriptors; idempotent."""
        self.wakeup.close()


class Handover(Generic[T]):
    """Items for one reader that comes by itself; the newest is refused when the reader is late."""

    def __init__(self, limit: int) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self.refused = 0  # items since the start that the reader will never see

    def put(self, item: T) -> bool:
        """Adds one; False if it was refused."""
        if len(self._items) >= self._limit:
            self.refused += 1
            return False
        self._items.append(item)
        return True

    def take_all(self) -> list[T]:
        """Everything that is there."""
        return [self._items.popleft() for _ in range(len(self._items))]
