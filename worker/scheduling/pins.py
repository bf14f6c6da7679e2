"""Pinned prefixes: names for pages that must stay cached.

Owns names and ends of pins. At most a part of the pool can be pinned, and never so much that a
sequence which was let in could not run alone any more.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from worker.scheduling.books import Books
from worker.scheduling.fitting import num_shared


class PinStatus(IntEnum):
    """What became of a pin."""

    PINNED = 1
    NOT_CACHED = 2  # some pages are missing: compute the prefix with a request, then pin again
    LIMIT = 3  # too many pages


MAX_PINS = 256  # names; pins may share all their pages


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix."""

    name: str
    salt: bytes
    pages: tuple[int, ...]
    num_tokens: int  # in those pages
    expires: float | None
    prefix_tokens: int = 0  # of what was asked for; the last page may not be whole
    computed_tokens: int = 0  # those that had to be computed for it
    hit_tokens: int = 0  # prompt tokens that were found in its pages since


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
        self._by_first_page: dict[int, list[str]] = {}

    def set(
        self,
        name: str,
        token_ids: Sequence[int],
        salt: bytes,
        expires: float | None,
        computed_tokens: int = 0,
    ) -> PinOutcome:
        """Pins the whole pages of a cached prefix under ``name``, instead of what it stood for before."""
        books, cache = self._books, self._books.cache
        needed = len(token_ids) // books.config.page_size
        pages = cache.lookup(array("I", token_ids), salt, needed).pages
        most = books.config.num_pinnable_pages
        before = self._pins.get(name)
        pinned = cache.num_pinned_pages + cache.num_newly_pinned(pages) + needed - len(pages)
        if before is not None:
            pinned -= cache.num_pinned_once(set(before.pages).difference(pages))
        is_one_too_many = len(self._pins) >= MAX_PINS and name not in self._pins
        if is_one_too_many or pinned > most or not self._leaves_room(name, pinned, pages):
            return PinOutcome(PinStatus.LIMIT, None, needed, len(pages), cache.num_pinned_pages, most)
        if len(pages) < needed or not needed:
            return PinOutcome(PinStatus.NOT_CACHED, None, needed, len(pages), cache.num_pinned_pages, most)
        cache.pin(pages)
        self.remove(name)
        num_tokens = needed * books.config.page_size
        pin = Pin(name, salt, tuple(pages), num_tokens, expires, len(token_ids), computed_tokens)
        if before is not None and before.pages == pin.pages:  # the same once more: it goes on counting
            pin = replace(pin, computed_tokens=before.computed_tokens, hit_tokens=before.hit_tokens)
        self._pins[name] = pin
        self._by_first_page.setdefault(pin.pages[0], []).append(name)
        return PinOutcome(PinStatus.PINNED, pin, needed, needed, cache.num_pinned_pages, most)

    def _leaves_room(self, name: str, num_pinned: int, pages: Sequence[int]) -> bool:
        """Whether all live sequences could still run alone beside so many pinned pages.

        Those are the pages of all other names, and ``pages``.
        """
        books = self._books
        usable = books.config.cache.num_pages - num_pinned
        large = [s for s in books.sequences.values() if books.cache.pages_for(s.limit) > usable]
        if not large:
            return True
        others = [pin.pages for pin in self._pins.values() if pin.name != name]
        pinned = set(pages).union(*others)
        return all(books.cache.pages_for(s.limit) <= usable + num_shared(books, s, pinned) for s in large)

    def remove(self, name: str) -> bool:
        """Lets go; whether there was such a pin."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._books.cache.unpin(pin.pages)
            names = self._by_first_page[pin.pages[0]]
            names.remove(name)
            if not names:
                del self._by_first_page[pin.pages[0]]
        return pin is not None

    def hit(self, pages: Sequence[int]) -> None:
        """A prompt found these pages, first of its prefix first."""
        for name in self._by_first_page.get(pages[0], ()) if pages else ():
            pin = self._pins[name]
            num_shared = next(
                (at for at, (one, other) in enumerate(zip(pin.pages, pages, strict=False)) if one != other),
                min(len(pin.pages), len(pages)),
            )
            hits = pin.hit_tokens + num_shared * self._books.config.page_size
            self._pins[name] = replace(pin, hit_tokens=hits)

    def expire(self, now: float) -> None:
        """Lets go of pins whose time is over."""
        for name in [
            pin.name for pin in self._pins.values() if pin.expires is not None and pin.expires <= now
        ]:
            self.remove(name)

    def all(self) -> list[Pin]:
        """Pins by name."""
        return [self._pins[name] for name in sorted(self._pins)]

    def drop(self, matches: Callable[[bytes], bool] | None = None) -> None:
        """Lets go of all, or of those whose salt ``matches``."""
        for pin in list(self._pins.values()):
            if matches is None or matches(pin.salt):
                self.remove(pin.name)

    @property
    def next_expiry(self) -> float | None:
        """When the next pin ends."""
        times = [pin.expires for pin in self._pins.values() if pin.expires is not None]
        return min(times, default=None)
