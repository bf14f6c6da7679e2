"""The page pool: who holds which page, and that nothing is lost, doubled or handed out twice."""

import random
import sys
from array import array

import pytest

from worker.ids import NO_PAGE
from worker.pages.events import EventRing, PageEventKind, PageState
from worker.pages.pool import PagePool


def make(num_pages: int = 8, page_size: int = 4) -> PagePool:
    return PagePool(num_pages, page_size, EventRing(1024))


def owners(*numbers: int) -> "array[int]":
    return array("H", numbers)


def take(pool: PagePool, count: int, owner: int = 1) -> list[int]:
    pages = pool.allocate(owners(owner) * count)
    assert pages is not None
    return pages


def kinds(pool: PagePool, after: int = 0) -> list[PageEventKind]:
    events = pool.events.read(after)
    assert events is not None
    return [PageEventKind(kind) for kind in events.kinds]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_the_free_list_holds_first_slots(page_size: int) -> None:
    """S1-16: 0, p, 2p, … and not page numbers."""
    pool = make(10, page_size)
    assert list(pool.free_slots()) == [page * page_size for page in range(10)]


@pytest.mark.parametrize("page_size", [1, 4, 5, 16])
def test_the_free_list_stays_aligned(page_size: int) -> None:
    """S1-32: every element is a multiple of page_size, also after pages came back and were evicted."""
    pool, rng = make(20, page_size), random.Random(3)
    held: list[int] = []
    for _ in range(300):
        if rng.random() < 0.6 and pool.num_free:
            held += take(pool, rng.randint(1, pool.num_free))
        elif held:
            rng.shuffle(held)
            pool.release([held.pop()], 1)
        assert all(slot % page_size == 0 for slot in pool.free_slots())
    page = held.pop() if held else take(pool, 1)[0]
    pool.seal(page, None, 1, 1)
    pool.release([page], 1)
    pool.unseal([page], owners(0))
    assert page * page_size in pool.free_slots()
    assert all(slot % page_size == 0 for slot in pool.free_slots())


def test_allocation_counts_pages() -> None:
    """S1-18: what is asked for and what comes back are pages, whatever their size."""
    assert take(make(8, 64), 3) == [0, 1, 2]
    assert make(8, 64).allocate(owners()) == []


def test_one_call_serves_many_owners() -> None:
    """S1-21: one allocation for the batch; each page belongs to the owner it was asked for."""
    pool = make()
    pages = pool.allocate(owners(5, 5, 6))
    assert pages is not None
    assert [pool.planes().owners[page] for page in pages] == [5, 5, 6]
    assert kinds(pool) == [PageEventKind.ALLOCATED] * 3


def test_a_failed_allocation_takes_nothing() -> None:
    pool = make(4)
    take(pool, 2)
    before = (pool.events.number, list(pool.free_slots()), pool.counts_by_state())
    assert pool.allocate(owners(1, 1, 1)) is None
    assert (pool.events.number, list(pool.free_slots()), pool.counts_by_state()) == before


def test_exactly_all_pages_can_be_taken_and_the_dummy_page_never() -> None:
    """S1-26, S1-28, S1-29, B033: N pages usable, page N is RESERVED and never handed out."""
    pool = make(4)
    assert sorted(take(pool, 4)) == [0, 1, 2, 3]
    assert pool.allocate(owners(1)) is None
    assert pool.state(4) == PageState.RESERVED
    assert make(4).allocate(owners(1) * 5) is None


def test_the_dummy_page_is_there_from_the_start() -> None:
    """B082, S1-31: it is reserved at start, not when the first step needs padding and the pool is full."""
    pool = make(2)
    assert pool.counts_by_state()[PageState.RESERVED] == 1
    take(pool, 2)
    assert pool.counts_by_state() == {
        PageState.FREE: 0,
        PageState.ACTIVE: 2,
        PageState.CACHED: 0,
        PageState.PINNED: 0,
        PageState.RESERVED: 1,
    }


def test_allocations_never_overlap_once_expanded() -> None:
    """S1-33: over any history, live pages are distinct and their slots too."""
    pool, rng = make(30, 5), random.Random(1)
    held: list[list[int]] = []
    for _ in range(500):
        if rng.random() < 0.5:
            count = rng.randint(1, 6)
            pages = pool.allocate(owners(1) * count)
            if pages is not None:
                assert len(pages) == count
                held.append(pages)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))), 1)
        slots = [page * 5 + offset for pages in held for page in pages for offset in range(5)]
        assert len(set(slots)) == len(slots)
        assert all(slot < 30 * 5 for slot in slots)
        assert pool.check() == []


