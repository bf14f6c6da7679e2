"""The tree obeys its own rules: names, packages, processes, and documents that point at what exists."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.cli.options import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    ROOT / "kernels",
    ROOT / "worker",
    ROOT / "service",
    ROOT / "dashboard",
    ROOT / "protos" / "kvatlas",
]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda path: str(path.relative_to(ROOT)),
)
# The two seed documents' own vocabulary is not ours; who reproduces them must speak it.
HISTORICAL = ROOT / "kernels" / "paged_cuda"
FORBIDDEN_NAMES = re.compile(r"^(block_tables?|block_ids?|req_to_token\w*|loc|locs|job|jobs|utils|helpers)$")


def sources(*, with_tests: bool = False) -> Iterator[Path]:
    folders = [*PACKAGES, ROOT / "benchmarks", *([ROOT / "tests"] if with_tests else [])]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def test_names_of_other_systems_are_not_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources()
        if HISTORICAL not in path.parents
        for name, line in identifiers(ast.parse(path.read_text()))
        if FORBIDDEN_NAMES.match(name)
    ]
    assert found == []


def test_no_file_is_named_after_nothing_or_after_a_library() -> None:
    bad = {"utils.py", "helpers.py", "common.py", "misc.py", "triton.py", "zmq.py", "torch.py", "grpc.py"}
    assert [path for path in sources() if path.name in bad] == []


def test_packages_hold_only_a_docstring_and_are_typed() -> None:
    """Importing a package must cost nothing: what a module needs, that module imports."""
    for root in PACKAGES:
        assert (root / "py.typed").exists(), root
        for package in root.rglob("__init__.py"):
            body = ast.parse(package.read_text()).body
            assert len(body) == 1, package
            assert isinstance(body[0], ast.Expr), package
            assert ast.get_docstring(ast.parse(package.read_text())), package
    assert not (ROOT / "protos" / "__init__.py").exists()


def test_tests_are_no_packages_and_have_names_of_their_own() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_process_is_forked() -> None:
    """B109: gRPC and CUDA do not survive a fork; processes are started by exec."""
    forks = re.compile(
        r"os\.fork\(|preexec_fn|get_context\(\s*[\"']fork|set_start_method\(\s*[\"']fork|\bForkingPickler|forkserver"
    )
    found = [str(path.relative_to(ROOT)) for path in sources() if forks.search(path.read_text())]
    assert found == ["kernels/compile_process.py"]  # started by exec, and makes sure that it has neither


def test_no_process_is_started_without_its_asserts() -> None:
    """Asserts guard the pages: nothing of ours starts Python with -O."""
    places = [ROOT / "Makefile", ROOT / ".ci" / "run", *sources(), *DOCUMENTS]
    made = {"__pycache__", "node_modules"}
    places += [p for p in (ROOT / "deploy").rglob("*") if p.is_file() and not made & set(p.parts)]
    optimized = re.compile(r"python3?\s+-O|PYTHONOPTIMIZE\s*=|[\"']-OO?[\"']")
    assert [str(path.relative_to(ROOT)) for path in places if optimized.search(path.read_text())] == []


def test_importing_kernels_is_cheap_and_shows_no_version() -> None:
    """`kernels` is also a package that transformers looks for: without a version ours does no harm."""
    code = (
        "import sys, kernels; "
        "assert not hasattr(kernels, '__version__'); "
        "sys.exit(' '.join({'torch', 'numpy', 'triton'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_distribution_called_kernels_is_installed() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


# What documents say.

TOP_LEVEL = r"(?:protos|service|worker|kernels|dashboard|tests|benchmarks|docs|deploy|examples|\.ci)"
PATH = re.compile(rf"^{TOP_LEVEL}(?:/[\w.\-]+)*/?$")


def paths_in(text: str) -> Iterator[str]:
    """Paths in backticks, and targets of relative links."""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        for word in quoted.split():
            word = word.strip(",;:()").split("::")[0]
            if "/" in word and PATH.match(word):
                yield word
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            yield target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_named_in_documents_exist(document: Path) -> None:
    missing = [
        path
        for path in paths_in(document.read_text())
        if not (ROOT / path).exists() and not (document.parent / path).exists()
    ]
    assert missing == []


def anchor(heading: str) -> str:
    """What a heading is called in a link."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def test_headings_that_links_lead_to_exist() -> None:
    anchors = {
        path.resolve(): {anchor(found) for found in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)}
        for path in DOCUMENTS
    }
    links = [
        (document, target)
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)\s]*#[^)\s]*)\)", document.read_text())
        if "://" not in target
    ]
    assert links
    for document, target in links:
        path, _, name = target.partition("#")
        there = (document.parent / path).resolve() if path else document.resolve()
        assert name in anchors.get(there, {name}), (document.name, target)


def test_documents_named_in_sources_exist() -> None:
    """Comments send the reader to figures: where a document moves, they follow."""
    named = [
        (str(path.relative_to(ROOT)), document)
        for path in sources(with_tests=True)
        for document in re.findall(r"(?<![\w/])docs/[\w/\-]+\.md\b", path.read_text())
    ]
    assert len(named) > 20
    assert [found for found in named if not (ROOT / found[1]).exists()] == []


def cells(line: str) -> int:
    """Of a row of a table; a bar within backticks ends a cell, too, unless it is escaped."""
    return len(re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_a_table_have_the_columns_of_its_head(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, rule, *rows = table.splitlines()
        assert re.fullmatch(r"\|(?: ?:?-+:? ?\|)+", rule), head
        assert [row for row in [rule, *rows] if cells(row) != cells(head)] == [], head


def test_the_makefile_has_every_verb_that_documents_name() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        code = re.findall(
            r"`([^`\n]+)`|^    (.+)$|^```\w*\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL
        )
        named = {
            verb for parts in code for part in parts for verb in re.findall(r"\bmake ([a-z][a-z-]*)", part)
        }
        assert named <= verbs, document


def test_every_command_that_documents_name_exists() -> None:
    for document in DOCUMENTS:
        named = set(re.findall(r"`kvatlas ([a-z]+)", document.read_text()))
        assert named <= COMMANDS.keys(), document


def test_the_two_commands_of_the_readme_do_all_set_up() -> None:
    """A new clone needs `make demo` and `make test`, nothing before them."""
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    assert "make demo" in readme
    assert "make test" in readme
    assert re.search(r"^demo: \$\(READY\)", makefile, re.MULTILINE)
    assert re.search(r"^test: \$\(DEV\)", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_index_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text()
    decisions = sorted(folder.glob("[0-9]*.md"))
    assert [path.name for path in decisions if path.name not in index] == []
    for number, path in enumerate(decisions, start=1):
        text = path.read_text()
        assert path.name.startswith(f"{number:04}-"), path
        for heading in ("Status:", "## Context", "## Decision", "## Rejected", "## Consequences"):
            assert heading in text, (path.name, heading)
