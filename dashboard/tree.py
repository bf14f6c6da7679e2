"""The prefix tree as nodes that can be drawn: runs of sealed pages without a branch, and ghosts.

Pure: planes and ghosts in, nodes out. A run is one node, so that a long prompt is one rectangle. All steps
over pages are vectorized; only runs are walked one by one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dashboard.ghosts import Ghost
from kvatlas.v1 import cache_pb2 as pb

PLANES = ("flags", "ref_counts", "hit_counts", "parent_page_ids", "used_ms", "fingerprints")
"""What a tree is made of."""
NO_PAGE = 0xFFFFFFFF
MAX_NODES = 2000
MAX_GHOSTS = 5000


@dataclass(frozen=True, slots=True)
class Node:
    """One rectangle."""

    id: str
    parent: str | None
    pages: int  # of the run itself
    weight: int  # of it and all below it
    page: int | None  # its first
    hits: int = 0
    refs: int = 0
    idle_ms: int = 0
    fingerprint: str = ""  # of its last page
    is_pinned: bool = False
    is_ghost: bool = False
    is_rest: bool = False  # gathers what is not drawn
    returns: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """All of it, in figures; the nodes in order of weight."""

    nodes: tuple[Node, ...]
    num_pages: int
    num_roots: int
    depth: int  # pages of the longest prefix


@dataclass(frozen=True, slots=True)
class _Runs:
    """Sealed pages by run. `head` is the first page of each page's run."""

    pages: NDArray[np.int64]  # sealed
    parent: NDArray[np.int64]  # [page_count]: sealed parent, or the page itself where it has none
    head: NDArray[np.int64]  # [page_count]
    depth: NDArray[np.int64]  # [page_count]: pages before it in its prefix


def build_tree(
    planes: Mapping[str, NDArray[np.generic]],
    uptime_ms: int,
    ghosts: Iterable[Ghost] = (),
    clock_ms: float = 0.0,
    *,
    is_pinned_only: bool = False,
    max_nodes: int = MAX_NODES,
) -> Tree:
    """The tree of all sealed pages, or of pinned prefixes."""
    wanted = pb.PAGE_FLAG_PINNED if is_pinned_only else pb.PAGE_FLAG_SEALED
    runs = _find_runs(planes, wanted)
    if not len(runs.pages):
        return Tree((), 0, 0, 0)
    nodes = _nodes_of(runs, planes, uptime_ms)
    ghost_nodes = [] if is_pinned_only else _ghost_nodes(runs, planes, ghosts, clock_ms)
    kept = _gather(_weigh([*nodes, *ghost_nodes]), max_nodes)
    roots = sum(1 for node in nodes if node.parent is None)
    return Tree(tuple(kept), len(runs.pages), roots, int(runs.depth[runs.pages].max()) + 1)


def _find_runs(planes: Mapping[str, NDArray[np.generic]], wanted: int) -> _Runs:
    flags = planes["flags"].astype(np.int64)
    is_in = (flags & wanted) == wanted
    count = len(flags)
    own = np.arange(count)
    parents = planes["parent_page_ids"].astype(np.int64)
    has_parent = is_in & (parents < count)
    has_parent[has_parent] = is_in[parents[has_parent]]
    parent = np.where(has_parent, parents, own)
    num_children = np.bincount(parent[has_parent], minlength=count)
    starts = ~has_parent | (num_children[parent] != 1)
    head, depth, above = np.where(starts, own, parent), has_parent.astype(np.int64), parent.copy()
    while True:  # pointers jump twice as far in each turn
        next_head, next_above = head[head], above[above]
        depth = depth + depth[above]
        if (next_head == head).all() and (next_above == above).all():
            return _Runs(np.flatnonzero(is_in), parent, head, depth)
        head, above = next_head, next_above


