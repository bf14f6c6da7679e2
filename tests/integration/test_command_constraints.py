"""`kvatlas generate` with constraints and tools against a running server, and what it refuses by itself."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.cli.__main__ import main

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
Generate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def generate(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["generate", "hi", *arguments, "--address", fake_server.address])
        return code, *capsys.readouterr()

    return run


def test_an_answer_has_the_form_that_was_asked_for(generate: Generate, tmp_path: Path) -> None:
    code, text, complaint = generate("--regex", "[a-f]{4}-[0-9]{2}", "-n", "40", "--seed", "1")
    assert code == 0, complaint
    assert re.fullmatch("[a-f]{4}-[0-9]{2}\n", text)
    code, text, complaint = generate("--choice", "yes", "--choice", "no", "-n", "9")
    assert code == 0, complaint
    assert text in ("yes\n", "no\n")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    code, text, complaint = generate("--json-schema", str(schema), "-n", "200", "--seed", "3")
    assert code == 0, complaint
    assert 0 <= json.loads(text)["n"] <= 99
    grammar = tmp_path / "grammar.gbnf"
    grammar.write_text('root ::= "<" [0-9]+ ">"\n')
    code, text, complaint = generate("--grammar", str(grammar), "-n", "400", "--seed", "3")
    assert code == 0, complaint
    assert re.fullmatch("<[0-9]+>?\n", text)


def test_a_bad_constraint_is_refused_by_its_path_before_anything_runs(
    generate: Generate, tmp_path: Path
) -> None:
    code, text, complaint = generate("--regex", "(unclosed")
    assert (code, text, complaint.count("\n")) == (2, "", 1)
    assert "spec.regex" in complaint
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "nonsense"}')
    code, text, complaint = generate("--json-schema", str(schema))
    assert (code, text) == (2, "")
    assert "spec.json_schema" in complaint


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice: an answer can have one constraint"),
        (("--json-schema", "/nowhere.json"), "--json-schema /nowhere.json: No such file"),
        (("--grammar", "/nowhere"), "--grammar /nowhere: No such file"),
        (("--template-args", "{"), "--template-args is no JSON"),
        (("--tools", "/nowhere"), "--tools /nowhere: No such file"),
    ],
)
def test_what_cannot_be_sent_is_wrong_usage(
    generate: Generate, arguments: tuple[str, ...], sentence: str
) -> None:
    code, text, complaint = generate(*arguments)
    assert (code, text, complaint.count("\n")) == (2, "", 1)
    assert sentence in complaint


def test_tools_are_sent_as_a_chat_and_a_template_without_a_place_for_them_says_so(
    generate: Generate, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "rain", "parameters": {}}}]))
    code, _, complaint = generate("--tools", str(tools), "-n", "2")
    assert code == 2
    assert "FEATURE_DISABLED" in complaint
    assert "tools" in complaint
