"""Every line that a process logs names its event: who searches a log needs one word."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "worker", "service", "dashboard", "protos/kvatlas")
LEVELS = {"debug": 0, "info": 0, "warning": 0, "error": 0, "exception": 0, "critical": 0, "log": 1}
"""Methods of a logger, and the place of the text among their arguments."""
EVENT = re.compile(r"event=(%s|[a-z][a-z0-9_]*)( |$)")
NAME = re.compile(r"[a-z][a-z0-9_]*")
ITS_ONE_WRITER = "worker/log.py"  # log_event, whose callers are looked at instead


def texts_without_event(source: str) -> Iterator[str]:
    """The texts of log calls that do not begin with `event=name`; what is no literal is shown as code."""
    tree = ast.parse(source)
    loggers = {name for node in ast.walk(tree) for name in _loggers(node)}
    texts = {name: value for node in ast.walk(tree) for name, value in _constants(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
            if ast.unparse(node.func.value) in loggers:
                text = node.args[LEVELS[node.func.attr]]
                said = texts.get(ast.unparse(text), _literal(text))
                if said is None or not EVENT.match(said):
                    yield said or ast.unparse(text)
        elif ast.unparse(node.func).endswith("log_event"):
            said = _literal(node.args[2])
            if said is None or not NAME.fullmatch(said):
                yield said or ast.unparse(node.args[2])


def _loggers(node: ast.AST) -> Iterator[str]:
    """Names that a module gives to what getLogger returns, and the module `logging` itself."""
    yield "logging"
    if isinstance(node, ast.Assign) and "getLogger(" in ast.unparse(node.value):
        yield from (ast.unparse(target) for target in node.targets)


def _constants(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Assign) and (value := _literal(node.value)) is not None:
        yield from ((ast.unparse(target), value) for target in node.targets)


def _literal(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):  # its beginning is enough
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def test_every_log_line_begins_with_its_event() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) != ITS_ONE_WRITER
        for text in texts_without_event(path.read_text())
    }
    assert found == set()


def test_every_event_that_documents_name_is_logged() -> None:
    """Whoever searches a log for it would find nothing, for ever."""
    code = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    named = {
        name
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"))
        for name in re.findall(r"event=([a-z][a-z0-9_]*)", path.read_text())
    }
    assert len(named) > 4
    assert [name for name in sorted(named) if f"event={name}" not in code and f'"{name}"' not in code] == []


LOGGER = 'import logging\nlog = logging.getLogger("x")\n'


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('log.info("event=ready seconds=%d", 1)', []),
        ('log.info("event=ready")', []),
        ('log.info(f"event=ready port={port}")', []),
        ('text = "event=ready seconds=%d"\nlog.log(20, text, 1)', []),
        ('log_event(log, 20, "ready", seconds=1)', []),
        ('other.info("not a log line")', []),
        ('log.info("ready")', ["ready"]),
        ('log.warning("event=Ready")', ["event=Ready"]),
        ('log.log(20, "ready event=x")', ["ready event=x"]),
        ('logging.error("to the root")', ["to the root"]),
        ("log.exception(text)", ["text"]),
        ('log_event(log, 20, "is ready")', ["is ready"]),
        ("log.info(*what)", ["*what"]),
    ],
)
def test_the_check_sees_what_it_is_for(code: str, found: list[str]) -> None:
    assert list(texts_without_event(LOGGER + code)) == found
