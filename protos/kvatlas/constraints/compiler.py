"""Compiles constraints for one vocabulary, keeps what it compiled, and follows outputs through them.

Owns the cache of compiled grammars and the limits of the library. Service and worker compile with the same
table and limits, so what one of them takes the other takes as well. Compiling and masks let go of the
interpreter; nothing here belongs on an event loop or the engine's thread (threads.py).
"""

import ctypes
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvatlas.constraints.grammar import grammar_of
from kvatlas.constraints.text import ConstraintError, ConstraintText
from kvatlas.models.text_vocabulary import TextVocabulary
from kvatlas.models.token_bytes import token_bytes

MAX_COMPILED = 32
"""Grammars kept. One takes at most about 20 MB: 2 kB for each state of its lexer."""

# A chat's schema of 49 kB compiles in 50 ms; the worst that these let through took 0.8 s and 0.9 s for its
# first mask (two cores, Xeon), and is then refused.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A model's tokens as bytes."""

    tokens: Sequence[bytes]  # by id; b"": never allowed
    special_ids: frozenset[int]  # not made from text
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, vocabulary: TextVocabulary, eos_ids: Iterable[int]) -> "TokenTable":
        """Of a vocabulary read from a model's files, where these tokens end a sequence."""
        tokens = token_bytes(vocabulary.tokens, vocabulary.spelling)
        return cls(tokens, vocabulary.special_ids, frozenset(eos_ids))


class _Wrapper:
    """What the library asks of a tokenizer in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens = list(table.tokens)
        self.special_token_ids = sorted(table.special_ids)
        self.eos_token_id = min(table.eos_ids)

    def __call__(self, data: bytes | str) -> list[int]:
        """Text → ids is asked for forced text alone, which the header of every grammar turns off."""
        raise NotImplementedError("constraints need no tokenizer")


class Progress:
    """Where one output stands in its constraint. Used by one thread at a time."""

    __slots__ = ("_matcher", "num_tokens")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_tokens = 0  # of the output, that were taken

    def take(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the output; what the constraint does not allow shows in the next mask."""
        ids = list(token_ids)
        if ids:
            self._matcher.consume_tokens(ids)
            self.num_tokens += len(ids)

    def take_back(self, count: int) -> None:
        """Forgets the last tokens."""
        if count:
            self._matcher.rollback(count)
            self.num_tokens -= count

    def write_mask(self, address: int, num_bytes: int) -> str | None:
        """Writes the allowed next tokens, a bit each; why there are none, with only zeros written, or None.

        At `address` lie ceil(vocab_size / 32) words of 4 bytes, little endian. EOS is allowed in an accepting
        state and nowhere else.
        """
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        why = self.dead_end
        if why is not None:
            ctypes.memset(address, 0, num_bytes)  # behind what it does not allow the library writes EOS
        return why

    def mask(self) -> bytes:
        """The allowed next tokens, a bit each, in words of 4 bytes; `dead_end` says whether they mean it."""
        return self._matcher.compute_bitmask()

    @property
    def dead_end(self) -> str | None:
        """Why the last mask allows nothing; None: it does."""
        if self._matcher.is_error():
            return _SENTENCES.get(error := _first_line(self._matcher.get_error()), error)
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            return "no text can follow"
        return None

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()


class Compiled:
    """A constraint for one vocabulary; makes a Progress for each output."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype
        self._lock = threading.Lock()

    def begin(self, output_ids: Iterable[int] = ()) -> Progress:
        """From the start, or behind tokens that were put out before."""
        with self._lock:
            matcher = self._prototype.deep_copy()
        progress = Progress(matcher)
        progress.take(output_ids)
        return progress


class Compiler:
    """Of one vocabulary; from any thread."""

    def __init__(
        self,
        read_table: Callable[[], TokenTable],
        vocab_size: int,
        *,
        max_kept: int = MAX_COMPILED,
        on_compiled: Callable[[float], None] = lambda seconds: None,
        on_hit: Callable[[], None] = lambda: None,
    ) -> None:
        self._read_table = read_table
        self._vocab_size = vocab_size
        self._max_kept = max_kept
        self._on_compiled = on_compiled
        self._on_hit = on_hit
        self._lock = threading.Lock()
        self._kept: OrderedDict[ConstraintText, Compiled] = OrderedDict()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def prepare(self) -> None:
        """Builds the trie of all tokens, so that the first constraint need not: 0.2 s for 49 thousand."""
        self._vocabulary()

    def known(self, constraint: ConstraintText) -> Compiled | None:
        """What was compiled before and is kept; never waits for long."""
        with self._lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
        if found is not None:
            self._on_hit()
        return found

    def compile(self, constraint: ConstraintText) -> Compiled:
        """Raises ConstraintError with the library's reason."""
        if (found := self.known(constraint)) is not None:
            return found
        began = time.perf_counter()
        try:
            compiled = self._compile(grammar_of(constraint))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's own; no Exception, to be overlooked
                raise
            raise ConstraintError("the library gives up on it") from None
        self._on_compiled(time.perf_counter() - began)
        with self._lock:
            self._kept[constraint] = compiled
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: str) -> Compiled:
        limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]  # a table of numbers and one flag
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConstraintError(_reason(matcher.get_error()))
        compiled = Compiled(matcher)
        first = compiled.begin()
        first.mask()
        if (why := first.dead_end) is not None:
            raise ConstraintError(f"no output can satisfy it, or it is too complex: {why}")
        return compiled

    def _vocabulary(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._build()
            return self._tokenizer

    def _build(self) -> LLTokenizer:
        table = self._read_table()
        tokens = list(table.tokens[: self._vocab_size])
        tokens += [b""] * (self._vocab_size - len(tokens))
        ends = frozenset(end for end in table.eos_ids if end < self._vocab_size)
        if not ends:
            raise ConstraintError("the model has no end-of-sequence token")
        whole = TokenTable(tokens, table.special_ids, ends)
        return LLTokenizer(_Wrapper(whole), eos_token=sorted(ends))  # type: ignore[arg-type]


_SENTENCES = {
    "NoExtension": "no text can follow",
    "NoExtensionBias": "no text can follow",
    "": "the output left the constraint",
}
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")
_OF_SCHEMA = "failed to compile JSON schema: "


def _reason(error: str) -> str:
    """The library's sentence without our frame around the client's text."""
    text = re.split(r"\n\s+\d+ \| ", error, maxsplit=1)[0]
    text = _PLACE.sub("", text)
    return " ".join(text.removeprefix(_OF_SCHEMA).split())[:500]


def _first_line(error: str) -> str:
    return error.split("\n", 1)[0][:200]
