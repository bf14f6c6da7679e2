"""Pinned prefixes: names for pages that must stay cached.

Owns names and ends of pins. At most a part of the pool can be pinned, and never so much that a
sequence which was let in could not run alone any more.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from worker.scheduling.books import Books


class PinStatus(IntEnum):
    """What became of a pin."""

    PINNED = 1
    NOT_CACHED = 2  # some pages are missing: compute the prefix with a request, then pin again
    LIMIT = 3  # too many pages


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix."""

    name: str
    salt: bytes
    pages: tuple[int, ...]
    num_tokens: int
    expires: float | None


@dataclass(frozen=True, slots=True)
class PinOutcome:
    """Answer to a pin; the numbers say why not."""

    status: PinStatus
    pin: Pin | None
    needed_pages: int
    cached_pages: int
    pinned_pages: int
    max_pinned_pages: int


class Pins:
    """Pins by name."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._pins: dict[str, Pin] = {}

    def set(self, name: str, token_ids: Sequence[int], salt: bytes, expires: float | None) -> PinOutcome:
        """Pins the whole pages of a cached prefix under ``name``, instead of what it stood for before."""
        books, cache = self._books, self._books.cache
        needed = len(token_ids) // books.config.page_size
        pages = cache.lookup(array("I", token_ids), salt, needed).pages
        most = books.config.num_pinnable_pages
        pinned = cache.num_pinned_pages + cache.num_newly_pinned(pages) + needed - len(pages)
        if pinned > most or pinned + self._most_needed() > books.config.cache.num_pages:
            return PinOutcome(PinStatus.LIMIT, None, needed, len(pages), cache.num_pinned_pages, most)
        if len(pages) < needed or not needed:
            return PinOutcome(PinStatus.NOT_CACHED, None, needed, len(pages), cache.num_pinned_pages, most)
        cache.pin(pages)
        self.remove(name)
        pin = Pin(name, salt, tuple(pages), needed * books.config.page_size, expires)
        self._pins[name] = pin
        return PinOutcome(PinStatus.PINNED, pin, needed, needed, cache.num_pinned_pages, most)

    def _most_needed(self) -> int:
        """Pages that the longest live sequence may come to need."""
        limits = [sequence.limit for sequence in self._books.sequences.values()]
        return self._books.cache.pages_for(max(limits, default=0))

    def remove(self, name: str) -> bool:
        """Lets go; whether there was such a pin."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._books.cache.unpin(pin.pages)
        return pin is not None

    def expire(self, now: float) -> None:
        """Lets go of pins whose time is over."""
        for name in [
            pin.name for pin in self._pins.values() if pin.expires is not None and pin.expires <= now
        ]:
            self.remove(name)

    def all(self) -> list[Pin]:
        """Pins by name."""
        return [self._pins[name] for name in sorted(self._pins)]

    def drop_all(self) -> None:
        """Lets go of all."""
        for name in list(self._pins):
            self.remove(name)

    @property
    def next_expiry(self) -> float | None:
        """When the next pin ends."""
        times = [pin.expires for pin in self._pins.values() if pin.expires is not None]
        return min(times, default=None)
