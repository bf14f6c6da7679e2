"""Fills a cache with what was cached when the recording began, whatever the new page size.

A cached page is known by its key alone. Where a request of the trace has the same prefix, the keys inside the
page are known, too; where none has, nobody will ask for it and stand-ins do.
"""

from array import array
from collections.abc import Mapping, Sequence

from worker.pages.page_cache import PageCache
from worker.trace.marks import Marks
from worker.trace.workload import CachedPage, Trace

OWNER = 1


def cached_prefixes(trace: Trace, marks: Marks) -> "list[array[int]]":
    """Marks of each cached prefix, the one used last at the end."""
    if not trace.cached:
        return []
    pages = {page.key: page for page in trace.cached}
    inside = _marks_inside(trace, marks)
    found = []
    for last in _ends(trace):
        tokens = array("I")
        for page in _path(last, pages):
            tokens.frombytes(inside[page.key])
        found.append(tokens)
    return found


def fill_cache(cache: PageCache, prefixes: "Sequence[array[int]]") -> None:
    """Enters each prefix as a sequence would leave it."""
    for tokens in prefixes:
        _enter(cache, tokens)


def _ends(trace: Trace) -> list[CachedPage]:
    """Where some prefix ended when it was used last: leaves, and pages used after all that hangs on them."""
    newest: dict[int, int] = {}  # use of the children, by key of the parent
    for page in trace.cached:
        if page.parent is not None:
            newest[page.parent] = max(newest.get(page.parent, -1), page.used_ms)
    found = [page for page in trace.cached if page.used_ms > newest.get(page.key, -1)]
    return sorted(found, key=lambda page: page.used_ms)


def _path(last: CachedPage, pages: Mapping[int, CachedPage]) -> list[CachedPage]:
    path = [last]
    while path[-1].parent is not None and path[-1].parent in pages:
        path.append(pages[path[-1].parent])
    return path[::-1]


def _marks_inside(trace: Trace, marks: Marks) -> dict[int, bytes]:
    """Marks of each whole cached page, by the key at its end: fresh ones where no request knows the keys."""
    per_page = trace.page_size // trace.granularity
    found = {page.key: b"" for page in trace.cached}
    for request in trace.requests:
        keys = request.keys
        for end in range(per_page, len(keys) + 1, per_page):
            if found.get(keys[end - 1]) == b"":
                found[keys[end - 1]] = marks.of(keys[end - per_page : end])
    num_units = per_page * marks.per_key
    return {key: known or array("I", marks.fresh(num_units)).tobytes() for key, known in found.items()}


def _enter(cache: PageCache, tokens: "array[int]") -> None:
    size = cache.config.page_size
    num_pages = min(len(tokens) // size, cache.config.num_pages)
    pages = cache.lookup(tokens, b"", num_pages).pages
    cache.acquire(pages, OWNER, is_hit=False)
    fresh = cache.allocate(array("H", (OWNER,)) * (num_pages - len(pages)))
    assert fresh is not None, "nothing else is held"
    for page in fresh:
        first = len(pages) * size
        parent = pages[-1] if pages else None
        cache.seal(page, parent, b"", tokens[first : first + size].tobytes(), OWNER)
        pages.append(page)
    cache.release(pages, OWNER)
