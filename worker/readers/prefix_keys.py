"""Keys of prefixes: by them a recording tells what prompts have in common, without their tokens.

A key stands at each multiple of the granularity: the fingerprint that a page would have if it ended there. At
whole pages it is the page's own fingerprint, so requests, page events and page maps name prefixes alike.
"""

import math
from array import array
from collections.abc import Sequence

from worker.pages.fingerprint import Fingerprinter

FINEST = 8  # tokens; a key costs one microsecond and eight bytes
TOKEN_BYTES = 4


class PrefixKeys:
    """Computes keys under one fingerprint key."""

    def __init__(self, fingerprint_key: bytes, page_size: int) -> None:
        self._fingerprinter = Fingerprinter(fingerprint_key)
        self._page_size = page_size
        self.granularity = math.gcd(page_size, FINEST)

    def of(self, token_ids: Sequence[int], salt: bytes, known: "array[int] | None" = None) -> "array[int]":
        """Keys 'Q' of a sequence from its first token on, those after ``known`` if they are given."""
        size, step = self._page_size, self.granularity
        first = len(known) if known is not None else 0
        page = first * step // size
        parent = self._fingerprinter.of_salt(salt)
        if page and known is not None:
            parent = known[page * size // step - 1].to_bytes(8, "little")
        start = page * size
        raw = array("I", token_ids[start:]).tobytes()
        found = array("Q")
        of_page = self._fingerprinter.of_page
        for end in range((first + 1) * step, len(token_ids) + 1, step):
            begin = (end - 1) // size * size
            mark = of_page(parent, raw[(begin - start) * TOKEN_BYTES : (end - start) * TOKEN_BYTES])
            found.append(mark)
            if end % size == 0:
                parent = mark.to_bytes(8, "little")
        return found
