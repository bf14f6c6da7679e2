"""How much time sharing saves, page by page: what bills of shared pages are made of.

A page with r references for a time dt saves (1 - 1/r) dt to each of its holders: had each a page of its
own, each would be charged dt, and so each is charged dt / r. S(page), the sum of (1 - 1/r) dt since the
page was free, is kept as a + (1 - 1/r) now, so that it need be touched only where r changes between
two counts above zero. What a holder saved is S when it lets go less S when it came.

Holders of a page hold its parents, too, so in the order of tokens shared pages come first: all functions
take pages in that order and stop at the first that was never shared. A page that a sample still has to copy
from stands behind those it shares, as a page of the same prompt: all its holders hold those, too.
"""

from array import array
from collections.abc import Sequence


class SharedTime:
    """The constants a of all pages. `refs` is the pool's column of references."""

    def __init__(self, refs: Sequence[int]) -> None:
        self._refs = refs
        self._constants = array("d", bytes(8 * len(refs)))
        self.now = 0.0  # seconds

    def gained(self, pages: Sequence[int]) -> None:
        """Each of these pages, which had references, has one more now."""
        refs, constants, now = self._refs, self._constants, self.now
        for page in pages:
            count = refs[page]
            constants[page] -= now / (count * (count - 1))

    def lost(self, pages: Sequence[int]) -> None:
        """Each of these pages, in token order, has one reference less now."""
        for page in pages:
            if not self._lose(page):
                return

    def _lose(self, page: int) -> bool:
        """False: it was never shared in this life."""
        count, constants = self._refs[page], self._constants
        if count:
            constants[page] += self.now / (count * (count + 1))
        elif constants[page]:
            constants[page] = 0.0
        else:
            return False
        return True

    def saved(self, pages: Sequence[int]) -> float:
        """Sum of S over these pages, in token order; seconds."""
        refs, constants, now = self._refs, self._constants, self.now
        total = 0.0
        for page in pages:
            count, constant = refs[page], constants[page]
            if count < 2 and not constant:
                break
            total += constant + now - now / count
        return total


class NoSharedTime(SharedTime):
    """For a pool that nobody watches: no bills, a tenth of its cost."""

    def gained(self, pages: Sequence[int]) -> None:
        """Nothing is kept."""

    def lost(self, pages: Sequence[int]) -> None:
        """Nothing is kept."""

    def saved(self, pages: Sequence[int]) -> float:
        """Nothing is known."""
        return 0.0
