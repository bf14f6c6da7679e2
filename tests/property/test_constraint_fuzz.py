"""Constraints of any text: taken or refused with a sentence, and never anything else."""

import json
import random
import threading

import pytest

from benchmarks.json_schemas import schemas
from kvatlas.constraints.compiler import Compiler, TokenTable
from kvatlas.constraints.text import ConstraintError, ConstraintText
from kvatlas.constraints.threads import DeepThreads
from kvatlas.models.text_vocabulary import toy_vocabulary

EOS = 257
COMPILER = Compiler(lambda: TokenTable.of(toy_vocabulary(512), {EOS}), 512, max_kept=1)
SEEDS = [
    *[ConstraintText("json_schema", json.dumps(schema)) for schema in schemas(60)],
    *[
        ConstraintText("regex", text)
        for text in (r"\d{3}-[a-z]+", "(a|b)*c{2,5}", r"(?i)x\p{L}+", "[^\\n]{0,9}")
    ],
    ConstraintText("grammar", 'root ::= "a" tail*\ntail ::= [x-z]{1,3} | "(" root ")"'),
    ConstraintText("grammar", 'start: "a" tail*\ntail: /[x-z]/ | "(" start ")"\n%ignore / /'),
]
PIECES = [
    *'{}[]":,()|*+?\\/^$.%@~\n\x00é😀',
    "::=",
    "start:",
    "$ref",
    "#/$defs",
    "1e999",
    "-1",
    "%json",
    "<|",
]
PIECES += ["{1000000}"]


def mutated(chance: random.Random) -> ConstraintText:
    """A good one with a few pieces cut out, put in, doubled, or under another kind."""
    seed = chance.choice(SEEDS)
    text = seed.text
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        end = at + chance.randint(0, 6)
        middle = chance.choice(["", chance.choice(PIECES), text[at:end] * 2, chance.choice(PIECES) * 30])
        text = (text[:at] + middle + text[end:])[:4000] or "x"
    kind = seed.kind if chance.random() < 0.8 else chance.choice(["json_schema", "regex", "grammar"])
    return ConstraintText(kind, text)


def walk(constraint: ConstraintText, chance: random.Random) -> bool:
    """Compiles it and goes a few tokens along its masks; whether it was taken."""
    try:
        progress = COMPILER.compile(constraint).begin()
    except ConstraintError as error:
        if not str(error):
            raise AssertionError("refused without a word") from error
        return False
    for _ in range(6):
        mask = progress.mask()
        if progress.dead_end is not None:
            return True
        allowed = [token for token in range(512) if mask[token // 8] >> token % 8 & 1]
        assert allowed, "an empty mask without a reason"
        assert progress.is_complete == (EOS in allowed)
        if allowed == [EOS]:
            return True
        progress.take((chance.choice([token for token in allowed if token != EOS]),))
    return True


@pytest.mark.parametrize("seed", range(4))
def test_any_text_is_taken_or_refused(seed: int) -> None:
    chance, threads, done = random.Random(seed), DeepThreads("fuzz"), threading.Event()
    taken: list[bool] = []
    failures: list[str] = []

    def run() -> None:
        for _ in range(300):
            constraint = mutated(chance)
            try:
                taken.append(walk(constraint, chance))
            except BaseException as error:
                failures.append(f"{constraint!r}: {error!r}")
        done.set()

    assert threads.submit(run)
    done.wait()
    threads.close()
    assert failures == []
    assert 10 <= sum(taken) <= 290, f"{sum(taken)} of {len(taken)} were taken"