def test_states_add_up_while_pages_are_held() -> None:
    """S1-34, S1-35: free + cached + held = num_pages at any moment, the three disjoint."""
    pool = make(8)
    first, second = take(pool, 2), take(pool, 3)
    pool.seal(first[0], None, 11, 1)
    pool.release(first, 1)
    assert (pool.num_free, pool.num_cached, pool.num_active) == (4, 1, 3)
    assert pool.num_free + pool.num_cached + pool.num_active + pool.num_pinned == 8
    states = pool.planes().states
    assert [states[page] for page in first] == [PageState.CACHED, PageState.FREE]
    assert [states[page] for page in second] == [PageState.ACTIVE] * 3


@pytest.mark.parametrize("page_size", [1, 16, 255, 256, 300])
def test_sealed_pages_are_full_in_a_copy_of_the_columns(page_size: int) -> None:
    pool = make(4, page_size)
    first, _ = take(pool, 2)
    pool.seal(first, None, 5, 1)
    assert list(pool.planes().filled_slots) == [page_size, 0, 0, 0, 0]
    pool.pin(first)
    assert list(pool.planes().filled_slots) == [page_size, 0, 0, 0, 0]


def test_pages_and_references_are_counted_apart() -> None:
    pool = make()
    pages = take(pool, 3)
    pool.share(pages[:2], 2, is_hit=True)
    pool.share(pages[:1], 3, is_hit=True)
    assert (pool.num_active, pool.num_references, pool.num_shared) == (3, 6, 2)
    pool.release(pages[:2], 2)
    assert (pool.num_active, pool.num_references, pool.num_shared) == (3, 4, 1)
    pool.release(pages[:1], 3)
    pool.release(pages, 1)
    assert (pool.num_active, pool.num_references, pool.num_shared) == (0, 0, 0)


def test_a_second_release_is_caught_with_its_values() -> None:
    """B002, H3a: a page that is free, or cached, cannot be released again."""
    pool = make()
    pages = take(pool, 1)
    pool.release(pages, 1)
    with pytest.raises(AssertionError, match=f"page {pages[0]} was released twice"):
        pool.release(pages, 1)


def test_pages_given_back_in_pieces_are_freed_once_each() -> None:
    """B016: wherever the pieces are cut, freeing works on pages."""
    rng = random.Random(5)
    for _ in range(50):
        pool = make(12, 16)
        pages = take(pool, 12)
        cuts = sorted(rng.sample(range(13), 3))
        for begin, end in zip([0, *cuts], [*cuts, 12], strict=True):
            pool.release(pages[begin:end], 1)
        assert pool.num_free == 12
        assert pool.check() == []


def test_a_sealed_page_is_cached_and_an_unsealed_one_freed() -> None:
    pool = make()
    pages = take(pool, 2)
    pool.seal(pages[0], None, 77, 1, b"")
    before = pool.events.number
    assert pool.release(pages, 1) == [pages[0]]
    assert kinds(pool, before) == [
        PageEventKind.RELEASED,
        PageEventKind.RELEASED,
        PageEventKind.CACHED,
        PageEventKind.FREED,
    ]
    assert pool.fingerprint(pages[0]) == 77


def test_a_cached_page_is_revived_by_a_hit_and_remembers_it() -> None:
    pool = make()
    (page,) = take(pool, 1)
    pool.seal(page, None, 77, 1)
    pool.release([page], 1)
    assert pool.share([page], 2, is_hit=True) == [page]
    assert (pool.state(page), pool.references(page), pool.hits(page)) == (PageState.ACTIVE, 1, 1)
    assert pool.share([page], 3, is_hit=False) == []
    assert pool.hits(page) == 1


