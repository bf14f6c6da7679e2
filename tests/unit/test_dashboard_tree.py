"""The tree of the prefix cache as it is drawn, and ghosts: pages that were evicted."""

import numpy as np

from dashboard import demo_messages
from dashboard.demo_pool import DemoPool
from dashboard.ghosts import Ghost, Ghosts
from dashboard.tree import NO_PAGE, build_tree
from kvatlas.v1 import cache_pb2 as pb
from tests.demo_map import live_map

SEALED, PINNED = pb.PAGE_FLAG_SEALED, pb.PAGE_FLAG_PINNED


def planes_of(parents: dict[int, int | None], count: int = 32) -> dict[str, np.ndarray]:
    planes = {
        "flags": np.zeros(count, np.uint8),
        "ref_counts": np.zeros(count, np.uint16),
        "hit_counts": np.zeros(count, np.uint16),
        "parent_page_ids": np.full(count, NO_PAGE, np.uint32),
        "used_ms": np.zeros(count, np.uint32),
        "fingerprints": np.arange(count).astype(np.uint64) + 100,
    }
    for page, parent in parents.items():
        planes["flags"][page] = SEALED
        planes["parent_page_ids"][page] = NO_PAGE if parent is None else parent
    return planes


def test_a_run_of_pages_without_a_branch_is_one_node() -> None:
    #  5 → 9 → 2 ┬→ 7 → 1
    #            └→ 8        and 30 alone
    planes = planes_of({5: None, 9: 5, 2: 9, 7: 2, 1: 7, 8: 2, 30: None})
    planes["hit_counts"][9] = 4
    planes["used_ms"][[5, 2]] = (100, 900)
    tree = build_tree(planes, uptime_ms=1000)
    by_page = {node.page: node for node in tree.nodes}
    assert {page: (node.pages, node.weight) for page, node in by_page.items()} == {
        5: (3, 6),
        7: (2, 2),
        8: (1, 1),
        30: (1, 1),
    }
    assert by_page[7].parent == by_page[8].parent == by_page[5].id
    assert by_page[5].hits == 4
    assert by_page[5].idle_ms == 100
    assert by_page[5].fingerprint == f"{102:016x}", "of its last page"
    assert (tree.num_pages, tree.num_roots, tree.depth) == (7, 2, 5)


def test_the_tree_of_a_pool_holds_each_sealed_page_once() -> None:
    pool = DemoPool(400, seed=3).run(25)
    tree = build_tree(pool.planes, pool.now_ms - pool.epoch // 1_000_000)
    sealed = int((pool.planes["flags"] & SEALED).astype(bool).sum())
    assert sum(node.pages for node in tree.nodes) == sealed == tree.num_pages
    assert sum(node.weight for node in tree.nodes if node.parent is None) == sealed
    longest = 0
    for page in np.flatnonzero(pool.planes["flags"] & SEALED):
        depth, at = 1, int(page)
        while (at := int(pool.planes["parent_page_ids"][at])) != NO_PAGE:
            depth += 1
        longest = max(longest, depth)
    assert tree.depth == longest


def test_what_is_too_small_to_draw_is_gathered() -> None:
    pool = DemoPool(400, seed=3).run(25)
    whole = build_tree(pool.planes, 0)
    few = build_tree(pool.planes, 0, max_nodes=5)
    assert len([node for node in few.nodes if not node.is_rest]) == 5
    total = sum(node.weight for node in whole.nodes if node.parent is None)
    assert sum(node.weight for node in few.nodes if node.parent is None) == total
    names = {node.id for node in few.nodes}
    assert all(node.parent is None or node.parent in names for node in few.nodes)


def test_ghosts_hang_where_they_continued() -> None:
    planes = planes_of({5: None, 9: 5})
    gone = [Ghost(1, 109, 4000.0, 2, True), Ghost(2, 1, 3000.0, 0, True), Ghost(3, 0, 1000.0, 1, True)]
    lost = Ghost(4, 77, 1000.0, 0, True)  # nobody knows what it continued
    tree = build_tree(planes, 0, [*gone, lost], clock_ms=5000.0)
    ghosts = {node.parent: node for node in tree.nodes if node.is_ghost}
    assert ghosts.keys() == {"p5", None}
    assert (ghosts["p5"].pages, ghosts["p5"].returns, ghosts["p5"].idle_ms) == (2, 2, 1000)


def test_only_pinned_prefixes_where_asked() -> None:
    planes = planes_of({5: None, 9: 5, 20: None})
    planes["flags"][[5, 9]] |= PINNED
    tree = build_tree(planes, 0, is_pinned_only=True)
    assert [(node.page, node.pages, node.is_pinned) for node in tree.nodes] == [(5, 2, True)]
    assert build_tree(planes_of({}), 0).nodes == ()


def test_a_ghost_that_comes_back_is_counted_and_the_oldest_is_forgotten() -> None:
    ghosts = Ghosts(2)
    ghosts.leave(1, 0, 10.0)
    ghosts.enter([1, 99])
    assert (ghosts.returns_of(1), list(ghosts.gone())) == (1, [])
    ghosts.leave(1, 0, 20.0)
    ghosts.leave(2, 1, 30.0)
    assert [(ghost.fingerprint, ghost.returns) for ghost in ghosts.gone()] == [(2, 0), (1, 1)]
    ghosts.leave(3, 0, 40.0)
    assert [ghost.fingerprint for ghost in ghosts.gone()] == [3, 2]


def test_ghosts_follow_the_evictions_of_a_pool() -> None:
    pool = DemoPool(160, seed=5).run(10)
    live = live_map(pool)
    number = pool.number
    for _ in range(100):
        pool.run(0.3)
        live.apply(demo_messages.delta(pool, number))
        number = pool.number
    gone = {ghost.fingerprint for ghost in live.ghosts.gone()}
    present = set(pool.planes["fingerprints"].tolist())
    assert gone
    assert not gone & present
    assert len(live.ghosts) <= pool.page_count