def _nodes_of(runs: _Runs, planes: Mapping[str, NDArray[np.generic]], uptime_ms: int) -> list[Node]:
    heads, which = np.unique(runs.head[runs.pages], return_inverse=True)
    sizes = np.bincount(which)

    def most(name: str) -> NDArray[np.int64]:
        values = np.zeros(len(heads), np.int64)
        np.maximum.at(values, which, planes[name][runs.pages].astype(np.int64))
        return values

    idle = np.uint32(uptime_ms) - planes["used_ms"][runs.pages].astype(np.uint32)
    least_idle = np.full(len(heads), 2**32, np.int64)
    np.minimum.at(least_idle, which, idle.astype(np.int64))
    hits, refs, flags = most("hit_counts"), most("ref_counts"), most("flags")
    last = _last_pages(runs, which, len(heads))
    above = runs.parent[heads]
    is_root = above == heads
    return [
        Node(
            id=f"p{head}",
            parent=None if is_root[at] else f"p{runs.head[above[at]]}",
            pages=int(sizes[at]),
            weight=int(sizes[at]),
            page=int(head),
            hits=int(hits[at]),
            refs=int(refs[at]),
            idle_ms=int(least_idle[at]),
            fingerprint=f"{int(planes['fingerprints'][last[at]]):016x}",
            is_pinned=bool(flags[at] & pb.PAGE_FLAG_PINNED),
        )
        for at, head in enumerate(heads.tolist())
    ]


def _last_pages(runs: _Runs, which: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The deepest page of each run."""
    order = np.argsort(runs.depth[runs.pages], kind="stable")
    last = np.zeros(count, np.int64)
    last[which[order]] = runs.pages[order]  # the last write of each run wins
    return last


def _ghost_nodes(
    runs: _Runs, planes: Mapping[str, NDArray[np.generic]], ghosts: Iterable[Ghost], clock_ms: float
) -> list[Node]:
    """Evicted pages, gathered by the run that they continued."""
    prints = planes["fingerprints"][runs.pages].tolist()
    page_of = dict(zip(prints, runs.pages.tolist(), strict=True))
    known = {}
    for _, ghost in zip(range(MAX_GHOSTS), ghosts, strict=False):
        known[ghost.fingerprint] = ghost
    groups: dict[str | None, list[Ghost]] = {}
    for ghost in known.values():
        above = ghost
        while above.parent_fingerprint in known:
            above = known[above.parent_fingerprint]
        if above.parent_fingerprint in page_of:
            page = page_of[above.parent_fingerprint]
            groups.setdefault(f"p{runs.head[page]}", []).append(ghost)
        elif not above.parent_fingerprint:
            groups.setdefault(None, []).append(ghost)
    return [
        Node(
            id=f"g{parent}",
            parent=parent,
            pages=len(group),
            weight=len(group),
            page=None,
            idle_ms=max(0, int(clock_ms - max(ghost.evicted_ms for ghost in group))),
            fingerprint=f"{group[0].fingerprint:016x}",
            is_ghost=True,
            returns=max(ghost.returns for ghost in group),
        )
        for parent, group in groups.items()
    ]


def _weigh(nodes: list[Node]) -> list[tuple[Node, int]]:
    """Each node with the pages of its whole subtree, heaviest first, parents before children."""
    by_id = {node.id: node for node in nodes}
    level: dict[str, int] = {}
    for node in nodes:
        path = []
        at: Node | None = node
        while at is not None and at.id not in level:
            path.append(at)
            at = by_id.get(at.parent) if at.parent is not None else None
        depth = level[at.id] if at is not None else -1
        for each in reversed(path):
            depth += 1
            level[each.id] = depth
    weight = {node.id: node.pages for node in nodes}
    for node in sorted(nodes, key=lambda each: -level[each.id]):
        if node.parent in weight:
            weight[node.parent] += weight[node.id]
    return [
        (node, weight[node.id]) for node in sorted(nodes, key=lambda each: (-weight[each.id], level[each.id]))
    ]


def _gather(weighed: list[tuple[Node, int]], max_nodes: int) -> list[Node]:
    """The heaviest nodes, and one for the rest below each of them."""
    kept = [_with_weight(node, weight) for node, weight in weighed[:max_nodes]]
    names = {node.id for node in kept}
    rest: dict[str | None, int] = {}
    for node, weight in weighed[max_nodes:]:
        if node.parent is None or node.parent in names:
            rest[node.parent] = rest.get(node.parent, 0) + weight
    return kept + [
        Node(id=f"r{parent}", parent=parent, pages=pages, weight=pages, page=None, is_rest=True)
        for parent, pages in rest.items()
    ]


def _with_weight(node: Node, weight: int) -> Node:
    values = {name: getattr(node, name) for name in Node.__slots__}
    return Node(**{**values, "weight": weight})
