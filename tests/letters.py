"""Constraints over the toy model's vocabulary, of which some tokens are letters."""

from kvatlas.constraints.compiler import Compiled, Compiler, TokenTable
from kvatlas.constraints.text import ConstraintText
from worker.model.toy import toy_config

EOS = 1
_VOCABULARY = toy_config().vocab_size


def constraint(pattern: str) -> Compiled:
    """For a vocabulary of letters: token 10 is "a", 11 is "b", and so on."""
    tokens = [b""] * 10 + [bytes((97 + number,)) for number in range(26)]
    table = TokenTable((tokens + [b""] * _VOCABULARY)[:_VOCABULARY], frozenset({0, EOS}), frozenset({EOS}))
    return Compiler(lambda: table, _VOCABULARY).compile(ConstraintText("regex", pattern))
