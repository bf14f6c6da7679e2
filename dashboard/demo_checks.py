"""The books of a demo pool, checked: the invariants that a worker's audit names."""

from collections import Counter

import numpy as np

from dashboard.demo_pool import NO_PAGE, DemoPool
from dashboard.facts import CheckFacts, IntegrityFacts, ViolationFacts
from kvatlas.v1 import cache_pb2 as pb


def check_pool(pool: DemoPool) -> IntegrityFacts:
    """Every page, now."""
    found = {
        "state_sum": _state_sum(pool),
        "refcount": _refcount(pool),
        "free_list": _free_list(pool),
        "trie": _trie(pool),
    }
    now = pool.now_ms
    violations = tuple(
        ViolationFacts(name, subject, expected, actual, page, None, now)
        for name, rows in found.items()
        for subject, expected, actual, page in rows
    )
    checks = tuple(
        CheckFacts(name, int(not rows), len(rows), now, None if rows else now) for name, rows in found.items()
    )
    return IntegrityFacts(checks, violations, len(violations), None if violations else now, 0.0, 1)


_Rows = list[tuple[str, str, str, int | None]]  # subject, expected, found, page


def _state_sum(pool: DemoPool) -> _Rows:
    counted = int((pool.planes["states"] > 0).sum())
    return [] if counted == pool.page_count else [("states", str(pool.page_count), str(counted), None)]


def _refcount(pool: DemoPool) -> _Rows:
    held = Counter(page for each in pool.running for page in each.pages)
    counts = np.array([held[page] for page in range(pool.page_count)])
    wrong = np.flatnonzero(counts != pool.planes["ref_counts"])
    refs = pool.planes["ref_counts"]
    return [
        (f"references of page {page}", str(counts[page]), str(refs[page]), page) for page in wrong.tolist()
    ]


def _free_list(pool: DemoPool) -> _Rows:
    by_state = set(np.flatnonzero(pool.planes["states"] == pb.PAGE_STATE_FREE).tolist())
    wrong = sorted(by_state ^ set(pool.free))
    return [(f"page {page}", "free in both", "free in one", page) for page in wrong]


def _trie(pool: DemoPool) -> _Rows:
    rows: _Rows = []
    parents = pool.planes["parent_page_ids"]
    for key, page in pool.index.items():
        if int(pool.planes["fingerprints"][page]) != key:
            rows.append((f"key of page {page}", str(key), str(pool.planes["fingerprints"][page]), page))
        parent = int(parents[page])
        if parent != NO_PAGE and not pool.planes["flags"][parent] & pb.PAGE_FLAG_SEALED:
            rows.append((f"parent of page {page}", "sealed", "not sealed", page))
    return rows
