"""Every command line that a document or a help text shows is one that its program understands."""

import importlib
import re
import shlex
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import dropwhile, groupby
from pathlib import Path

import pytest

from kvatlas.cli import config
from kvatlas.cli.options import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
PROGRAMS = sorted((ROOT / "benchmarks").rglob("*.py"))  # their docstrings are their help
OF_THE_SHELL = "|&;<>()"
LEFT_OUT = re.compile(r"\.\.\.|…|<|\bCOMMAND\b|_\*")  # a line with a blank in it shows no command


def lines_of(text: str) -> Iterator[str]:
    """Lines of code blocks, continued lines joined, and what stands between single backticks."""
    text = text.replace("\\\n", " ")
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL):
        yield from block.splitlines()
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    for inline in re.findall(r"`([^`]+)`", text):
        yield " ".join(inline.split())


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each command of a line of a shell, without the variables that are set for it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=OF_THE_SHELL)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that does not end: a sentence
        return
    for is_shell, command in groupby(words, lambda word: set(word) <= set(OF_THE_SHELL)):
        if not is_shell:
            yield list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), command))


def shown(text: str, *start: str) -> Iterator[list[str]]:
    """What follows `start` in every command of a text."""
    for line in lines_of(text):
        for words in () if LEFT_OUT.search(line) else commands_of(line):
            names = [word.rpartition("/")[2] for word in words[: len(start)]]
            if names == [*start]:
                yield words[len(start) :]


def is_understood(parser: ArgumentParser, words: list[str]) -> bool:
    try:
        parser.parse_args(words)
    except SystemExit as end:  # --help, or a refusal
        return end.code == 0
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_a_document_is_understood(document: Path) -> None:
    parsers = {("kvatlas",): config.build_parser()}
    for process in ("worker", "service", "dashboard"):
        reader = importlib.import_module(f"{process}.config")._READER
        parsers["python", "-m", process] = reader._parser()
    for start, parser in parsers.items():
        for words in shown(document.read_text(), *start):
            # A sentence may name a flag without a value of its.
            fits = is_understood(parser, words) or is_understood(parser, [*words, "1"])
            assert fits or not words, " ".join([*start, *words])


def test_blocks_of_commands_say_so() -> None:
    """One without a language was looked at by nobody."""
    for document in DOCUMENTS:
        for language, first in re.findall(
            r"^```(\w*)\n(\S+).*?^```", document.read_text(), re.MULTILINE | re.DOTALL
        ):
            assert language or first not in ("kvatlas", "python", "make", "docker", "pip"), document


def test_commands_are_found() -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    assert sum(len(list(shown(text, "kvatlas"))) for text in texts) > 40
    text = "`kvatlas` and\n```sh\nA=1 .venv/bin/kvatlas pages | x && kvatlas top -n 2 # no\n```"
    assert list(shown(text, "kvatlas")) == [["pages"], ["top", "-n", "2"], []]


def test_every_example_of_a_help_text_is_understood() -> None:
    parser = config.build_parser()
    for command in COMMANDS.values():
        for example in command.examples:
            found = list(shown(f"```sh\n{example}\n```", "kvatlas"))
            assert found, example
            assert all(words[0] in COMMANDS and is_understood(parser, words) for words in found), example


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_what_commands_of_documents_leave_is_not_committed() -> None:
    """Keys and tokens above all: SECURITY.md makes them where one stands."""
    left = ["seam/worker.key", "token", "tls.key", "secrets/auth.toml", "noon.kvrec", "data/wal/00000000"]
    done = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", *left], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == left


@pytest.mark.parametrize("path", [*DOCUMENTS, *PROGRAMS], ids=lambda path: path.name)
def test_every_flag_that_is_shown_with_a_module_is_one_of_its_own(path: Path) -> None:
    """By its source: importing every benchmark would take torch and seconds."""
    for words in shown(path.read_text(), "python", "-m"):
        module = ROOT.joinpath(*words[0].split(".")) if words else ROOT / "none"
        if module.relative_to(ROOT).parts[0] not in ("benchmarks", "deploy", "docs", "tests"):
            continue
        files = [file for file in (module.with_suffix(".py"), module / "__main__.py") if file.exists()]
        assert files, f"no module {words[0]}"
        source = files[0].read_text()
        for flag in [word.partition("=")[0] for word in words[1:] if re.match("--[a-z]", word)]:
            assert f'"{flag}"' in source, f"{words[0]} has no {flag}"