def test_a_free_page_cannot_be_shared() -> None:
    """B001, B007: nobody can get hold of a page that went back."""
    with pytest.raises(AssertionError, match="shared in state"):
        make().share([3], 1, is_hit=True)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool._states.__setitem__(0, PageState.CACHED),
        lambda pool: pool._refs.__setitem__(0, 2),
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._flags.__setitem__(7, 1),
        lambda pool: pool._states.__setitem__(8, PageState.FREE),
    ],
)
def test_the_audit_finds_what_is_wrong_with_both_numbers(break_it) -> None:  # type: ignore[no-untyped-def]
    """S1-34: a violation names the invariant and the numbers of both sides."""
    pool = make()
    take(pool, 2)
    assert pool.check() == []
    break_it(pool)
    found = pool.check()
    assert found
    assert all(violation.check in ("state_sum", "refcount", "free_list") for violation in found)
    assert all(violation.expected != violation.actual for violation in found)


@pytest.mark.parametrize("num_pages", [0, -1])
def test_an_empty_pool_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match="not possible"):
        make(num_pages)


def test_slots_that_do_not_fit_the_page_table_are_refused() -> None:
    """H13: entries of the page table are int32."""
    with pytest.raises(ValueError, match="32 bits"):
        PagePool(2**27, 16, EventRing(2))


def test_a_million_pages_cost_less_than_a_hundred_bytes_each() -> None:
    pool = PagePool(1_000_000, 16, EventRing(2))
    columns = [value for value in vars(pool).values() if isinstance(value, array | bytearray)]
    assert sum(map(sys.getsizeof, columns)) < 100 * 1_000_000


def test_what_is_told_of_a_page_through_its_life() -> None:
    """When it was taken and last used, by whom first, its hits, and what stands before it."""
    pool = make(4)

    def told(page: int) -> tuple[int, ...]:
        planes = pool.planes()
        columns = (planes.born_ms, planes.used_ms, planes.owners, planes.hit_counts, planes.parent_page_ids)
        return tuple(column[page] for column in columns)

    pool.now_ms = 5
    first, second = take(pool, 2, 7)
    pool.seal(first, None, 11, 7)
    pool.seal(second, first, 12, 7)
    assert [told(first), told(second)] == [(5, 5, 7, 0, NO_PAGE), (5, 5, 7, 0, first)]
    pool.now_ms = 6
    pool.share([first], 8, is_hit=True)
    assert told(first) == (5, 6, 7, 1, NO_PAGE)
    pool.now_ms = 7
    pool.release([first], 8)
    assert told(first) == (5, 7, 7, 1, NO_PAGE), "the first owner still has it"
    pool.now_ms = 8
    assert pool.release([first, second], 7) == [second, first]
    pool.now_ms = 9
    assert pool.share([first, second], 9, is_hit=False) == [first, second]
    assert [told(first), told(second)] == [(5, 9, 9, 1, NO_PAGE), (5, 9, 9, 0, first)]
    pool.release([first, second], 9)
    pool.unseal([second, first], [0, 0])
    assert [told(page)[2:] for page in (first, second)] == [(0, 0, NO_PAGE)] * 2
    assert [pool.fingerprint(page) for page in (first, second)] == [0, 0]
    pool.now_ms = 10
    assert take(pool, 1, 3)[0] in (first, second)
    assert {told(page)[:3] for page in (first, second)} >= {(10, 10, 3)}


def test_hits_are_counted_to_the_most_that_a_column_holds() -> None:
    pool = make(2)
    (page,) = take(pool, 1)
    pool.seal(page, None, 11, 1)
    pool._hits[page] = 65_534
    for _ in range(3):
        pool.share([page], 2, is_hit=True)
        pool.release([page], 2)
    assert pool.hits(page) == 65_535


def test_pages_in_use_that_leave_the_index_are_freed_with_their_last_holder() -> None:
    """Of those that leave together some may be held; each is charged to its own owner."""
    pool = make(4)
    pages = [*take(pool, 1, 1), *take(pool, 1, 2), *take(pool, 1, 3)]
    for at, page in enumerate(pages):
        pool.seal(page, None, 11 + at, at + 1)
    pool.release(pages[:1], 1)
    pool.release(pages[2:], 3)
    number = pool.events.number
    pool.unseal(pages, [7, 8, 9])
    told = pool.events.read(number)
    assert told is not None
    freed = [
        (page, owner)
        for kind, page, owner in zip(told.kinds, told.pages, told.owners, strict=True)
        if kind == PageEventKind.FREED
    ]
    assert freed == [(pages[0], 7), (pages[2], 9)]
    assert pool.state(pages[1]) == PageState.ACTIVE
    assert pool.release(pages[1:2], 2) == []
    assert (pool.num_free, pool.check()) == (4, [])
