"""The prefix index under any order of operations, against a dictionary from (salt, whole prefix) to page."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.pages.fingerprint import Fingerprinter
from worker.pages.prefix_trie import PrefixTrie

NUM_PAGES = 12
SIZE = 2
TOKENS = st.lists(st.integers(0, 2), max_size=9)
SALTS = st.sampled_from([b"", b"a", b"a\0b"])
Prefix = tuple[bytes, tuple[int, ...]]


class PrefixTrieMachine(RuleBasedStateMachine):
    """B005, B014, B022, M-05, M-06: whatever is inserted, looked up and removed."""

    def __init__(self) -> None:
        super().__init__()
        self.trie = PrefixTrie(NUM_PAGES, SIZE, Fingerprinter(b"k"), 6)
        self.model: dict[Prefix, int] = {}
        self.evicted: list[Prefix] = []  # oldest first, those that were not inserted again

    @rule(tokens=TOKENS, salt=SALTS)
    def insert(self, tokens: list[int], salt: bytes) -> None:
        """All whole pages, as far as there are free numbers."""
        parent: int | None = None
        for end in range(SIZE, len(tokens) + 1, SIZE):
            key = (salt, tuple(tokens[:end]))
            free = sorted(set(range(NUM_PAGES)) - set(self.model.values()))
            if key not in self.model and not free:
                return
            page = free[0] if free else self.model[key]
            token_bytes = array("I", tokens[end - SIZE : end]).tobytes()
            kept = self.trie.insert(page, parent, salt, token_bytes)
            assert kept == self.model.get(key, page)
            if key not in self.model and key in self.evicted:
                self.evicted.remove(key)
            self.model[key] = parent = kept

    @rule(tokens=TOKENS, salt=SALTS, most=st.integers(0, 5))
    def match(self, tokens: list[int], salt: bytes, most: int) -> None:
        """The longest known run of whole pages, and why the rest is missing."""
        expected = []
        for end in range(SIZE, min(len(tokens), most * SIZE) + 1, SIZE):
            page = self.model.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            expected.append(page)
        ids = array("I", tokens)
        assert self.trie.match(ids, salt, most) == expected
        whole = min(len(tokens) // SIZE, most)
        missed = self.trie.classify(ids, salt, expected, whole)
        assert missed.num_cold + missed.num_evicted == whole - len(expected)
        for number in range(len(expected), len(expected) + missed.num_evicted):
            assert (salt, tuple(tokens[: (number + 1) * SIZE])) in self.evicted

    @precondition(lambda self: self.model)
    @rule(data=st.data(), remember=st.booleans())
    def remove_a_leaf(self, data: st.DataObject, remember: bool) -> None:
        """Leaves only; the parent is named when it is one now."""
        leaves = [
            key
            for key in self.model
            if not any(
                other[0] == key[0] and other[1][: len(key[1])] == key[1] != other[1] for other in self.model
            )
        ]
        salt, prefix = data.draw(st.sampled_from(sorted(leaves)))
        page = self.model.pop((salt, prefix))
        parent = self.model.get((salt, prefix[:-SIZE]))
        siblings = [
            key
            for key in self.model
            if key[0] == salt and len(key[1]) == len(prefix) and key[1][:-SIZE] == prefix[:-SIZE]
        ]
        assert self.trie.remove(page, remember) == (parent if not siblings else None)
        if remember:
            self.evicted.append((salt, prefix))

    @invariant()
    def agrees(self) -> None:
        """Nodes, depths, salts and children are those of the dictionary."""
        assert self.trie.check() == []
        assert len(self.trie) == len(self.model) == len(set(self.model.values()))
        for (salt, prefix), page in self.model.items():
            assert self.trie.depth(page) == len(prefix) // SIZE
            assert self.trie.salt(page) == salt
        assert sorted(self.trie.pages()) == sorted(self.model.values())
        depths = [self.trie.depth(page) for page in self.trie.pages()]
        assert depths == sorted(depths, reverse=True)


TestPrefixTrie = PrefixTrieMachine.TestCase
TestPrefixTrie.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
