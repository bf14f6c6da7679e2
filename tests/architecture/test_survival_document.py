"""docs/survival.md: every promise names the tests that show it; they exist, and brackets mean slow ones."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "integration"
CLAIM = re.compile(r"`(\(?)([\w./]+\.py)::(test_\w+)\)?`")


def promises() -> list[tuple[str, list[tuple[bool, Path, str]]]]:
    """Each promise, and its tests: whether in brackets, file, name."""
    text = (ROOT / "docs" / "survival.md").read_text()
    lines = text[text.index("| promise |") :].splitlines()[2:]
    found = []
    for line in lines:
        promise, shown, _ = (cell.strip() for cell in line.strip("|").rsplit("|", 2))
        claims = [(bool(mark), (TESTS / file).resolve(), name) for mark, file, name in CLAIM.findall(shown)]
        assert len(claims) == shown.count("::"), line
        found.append((promise, claims))
    return found


def is_slow(path: Path, name: str) -> bool:
    """Whether that test is marked so, by itself or with its whole file. AssertionError if there is none."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(functions) == 1, f"{path.name} has no {name}"
    marks = [ast.unparse(decorator) for decorator in functions[0].decorator_list]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks.append(ast.unparse(node.value))
    return any("pytest.mark.slow" in mark for mark in marks)


def test_every_promise_names_tests_that_exist_and_brackets_mean_slow() -> None:
    found = promises()
    assert len(found) >= 19
    for promise, claims in found:
        assert claims, f"nothing shows: {promise}"
        for in_brackets, path, name in claims:
            assert is_slow(path, name) == in_brackets, f"{path.name}::{name}"


def test_a_promise_is_made_once() -> None:
    names = [promise for promise, _ in promises()]
    assert len(names) == len(set(names))
