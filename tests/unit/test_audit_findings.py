"""The audit finds each thing that it looks for, in books that were broken on purpose.

Sequence 1 decodes on pages 0, 1 and 2, sequence 2 on 3, 4 and 5; of each the first two are sealed. Sequence 3
waits for a row. The pages from 6 on are free, and page 20 is the dummy page.
"""

from collections.abc import Callable

import pytest

from worker.execution.fake_runner import FakeModel
from worker.execution.testing import Harness, numbers, small_config
from worker.ids import Owner, Row, SequenceId
from worker.pages.events import PageState
from worker.pages.prefix_trie import PrefixTrie
from worker.scheduling.audit import Auditor
from worker.scheduling.books import Books
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams

Damage = Callable[[Books], object]


def sound_books() -> Books:
    harness = Harness(small_config(num_pages=20, max_running=2), FakeModel(1000), audit=False)
    for number in (1, 2, 3):
        harness.add(RequestSpec(SequenceId(number), numbers(50 * number, 10), SamplingParams(max_tokens=9)))
    for _ in range(2):
        harness.turn()
    assert harness.scheduler.check() == []
    return harness.scheduler._books


def break_pool(column: str, page: int, value: int) -> Damage:
    return lambda books: getattr(books.cache.pool, column).__setitem__(page, value)


def break_total(total: str) -> Damage:
    return lambda books: setattr(books.cache.pool, total, getattr(books.cache.pool, total) + 1)


def break_sequence(number: int, field: str, value: object) -> Damage:
    return lambda books: setattr(books.sequences[SequenceId(number)], field, value)


def index_of(books: Books) -> PrefixTrie:
    assert isinstance(books.cache.index, PrefixTrie)
    return books.cache.index


def twice_on_the_free_list(books: Books) -> None:
    books.cache.pool._free[0] = books.cache.pool._free[1]


def pin_that_the_pool_does_not_know(books: Books) -> None:
    books.cache._pin_counts[1] = 1


def key_of_another_page(books: Books) -> None:
    keys = index_of(books)._keys
    keys[1] = keys[4]


def node_without_a_page(books: Books) -> None:
    index_of(books)._pages[b"", b"other"] = 1


def node_of_another_page(books: Books) -> None:
    key = index_of(books).key(1)
    assert key is not None
    index_of(books)._pages[key] = 4


def children_of(page: int) -> Damage:
    return lambda books: index_of(books)._num_children.__setitem__(page, 2)


def other_page_edges(books: Books) -> None:
    books.batch._edges.reverse()


def listed_at_a_second_edge(books: Books) -> None:
    books.batch._edges[0][books.batch.sequences[0]] = None


def no_last_step(books: Books) -> None:
    del books.batch._lasts[8][books.batch.sequences[0]]


def not_launched(books: Books) -> None:
    books.batch.starts[0] = 10


ACTIVE, RESERVED = PageState.ACTIVE, PageState.RESERVED


