"""The prefix index of what-if, beside what tests/property/test_what_if_cache.py compares with the trie's."""

from array import array

import pytest

from worker.pages.marked_prefixes import MarkedPrefixes
from worker.pages.prefix_trie import MissCounts

SIZE = 2


def tokens(*marks: int) -> "array[int]":
    """Whole pages whose last ids are these; the ids before them are nobody's marks."""
    return array("I", [part for mark in marks for part in (1000 + mark, mark)])


def enter(index: MarkedPrefixes, page: int, parent: int | None, mark: int) -> int:
    return index.insert(page, parent, b"", tokens(mark).tobytes())


def missed(index: MarkedPrefixes, *marks: int) -> MissCounts:
    return index.classify(tokens(*marks), b"", [], len(marks))


def test_a_page_is_known_by_its_last_id() -> None:
    index = MarkedPrefixes(8, SIZE, 4)
    assert (enter(index, 3, None, 7), enter(index, 5, 3, 8)) == (3, 5)
    assert enter(index, 6, 3, 8) == 5, "the page that held it before"
    assert index.match(tokens(7, 8, 9), b"", 5) == [3, 5]
    assert index.match(tokens(7, 8, 9), b"", 1) == [3]
    assert (index.depth(5), index.has_children(3), index.fingerprint(5)) == (2, True, 8)
    assert index.pages() == [5, 3]
    assert index.check() == []


def test_only_the_latest_evictions_are_remembered() -> None:
    index = MarkedPrefixes(8, SIZE, 3)
    for mark in range(100):
        enter(index, mark % 8, None, mark)
        index.evict([mark % 8])
        assert len(index._evictions) <= 2 * 3 + 1
        remembered = [known for known in range(mark + 1) if missed(index, known).num_evicted]
        assert remembered == list(range(max(0, mark - 2), mark + 1))
    assert missed(MarkedPrefixes(8, SIZE, 0), 1) == MissCounts(1, 0)


def test_a_flushed_prefix_counts_as_cold_even_if_it_was_evicted_before() -> None:
    index = MarkedPrefixes(8, SIZE, 3)
    enter(index, 0, None, 7)
    index.evict([0])
    assert missed(index, 7, 8) == MissCounts(num_cold=1, num_evicted=1)
    enter(index, 1, None, 7)
    index.remove(1, remember=False)
    assert missed(index, 7, 8) == MissCounts(num_cold=2, num_evicted=0)


def test_only_leaves_leave() -> None:
    index = MarkedPrefixes(8, SIZE, 3)
    enter(index, 0, None, 7)
    enter(index, 1, 0, 8)
    with pytest.raises(AssertionError, match="page 0 has 1 children"):
        index.evict([0])
    assert index.remove(1, remember=True) == 0, "a leaf now"
    assert index.remove(0, remember=True) is None
    with pytest.raises(AssertionError, match="page 0 is not in the index"):
        index.evict([0])


def test_a_page_that_is_not_full_is_no_node() -> None:
    index = MarkedPrefixes(8, SIZE, 3)
    with pytest.raises(AssertionError, match="not full"):
        index.insert_run([0, 1], None, b"", tokens(7).tobytes())


def test_the_audit_names_what_differs() -> None:
    index = MarkedPrefixes(8, SIZE, 3)
    enter(index, 2, None, 7)
    index._pages[7] = 3
    index._num_children[2] = 1
    assert [violation.page for violation in index.check()] == [2, 2]
