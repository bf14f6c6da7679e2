"""The prefix index: whole pages found by real token ids, exactly, and only what may be found."""

import random
from array import array

import pytest

from worker.ids import NO_PAGE
from worker.pages.events import PageEventKind
from worker.pages.evicted_prefixes import EvictedPrefixes
from worker.pages.fingerprint import Fingerprinter
from worker.pages.no_sharing import NoSharing
from worker.pages.page_cache import CacheConfig, PageCache
from worker.pages.prefix_trie import PrefixTrie


def make(num_pages: int = 32, page_size: int = 4, remembered: int = 100) -> PrefixTrie:
    return PrefixTrie(num_pages, page_size, Fingerprinter(b"key"), remembered)


def raw(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def fill(
    trie: PrefixTrie, tokens: list[int], first_page: int, page_size: int = 4, salt: bytes = b""
) -> list[int]:
    """Inserts whole pages with numbers from ``first_page`` on; returns the pages that hold the prefix."""
    pages: list[int] = []
    for at in range(0, len(tokens) - page_size + 1, page_size):
        parent = pages[-1] if pages else None
        page = first_page + len(pages)
        pages.append(trie.insert(page, parent, salt, raw(*tokens[at : at + page_size])))
    return pages


def match(trie: PrefixTrie, tokens: list[int], salt: bytes = b"", most: int = 100) -> list[int]:
    return trie.match(array("I", tokens), salt, most)


def test_a_key_is_the_parent_and_the_tokens_of_one_page() -> None:
    """M-05: key and page always belong together; the same tokens elsewhere are another node."""
    trie = make()
    pages = fill(trie, [1, 2, 3, 4, 1, 2, 3, 4], 5)
    assert pages == [5, 6]
    assert trie.key(5) == (b"", raw(1, 2, 3, 4))
    assert trie.key(6) == (5, raw(1, 2, 3, 4))
    assert (trie.depth(5), trie.depth(6), trie.salt(6)) == (1, 2, b"")


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9])
def test_matches_are_whole_pages(length: int) -> None:
    """M-06, B004: 0, 1, P - 1, P, P + 1 tokens; shorter than a page is an empty match, not an error."""
    trie = make()
    fill(trie, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert len(match(trie, [1, 2, 3, 4, 5, 6, 7, 8][:length])) == min(length, 8) // 4


def test_inserting_less_than_a_page_leaves_no_node() -> None:
    """B004."""
    trie = make()
    assert fill(trie, [1, 2, 3], 0) == []
    assert len(trie) == 0
    with pytest.raises(AssertionError, match="not full"):
        trie.insert(0, None, b"", raw(1, 2, 3))


def test_a_look_up_may_be_limited() -> None:
    """M-07: at most len - 1 tokens are looked for, so that one is always computed."""
    trie = make()
    fill(trie, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert match(trie, prompt, most=(len(prompt) - 1) // 4) == [0]


def test_a_prefix_that_diverges_inside_a_page_matches_before_it() -> None:
    """B005: nothing is ever split; the other branch is a sibling."""
    trie = make()
    fill(trie, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    other = fill(trie, [1, 2, 3, 4, 5, 6, 0, 0], 10)
    assert other == [0, 11]
    assert match(trie, [1, 2, 3, 4, 5, 6, 7, 8]) == [0, 1]
    assert match(trie, [1, 2, 3, 4, 5, 6, 9, 9]) == [0]
    assert trie.check() == []


def test_equal_content_is_found_under_the_first_page() -> None:
    """H1: the second copy is told which page holds the prefix, and does not enter."""
    trie = make()
    assert fill(trie, [1, 2, 3, 4], 0) == [0]
    assert trie.insert(9, None, b"", raw(1, 2, 3, 4)) == 0
    assert trie.key(9) is None
    assert len(trie) == 1


def test_inserting_again_changes_nothing() -> None:
    """B014: idempotent."""
    trie = make()
    pages = fill(trie, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert fill(trie, [1, 2, 3, 4, 5, 6, 7, 8], 0) == pages
    assert len(trie) == 2
    assert trie.check() == []


def test_one_page_stands_in_at_most_one_node() -> None:
    """B003: a page cannot be entered under a second key."""
    trie = make()
    fill(trie, [1, 2, 3, 4], 0)
    with pytest.raises(AssertionError, match="would stand in two nodes"):
        trie.insert(0, None, b"", raw(9, 9, 9, 9))


def test_an_entry_leaves_with_its_page() -> None:
    """B007: what was evicted is not found, and its page can hold something else."""
    trie = make()
    fill(trie, [1, 2, 3, 4], 0)
    trie.remove(0, remember=True)
    assert match(trie, [1, 2, 3, 4]) == []
    assert trie.insert(0, None, b"", raw(7, 7, 7, 7)) == 0
    assert match(trie, [1, 2, 3, 4]) == []
    assert match(trie, [7, 7, 7, 7]) == [0]


def test_only_leaves_leave() -> None:
    trie = make()
    fill(trie, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    with pytest.raises(AssertionError, match="page 0 has 1 children"):
        trie.remove(0, remember=True)
    assert trie.remove(1, remember=True) == 0
    assert trie.remove(0, remember=True) is None


@pytest.mark.parametrize("salts", [(b"", b"a"), (b"team\0a", b"team\0b"), (b"a", b"a\0")])
def test_nothing_is_found_under_another_salt(salts: tuple[bytes, bytes]) -> None:
    """B022: no hit across tenants or salts, a hit within one."""
    trie = make()
    fill(trie, [1, 2, 3, 4], 0, salt=salts[0])
    assert match(trie, [1, 2, 3, 4], salts[1]) == []
    assert match(trie, [1, 2, 3, 4], salts[0]) == [0]


def test_tokens_are_compared_not_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """B020: with a fingerprint that is the same for every page nothing is found that is not equal."""
    monkeypatch.setattr(Fingerprinter, "of_page", lambda self, parent, token_bytes: 7)
    trie, rng = make(200, 2), random.Random(4)
    known: dict[tuple[int, ...], int] = {}
    for page in range(0, 200, 2):
        tokens = [rng.randrange(4) for _ in range(4)]
        pages = fill(trie, tokens, page, 2)
        known[tuple(tokens[:2])], known[tuple(tokens)] = pages
    for tokens in ([a, b, c, d] for a in range(4) for b in range(4) for c in range(4) for d in range(4)):
        expected = [known[key] for key in (tuple(tokens[:2]), tuple(tokens)) if key in known]
        assert match(trie, tokens) == expected


def test_misses_are_classified_and_add_up() -> None:
    trie = make()
    pages = fill(trie, list(range(16)), 0)
    for page in reversed(pages[1:]):
        trie.remove(page, remember=True)
    tokens = array("I", [*range(16), 50, 51, 52, 53])
    found = match(trie, list(tokens))
    assert found == pages[:1]
    missed = trie.classify(tokens, b"", found, 5)
    assert (missed.num_evicted, missed.num_cold) == (3, 1)
    assert trie.classify(tokens, b"other", [], 5).num_cold == 5


def test_a_flushed_page_counts_as_cold_and_one_cached_again_is_forgotten() -> None:
    trie = make()
    fill(trie, [1, 2, 3, 4], 0)
    trie.remove(0, remember=False)
    assert trie.classify(array("I", [1, 2, 3, 4]), b"", [], 1).num_cold == 1
    fill(trie, [1, 2, 3, 4], 0)
    trie.remove(0, remember=True)
    assert trie.classify(array("I", [1, 2, 3, 4]), b"", [], 1).num_evicted == 1
    fill(trie, [1, 2, 3, 4], 0)
    trie.remove(0, remember=False)
    assert trie.classify(array("I", [1, 2, 3, 4]), b"", [], 1).num_cold == 1


def test_the_memory_of_evicted_prefixes_is_bounded() -> None:
    memory = EvictedPrefixes(3)
    for mark in (1, 2, 3, 4):
        memory.add(mark)
    assert [mark in memory for mark in (1, 2, 3, 4)] == [False, True, True, True]
    memory.discard_all((3,))
    memory.add(5)
    memory.add(2)
    memory.add(6)
    assert len(memory) <= 3
    assert 2 in memory
    assert 6 in memory
    none = EvictedPrefixes(0)
    none.add(1)
    assert 1 not in none


def test_a_fingerprint_depends_on_key_salt_and_every_token_before() -> None:
    """The recipe of fingerprint.py, computed a second time."""
    from hashlib import blake2b

    trie = make()
    first, second = fill(trie, [1, 2, 3, 4, 5, 6, 7, 8], 0, salt=b"team\0x")
    root = blake2b(b"team\0x", key=b"key", digest_size=8).digest()
    one = blake2b(root + raw(1, 2, 3, 4), key=b"key", digest_size=8).digest()
    two = blake2b(one + raw(5, 6, 7, 8), key=b"key", digest_size=8).digest()
    assert trie.fingerprint(first) == int.from_bytes(one, "little")
    assert trie.fingerprint(second) == int.from_bytes(two, "little")
    assert Fingerprinter(b"other").of_page(root, raw(1, 2, 3, 4)) != trie.fingerprint(first)


def test_a_long_fingerprint_key_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="65 bytes, at most 64"):
        Fingerprinter(b"x" * 65)


def test_salts_are_remembered_within_a_bound() -> None:
    prints = Fingerprinter(b"")
    for number in range(10_000):
        prints.of_salt(str(number).encode())
    assert len(prints._salts) <= 4096


def test_the_strategy_without_sharing_finds_and_keeps_nothing() -> None:
    """M-14: selectable behind the same interface; evict(0) is a no-op, evict(>0) raises."""
    cache = PageCache(CacheConfig(8, 4, sharing=False))
    assert isinstance(cache.index, NoSharing)
    pages = cache.allocate(array("H", (1, 1)))
    assert pages is not None
    assert cache.lookup(array("I", range(8)), b"", 2).pages == []
    cache.release(pages, 1)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 0)
    cache.evict(0)
    with pytest.raises(ValueError, match="1 pages to evict, only 0"):
        cache.evict(1)
    assert cache.check() == []


def test_each_page_of_a_run_is_told_with_its_own_tokens() -> None:
    """Up to the one that another page holds already."""
    cache = PageCache(CacheConfig(8, 2))
    pages = cache.allocate(array("H", (1,)) * 4)
    assert pages is not None
    assert cache.seal_run(pages[:2], None, b"", raw(1, 2, 3, 4), 1) == 2
    before = cache.events.number
    assert cache.seal_run([pages[2], pages[3]], None, b"", raw(5, 6, 7, 8), 1) == 2
    assert cache.seal_run([pages[2], pages[3]], None, b"", raw(1, 2, 3, 4), 1) == 0
    events = cache.events.read(before, with_tokens=True)
    assert events is not None
    assert events.tokens == [raw(5, 6), raw(7, 8)]
    assert list(events.others) == [NO_PAGE, pages[2]]


def test_what_operators_do_to_pages_is_of_no_owner() -> None:
    cache = PageCache(CacheConfig(4, 1))
    pages = cache.allocate(array("H", (7,)))
    assert pages is not None
    cache.seal(pages[0], None, b"", raw(5), 7)
    cache.release(pages, 7)
    before = cache.events.number
    cache.pin(pages)
    cache.unpin(pages)
    cache.flush()
    events = cache.events.read(before)
    assert events is not None
    kinds = [PageEventKind.PINNED, PageEventKind.UNPINNED, PageEventKind.EVICTED, PageEventKind.FREED]
    assert list(zip(events.kinds, events.owners, strict=True)) == [(kind, 0) for kind in kinds]


def test_the_audit_finds_a_page_that_left_only_one_side() -> None:
    """S1-36: index and pool are compared with each other."""
    cache = PageCache(CacheConfig(4, 1))
    pages = cache.allocate(array("H", (1,)))
    assert pages is not None
    cache.seal(pages[0], None, b"", raw(5), 1)
    assert cache.check() == []
    cache.index.remove(pages[0], remember=False)
    assert [violation.check for violation in cache.check()] == ["trie"]
