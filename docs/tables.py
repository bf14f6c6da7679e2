"""Fills the last column of docs/requirements.md and docs/known-faults.md from the tests themselves.

`python -m docs.tables` rewrites both files; with `--check` it writes nothing and exits 1 where a file is
stale or an id has neither a test nor an answer. A test is linked by naming the id (S1-07, M-12, H3a, B023,
ranges as S1-26..S1-31) in its name, its docstring or its decorators. The other columns are written by hand.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = (ROOT / "docs" / "requirements.md", ROOT / "docs" / "known-faults.md")

ID = re.compile(r"\b(S[12]-\d{2}|M-\d{2}|H(?:1[0-6]|[1-9])[ab]?|B[01]\d{2})(?![\w-])")
RANGE = re.compile(r"\b(S[12]-|M-|H|B)(\d{1,3})\.\.(?:\1)?(\d{1,3})\b")
NAME_ID = re.compile(r"(?<![a-z0-9])(s[12]_\d{2}|m_\d{2}|h(?:1[0-6]|[1-9])[ab]?|b[01]\d{2})(?![a-z0-9])")
ROW = re.compile(r"^\| (?P<id>[A-Z]\w*(?:-\d+)?) \| (?P<text>.*) \| (?P<tests>[^|]*) \|$")


def ids_in(text: str) -> set[str]:
    """Every id that a text names; a range names all ids between its ends."""
    found = set(ID.findall(text))
    for prefix, first, last in RANGE.findall(text):
        width = len(first)
        found |= {f"{prefix}{number:0{width}}" for number in range(int(first), int(last) + 1)}
    if "H3" in found:
        found = found - {"H3"} | {"H3a", "H3b"}
    return found


def ids_in_name(name: str) -> set[str]:
    """Ids in a test's name: test_s1_07_..., test_h3a_..., test_b023_..."""
    return {_from_name(match) for match in NAME_ID.findall(name)}


def _from_name(match: str) -> str:
    head, _, number = match.partition("_")
    if number:
        return f"{head.upper()}-{number}"
    return head[0].upper() + head[1:]


def collect(root: Path = ROOT) -> dict[str, list[str]]:
    """id → tests that name it, as path::name (path::Class::name for methods), sorted."""
    found: dict[str, set[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        place = path.relative_to(root).as_posix()
        for name, text in _tests_of(ast.parse(path.read_text())):
            for id_ in ids_in(text) | ids_in_name(name.rpartition("::")[2]):
                found.setdefault(id_, set()).add(f"{place}::{name}")
    return {id_: sorted(tests) for id_, tests in found.items()}


def _tests_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, text that may name ids) of each test of a module."""
    machines = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name, _own_text(node)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith(
                    "test"
                ):
                    yield f"{node.name}::{child.name}", _own_text(node) + _own_text(child)
        elif isinstance(node, ast.Assign) and (machine := _machine_of(node)) in machines:
            target = node.targets[0]
            assert isinstance(target, ast.Name)
            rules = [
                _own_text(child) for child in machines[machine].body if isinstance(child, ast.FunctionDef)
            ]
            yield target.id, " ".join([_own_text(machines[machine]), *rules])


def _machine_of(node: ast.Assign) -> str:
    """TestPool = PoolMachine.TestCase: hypothesis runs the machine under the first name."""
    value, target = node.value, node.targets[0]
    if not (
        isinstance(value, ast.Attribute) and value.attr == "TestCase" and isinstance(value.value, ast.Name)
    ):
        return ""
    return value.value.id if isinstance(target, ast.Name) and target.id.startswith("Test") else ""


def _own_text(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    strings = [
        leaf.value
        for decorator in node.decorator_list
        for leaf in ast.walk(decorator)
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
    ]
    return " ".join([ast.get_docstring(node) or "", *strings, ""])


def render(text: str, tests: Mapping[str, list[str]]) -> str:
    """The document with the last column of its rows replaced by the tests of the row's id."""
    return "".join(_render_line(line, tests) for line in text.splitlines(keepends=True))


def _render_line(line: str, tests: Mapping[str, list[str]]) -> str:
    row = ROW.match(line.rstrip("\n"))
    if row is None:
        return line
    links = "<br>".join(f"`{test}`" for test in tests.get(row["id"], []))
    return f"| {row['id']} | {row['text']} | {links or '-'} |\n"


def rows(text: str) -> dict[str, tuple[str, list[str]]]:
    """id → (text of the row, tests it lists)."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        if row := ROW.match(line):
            assert row["id"] not in found, f"{row['id']} has two rows"
            found[row["id"]] = row["text"], re.findall(r"`([^`]+)`", row["tests"])
    return found


def problems() -> list[str]:
    """What --check complains about, one sentence each."""
    tests = collect()
    complaints = []
    for path in FILES:
        text = path.read_text()
        if render(text, tests) != text:
            complaints.append(f"{path.name} is stale: run `python -m docs.tables`")
    requirements, faults = (rows(path.read_text()) for path in FILES)
    complaints += [f"{id_}: no test names it" for id_ in requirements if not tests.get(id_)]
    complaints += [
        f"{id_}: neither a test nor an answer"
        for id_, (text, _) in faults.items()
        if not tests.get(id_) and not text.rpartition(" | ")[2].strip(" -")
    ]
    known = requirements.keys() | faults.keys()
    complaints += [
        f"{id_}: named by {named[0]}, in no table" for id_, named in tests.items() if id_ not in known
    ]
    return complaints


def main(arguments: list[str]) -> int:
    """0, or 1 with the complaints on the error stream."""
    if "--check" not in arguments:
        tests = collect()
        for path in FILES:
            path.write_text(render(path.read_text(), tests))
    complaints = problems()
    for complaint in complaints:
        sys.stderr.write(complaint + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
