"""The audit while sequences run: rows on the device are those of the books, and what is wrong is seen."""

from collections.abc import Callable

import pytest

from tests.toy_scheduler import make, request
from worker.scheduling.books import Books


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_on_the_device_are_those_of_the_books(overlap: bool) -> None:
    """C.7: a row whose pages stand in another order than the host's list is found."""
    harness = make(overlap, num_pages=24, max_running=4)
    for number in range(1, 12):
        harness.add(request(number, [number % 2] * 9, max_tokens=8, temperature=1.0, seed=number))
    audited = 0
    while harness.scheduler.has_work(harness.now):
        harness.turn()
        harness.audit_rows(2)
        spans = harness.scheduler.row_spans(2, 8)
        assert len(spans) <= 2
        assert all(len(span.slots) <= 8 for span in spans)
        audited += len(spans)
    assert audited > 20
    harness.add(request(50, range(9), max_tokens=8))
    harness.turn()
    harness.settle()
    row = next(iter(harness.scheduler.row_spans(1, 1000))).row
    line = harness.runner.page_table[row]
    line[0:4], line[4:8] = line[4:8], line[0:4]
    with pytest.raises(AssertionError, match=f"row {row}: the device has"):
        harness.audit_rows()


def _lose_a_reference(books: Books) -> None:
    books.cache.pool._refs[next(iter(books.by_owner.values())).pages[0]] += 1


def _swap_pages(books: Books) -> None:
    first = next(iter(books.by_owner.values()))
    first.pages[0], first.pages[1] = first.pages[1], first.pages[0]


def _share_unnoticed(books: Books) -> None:
    first, second = list(books.by_owner.values())[:2]
    second.pages[2] = first.pages[2]


def _take_a_row_twice(books: Books) -> None:
    first, second = list(books.by_owner.values())[:2]
    second.row = first.row


def _free_under_use(books: Books) -> None:
    books.cache.pool._free.append(next(iter(books.by_owner.values())).pages[2] * 4)


def _forget_an_edge(books: Books) -> None:
    books.batch._edges = books.batch._edges[1:] + books.batch._edges[:1]


def _write_another_token(books: Books) -> None:
    next(iter(books.by_owner.values())).tokens[1] += 1


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (_lose_a_reference, "refcount"),
        (_swap_pages, "trie"),
        (_share_unnoticed, "refcount"),
        (_take_a_row_twice, "page_table"),
        (_free_under_use, "free_list"),
        (_forget_an_edge, "page_table"),
        (_write_another_token, "trie"),
    ],
)
def test_the_audit_sees_damage_while_sequences_run(damage: Callable[[Books], None], check: str) -> None:
    """H5, S1-35, S1-36: under load, by the name of the invariant, with both sides."""
    harness = make(num_pages=20)
    harness.add(request(1, range(10), max_tokens=9))
    harness.add(request(2, range(50, 60), max_tokens=9))
    for _ in range(2):
        harness.turn()
    assert harness.scheduler.check() == []
    damage(harness.scheduler._books)
    found = harness.scheduler.check()
    assert check in {violation.check for violation in found}
    assert all(str(violation).startswith(violation.check) for violation in found)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (_lose_a_reference, "refcount"),
        (_swap_pages, "trie"),
        (_free_under_use, "free_list"),
        (_write_another_token, "trie"),
    ],
)
def test_a_short_audit_sees_the_same_within_some_rounds(damage: Callable[[Books], None], check: str) -> None:
    """S1-36: under load a round looks at few pages, and goes on where the last one stopped."""
    harness = make(num_pages=20)
    for number in range(1, 6):
        harness.add(request(number, range(50 * number, 50 * number + 10), max_tokens=9))
    for _ in range(2):
        harness.turn()
    for _ in range(30):
        assert harness.scheduler.check(max_pages=3) == []
    damage(harness.scheduler._books)
    rounds = [harness.scheduler.check(max_pages=3) for _ in range(12)]
    assert check in {violation.check for found in rounds for violation in found}
