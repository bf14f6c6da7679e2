"""Fills a cache with what was cached when the recording began, whatever the new page size.

A cached page is known by its key alone. Where a request of the trace has the same prefix, the keys inside the
page are known, too; where none has, nobody will ask for it and stand-ins do.
"""

from array import array
from collections.abc import Mapping

from worker.pages.page_cache import PageCache
from worker.trace.workload import CachedPage, Trace, stand_in_tokens

OWNER = 1


def fill_cache(cache: PageCache, trace: Trace, resolution: int = 1) -> None:
    """Enters each cached prefix as a sequence would leave it, the one used last at the end."""
    pages = {page.key: page for page in trace.cached}
    inner = _keys_inside(trace)
    for last in _ends(trace):
        keys = array("Q")
        for page in _path(last, pages):
            keys.extend(
                inner.get(page.key) or array("Q", [page.key]) * (trace.page_size // trace.granularity)
            )
        _enter(cache, stand_in_tokens(keys, trace.granularity // resolution))


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


def _keys_inside(trace: Trace) -> dict[int, "array[int]"]:
    """Keys of each whole page that the requests know, by the key at its end."""
    per_page = trace.page_size // trace.granularity
    found = {}
    wanted = {page.key for page in trace.cached}
    for request in trace.requests:
        keys = request.keys
        for end in range(per_page, len(keys) + 1, per_page):
            if keys[end - 1] in wanted:
                found[keys[end - 1]] = keys[end - per_page : end]
    return found


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