FINDINGS: dict[str, Damage] = {
    "state_sum: CACHED: expected 1, found 0": break_pool("_counts", PageState.CACHED, 1),
    "state_sum: free + cached + pinned + held: expected 20, found 21": break_pool(
        "_counts", PageState.CACHED, 1
    ),
    "state_sum: pages that rows hold: expected 6, found 7": break_pool("_counts", ACTIVE, 7),
    "refcount: references over all pages: expected 7, found 6": break_total("_num_references"),
    "refcount: references over all rows: expected 6, found 7": break_total("_num_references"),
    "refcount: shared pages: expected 1, found 0": break_total("_num_shared"),
    "refcount: references of page 9, state 1: expected 0, found 1": break_pool("_refs", 9, 1),
    "refcount: references of page 9: expected 0, found 1": break_pool("_refs", 9, 1),
    "refcount: references of page 2, state 2: expected some, found 0": break_pool("_refs", 2, 0),
    "page_table: references of page 2 of sequence 1: expected some, found 0": break_pool("_refs", 2, 0),
    "refcount: references of page 0, parent of 1, at least: expected 2, found 1": break_pool("_refs", 1, 2),
    "state_sum: flags of page 9, state 1: expected 0, found 1": break_pool("_flags", 9, 1),
    "state_sum: flags of page 2, state 2: expected 3, found 2": break_pool("_flags", 2, 2),
    "trie: page 2 in the index: expected True, found False": break_pool("_flags", 2, 1),
    "trie: page 2 of sequence 1: expected not sealed, found sealed": break_pool("_flags", 2, 1),
    "trie: page 1 in the index: expected False, found True": break_pool("_flags", 1, 0),
    "trie: pin of page 1: expected False, found True": break_pool("_flags", 1, 3),
    "trie: pin of page 1: expected True, found False": pin_that_the_pool_does_not_know,
    "state_sum: page 9 as the dummy page: expected False, found True": break_pool("_states", 9, RESERVED),
    "state_sum: page 20 as the dummy page: expected True, found False": break_pool("_states", 20, ACTIVE),
    "free_list: entries: expected 14, found 13": lambda books: books.cache.pool._free.pop(),
    "free_list: slots: expected [76], found []": twice_on_the_free_list,
    "trie: page 2, which has children: expected in the index, found not": children_of(2),
    "trie: children of page 0: expected 1, found 2": children_of(0),
    "trie: page under the key of 1: expected 1, found 4": key_of_another_page,
    (
        "trie: key of page 1 of sequence 1: expected its tokens after page 0, found other tokens after page 3"
    ): key_of_another_page,
    "trie: nodes and pages that stand in one: expected 5, found 4": node_without_a_page,
    "page_table: rows in use that differ: expected 2, found 1": break_sequence(2, "row", 0),
    "page_table: row: expected 0 .. 1, found 2": break_sequence(2, "row", 2),
    "page_table: rows in use: expected 1, found 2": lambda books: books.rows.give_back(Row(0), Owner(1)),
    "page_table: pages of sequence 3, which waits: expected 0, found 1": break_sequence(3, "pages", [9]),
    "page_table: owner number of sequence 3, which waits: expected 0, found 3": break_sequence(3, "owner", 3),
    "page_table: pages of sequence 1 that differ: expected 3, found 2": break_sequence(1, "pages", [0, 1, 0]),
    "page_table: references of page 20 of sequence 1: expected some, found 0": break_sequence(
        1, "pages", [0, 1, 20]
    ),
    "page_table: pages of sequence 1: expected 3, found 2": break_sequence(1, "pages", [0, 1]),
    (
        "page_table: tokens of sequence 1: sealed, computed, launched, at most: "
        "expected not falling, found 12, 11, 11, 12"
    ): break_sequence(1, "num_sealed", 3),
    (
        "page_table: tokens of sequence 1: sealed, computed, launched, at most: "
        "expected not falling, found 8, 11, 10, 12"
    ): not_launched,
    "page_table: index and place of sequence 1: expected (0, 'BATCH'), found (1, 'BATCH')": break_sequence(
        1, "batch_index", 1
    ),
    (
        "page_table: sequence 1 at position 11 in the list of its page edge: expected True, found False"
    ): other_page_edges,
    "page_table: sequences in lists of page edges: expected 2, found 3": listed_at_a_second_edge,
    (
        "page_table: sequence 1 at position 11 in the list of its last step: expected True, found False"
    ): no_last_step,
    "page_table: sequences in lists of last steps: expected 2, found 1": no_last_step,
}


@pytest.mark.parametrize("sentence", FINDINGS)
def test_what_is_broken_is_found_by_name_with_both_sides(sentence: str) -> None:
    """S1-34, S1-35: and no finding says that what it found is what it expected."""
    books = sound_books()
    FINDINGS[sentence](books)
    found = Auditor(books).check()
    assert sentence in {str(violation) for violation in found}
    assert all(violation.expected != violation.actual for violation in found)


@pytest.mark.parametrize("slot", [9 * 4 + 1, 2 * 4])
def test_a_wrong_entry_of_the_free_list_is_found_in_a_short_round(slot: int) -> None:
    """Not the first slot of a page, and a page in use; in the part of the list that the round looks at."""
    books = sound_books()
    auditor = Auditor(books)
    books.cache.pool._free[13] = slot
    assert [str(violation) for violation in auditor.check(max_pages=13)] == []
    assert [str(violation) for violation in auditor.check(max_pages=7)] == [
        f"free_list: slots of pages that are not FREE: expected [], found [{slot}]"
    ]


def test_a_short_round_looks_at_one_sequence_after_another() -> None:
    books = sound_books()
    for number in (1, 2):
        books.sequences[SequenceId(number)].num_sealed = 3
    auditor = Auditor(books)
    rounds = [[violation.subject for violation in auditor.check(max_pages=1)] for _ in range(3)]
    said = "tokens of sequence {}: sealed, computed, launched, at most"
    assert rounds == [[said.format(1)], [said.format(2)], []]
