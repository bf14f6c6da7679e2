"""What a change of a prefix index leaves behind, whichever of its methods made it, in both kinds of index."""

from array import array
from collections.abc import Callable

import pytest

from worker.pages.evicted_prefixes import EvictedPrefixes
from worker.pages.fingerprint import Fingerprinter
from worker.pages.marked_prefixes import MarkedPrefixes
from worker.pages.prefix_trie import MissCounts, PrefixIndex, PrefixTrie

SIZE = 2


def trie() -> PrefixIndex:
    return PrefixTrie(16, SIZE, Fingerprinter(b"key"), 5)


def marks() -> PrefixIndex:
    return MarkedPrefixes(16, SIZE, 5)


BOTH = pytest.mark.parametrize("make", [trie, marks])


def ids(*pages: int) -> "array[int]":
    """Tokens of whole pages; the last token of each is its mark."""
    return array("I", [part for page in pages for part in (1000 + page, page)])


def raw(*pages: int) -> bytes:
    return ids(*pages).tobytes()


CHANGES: dict[str, Callable[[PrefixIndex], object]] = {
    "insert": lambda index: index.insert(3, 2, b"", raw(3)),
    "insert_run": lambda index: index.insert_run([3, 4], 2, b"", raw(3, 4)),
    "insert_each": lambda index: index.insert_each([3, 4], [2, b""], [raw(3), raw(4)]),
    "evict": lambda index: index.evict([2, 1]),
    "remove": lambda index: index.remove(2, remember=False),
    "remove as evicted": lambda index: index.remove(2, remember=True),
}


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_found_is_of_another_version_after_any_change(
    make: Callable[[], PrefixIndex], change: str
) -> None:
    """A look-up that is kept would else give pages that have left, or miss those that came."""
    index = make()
    index.insert_run([1, 2], None, b"", raw(1, 2))
    version, found = index.version, index.match(ids(1, 2, 3), b"", 3)
    assert found == [1, 2]
    CHANGES[change](index)
    assert index.version != version
    assert index.check() == []


@BOTH
def test_pages_enter_alike_one_by_one_in_a_run_and_with_others(make: Callable[[], PrefixIndex]) -> None:
    alone, run, each = make(), make(), make()
    for page, parent in ((1, None), (2, 1), (3, 2)):
        assert alone.insert(page, parent, b"s", raw(page)) == page
        assert each.insert_each([page], [b"s" if parent is None else parent], [raw(page)]) == [
            alone.fingerprint(page)
        ]
    told = run.insert_run([1], None, b"s", raw(1)) + run.insert_run([2, 3], 1, b"s", raw(2, 3))
    assert told == [alone.fingerprint(page) for page in (1, 2, 3)]
    for index in (run, each):
        assert index.keys(range(16)) == alone.keys(range(16))
        for page in (1, 2, 3):
            assert (index.depth(page), index.has_children(page)) == (page, page < 3)
            assert index.fingerprint(page) == alone.fingerprint(page)
        assert index.pages() == [3, 2, 1], "children first"
        assert index.match(ids(1, 2, 3), b"s", 9) == [1, 2, 3]
        assert index.check() == []


@BOTH
@pytest.mark.parametrize("how", ["one by one", "in a run", "with others"])
def test_what_is_cached_again_was_not_evicted_when_it_is_flushed(
    make: Callable[[], PrefixIndex], how: str
) -> None:
    index = make()
    index.insert_run([1, 2], None, b"", raw(1, 2))
    index.evict([2, 1])
    assert index.classify(ids(1, 2, 3), b"", [], 3) == MissCounts(1, 2)
    if how == "one by one":
        index.insert(5, None, b"", raw(1))
    elif how == "in a run":
        index.insert_run([5], None, b"", raw(1))
    else:
        index.insert_each([5], [b""], [raw(1)])
    assert index.classify(ids(1, 2, 3), b"", [5], 3) == MissCounts(1, 1)
    index.remove(5, remember=False)
    assert index.classify(ids(1, 2, 3), b"", [], 3) == MissCounts(3, 0)


@BOTH
def test_of_many_that_are_evicted_at_once_the_last_are_remembered(make: Callable[[], PrefixIndex]) -> None:
    index = make()
    index.insert_run(range(1, 8), None, b"", raw(*range(1, 8)))
    index.evict(range(7, 0, -1))
    found = [index.classify(ids(*range(1, 8)), b"", [], count) for count in range(8)]
    assert found == [MissCounts(count - min(count, 5), min(count, 5)) for count in range(8)]


@BOTH
def test_no_more_is_classified_than_there_are_tokens_for(make: Callable[[], PrefixIndex]) -> None:
    index = make()
    index.insert_run([1, 2], None, b"", raw(1, 2))
    index.evict([2, 1])
    tokens = ids(1, 2)[:-1]
    assert index.classify(tokens, b"", [], 1) == MissCounts(0, 1)
    assert index.classify(ids(1, 2), b"", [], 1) == MissCounts(0, 1), "the rest was not asked for"


@BOTH
def test_a_parent_is_a_leaf_when_its_last_child_has_left(make: Callable[[], PrefixIndex]) -> None:
    index = make()
    index.insert(1, None, b"", raw(1))
    for page in (2, 3):
        index.insert(page, 1, b"", raw(page))
    assert [index.remove(page, remember=True) for page in (2, 3, 1)] == [None, 1, None]


def test_a_place_of_the_memory_that_is_written_over_forgets_only_what_it_held_last() -> None:
    """A prefix that was cached and evicted again stands in a later place."""
    memory = EvictedPrefixes(4)
    memory.add_all((1, 2))
    memory.discard_all((1,))
    memory.add_all((1, 3, 4))  # the last one over the first place of 1
    assert [mark in memory for mark in (1, 2, 3, 4)] == [True] * 4
    memory.add_all((5, 6))  # over 2, and over the second place of 1
    assert [mark in memory for mark in range(1, 7)] == [False, False, True, True, True, True]
