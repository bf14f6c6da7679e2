"""How much time sharing saves, page by page: what bills of shared pages are made of.

A page with r references for a time dt saves (1 - 1/r) dt to each of its holders: had each a page of its
own, each would be charged dt, and so each is charged dt / r. S(page), the sum of (1 - 1/r) dt since the
page was free, is kept as a + (1 - 1/r) now, so that it need be touched only where r changes between
two counts above zero. What a holder saved is S when it lets go less S when it came.

Holders of a page hold its parents, too, so in the order of tokens shared pages come first: all functions
take pages in that order and stop at the first that was never shared. One page more may stand at the end
of a list, of a sample that still has to copy from it.
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
        page = -1
        for page in pages:
            if not self._lose(page):
                break
        if page != pages[-1]:
            self._lose(pages[-1])

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
        if not pages:
            return 0.0
        refs, constants, now = self._refs, self._constants, self.now
        total, page = 0.0, -1
        for page in pages:
            count, constant = refs[page], constants[page]
            if count < 2 and not constant:
                break
            total += constant + now - now / count
        if page != pages[-1]:
            count, constant = refs[pages[-1]], constants[pages[-1]]
            total += constant + now - now / max(count, 1)
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
