"""docs/errors.md: every row names one test that exists, every case and every reason has its row."""

import ast
import re
from pathlib import Path

from kvatlas.v1 import errors_pb2

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "integration"
CASES = sorted(TESTS.glob("test_status_of_*.py"))


def rows() -> list[list[str]]:
    """Cells of the table, without its head."""
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in table[1:]]


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def cases() -> list[str]:
    """Names of the functions that the cases of the parametrized tests are made of."""
    tables = [
        node.value
        for path in CASES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROWS_OF_TABLE"
    ]
    assert len(tables) == len(CASES) > 0
    rows_of_tables = [row for table in tables if isinstance(table, ast.Tuple) for row in table.elts]
    return [ast.unparse(row.args[0]) for row in rows_of_tables if isinstance(row, ast.Call)]


def test_each_row_names_exactly_one_test_and_it_exists() -> None:
    claims = []
    for cells in rows():
        assert len(cells) == 4, cells
        claim = re.fullmatch(r"`(?:\[(\w+)\]|(test_\w+\.py)::(test_\w+))`", cells[3])
        assert claim is not None, f"not one test: {cells[3]}"
        case, file, name = claim.groups()
        if case is None:
            assert name in functions_of(TESTS / file), cells[3]
        claims.append(case or f"{file}::{name}")
    assert len(claims) == len(set(claims)), "two rows name the same test"
    assert sorted(claim for claim in claims if "::" not in claim) == sorted(cases())


def test_each_case_of_the_test_has_one_row_with_its_status_and_reason() -> None:
    """The case asserts what the row says: both are read from their sources."""
    text = "".join(path.read_text() for path in CASES)
    for situation, status, reason, claim in rows():
        if not claim.startswith("`["):
            continue
        case = claim[2:-2]
        call = re.search(rf"Row\(\s*{case},\s*\"(\w+)\"(?:,\s*\"(\w+)\")?", text)
        assert call is not None, case
        assert status.split()[0].strip(",") == call[1], situation
        assert (call[2] or "none") == re.split(r"[;, ]", reason)[0], situation


def test_each_reason_has_a_row() -> None:
    told = {word for cells in rows() for word in re.findall(r"[A-Z][A-Z_]+", cells[2])}
    known = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert known - {"UNSPECIFIED"} <= told
