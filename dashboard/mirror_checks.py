"""Checks of the copy that the dashboard holds: they need nothing but the copy itself."""

from dataclasses import dataclass

import numpy as np

from kvatlas.client.page_map import STATE_NAMES, PageMap
from kvatlas.v1 import cache_pb2 as pb

NO_PAGE = 0xFFFFFFFF
MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class MirrorCheck:
    """One check, done now. `pages` are those where it does not hold, the first 20."""

    name: str
    num_faults: int
    pages: tuple[int, ...]
    words: str


def check_mirror(page_map: PageMap) -> list[MirrorCheck]:
    """All of them; call it while nothing changes the map."""
    planes = page_map.planes
    states = planes["states"]
    free = states == pb.PAGE_STATE_FREE
    sealed = (planes["flags"].astype(np.int64) & pb.PAGE_FLAG_SEALED) != 0
    parents = planes["parent_page_ids"].astype(np.int64)
    has_parent = sealed & (parents != NO_PAGE)
    is_orphan = np.zeros(len(states), bool)
    is_orphan[has_parent] = ~sealed[np.minimum(parents[has_parent], len(states) - 1)]
    held = _held(page_map)
    is_owned = free & ((planes["owners"] != 0) | (planes["ref_counts"] != 0) | (parents != NO_PAGE))
    known = np.isin(states, list(STATE_NAMES))
    stats = page_map.stats
    told = stats.free_pages + stats.active_pages + stats.cached_pages + stats.pinned_pages
    checks = [
        _check("sum", ~known, "every page has a state"),
        _check("references", held != planes["ref_counts"], "references are the sequences that list the page"),
        _check("owners", is_owned, "free pages have no owner, no references, no parent"),
        _check("parents", is_orphan, "the parent of a sealed page is sealed"),
    ]
    if told + stats.reserved_pages != page_map.page_count:
        words = f"totals say {told + stats.reserved_pages} pages of {page_map.page_count}"
        checks[0] = MirrorCheck("sum", 1, (), words)
    return checks


def _held(page_map: PageMap) -> np.ndarray:
    """References of each page, counted in the page lists; saturated as the plane is."""
    lists = [each.page_ids for each in page_map.sequences.values()]
    pages = np.concatenate([*lists, np.empty(0, np.uint32)]).astype(np.int64)
    return np.minimum(np.bincount(pages, minlength=page_map.page_count), 65535)


def _check(name: str, is_wrong: np.ndarray, words: str) -> MirrorCheck:
    wrong = np.flatnonzero(is_wrong)
    return MirrorCheck(name, len(wrong), tuple(wrong[:MAX_SHOWN].tolist()), words)
