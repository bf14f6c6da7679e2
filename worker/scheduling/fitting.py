"""Whether a sequence can run alone: in all pages but those that pins keep and it does not share.

Owns nothing. The same answer for a request that comes and for a pin that is set, or what one of them lets in
the other makes impossible.
"""

from array import array
from collections.abc import Container

from worker.scheduling.books import Books
from worker.scheduling.request import RequestSpec
from worker.scheduling.sequence import Place, Sequence


def pages_found(books: Books, spec: RequestSpec, tokens: "array[int]") -> list[int]:
    """Pages that a request with these tokens finds whenever it is let in, as long as they are pinned."""
    if not spec.cache_read or spec.params.prompt_logprobs is not None:
        return []
    return books.cache.index.match(tokens, spec.cache_salt, (len(tokens) - 1) // books.page_size)


def num_shared(books: Books, sequence: Sequence, pinned: Container[int]) -> int:
    """Pages among ``pinned`` that a live sequence holds, or finds when it is let in, also a second time."""
    spec = sequence.request.spec
    pages = pages_found(books, spec, sequence.tokens)
    if sequence.place != Place.QUEUE:
        # It may have computed some of these itself, before they were to be found: then it holds its own.
        leader = sequence.request.leader if sequence.place == Place.SIBLING else None
        held = set((leader or sequence).pages)
        pages = [page for page in pages if page in held]
    return sum([page in pinned for page in pages])
