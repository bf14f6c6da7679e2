"""One event, one line: what clients send cannot write lines of its own into a log."""

import io
import logging

import pytest

from kvatlas.log_lines import LineFormatter
from worker.log import LONGEST_VALUE, log_event

FORGED = "2026-01-01T00:00:00.000Z level=INFO logger=service event=forged"
BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.fixture
def log() -> logging.Logger:
    logger = logging.getLogger("test.log_lines")
    logger.propagate = False
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(LineFormatter())
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    return logger


def written(logger: logging.Logger) -> str:
    text = logger.handlers[0].stream.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("separator", BREAKS, ids=repr)
def test_a_value_with_a_line_break_stays_in_its_line(log: logging.Logger, separator: str) -> None:
    log.warning("event=call request=%s", f"a{separator}{FORGED}")
    log_event(log, logging.WARNING, "call", request=f"a{separator}{FORGED}")
    lines = written(log).splitlines()
    assert len(lines) == 2
    assert all(line.count("event=call") == 1 for line in lines)


@pytest.mark.parametrize("separator", BREAKS, ids=repr)
def test_lines_of_an_exception_are_marked(log: logging.Logger, separator: str) -> None:
    try:
        raise ValueError(f"a{separator}{FORGED}")
    except ValueError:
        log.exception("event=bug")
    first, *rest = written(log).splitlines()
    assert first.endswith("event=bug")
    assert rest
    assert all(line.startswith("| ") for line in rest)
    assert any("ValueError" in line for line in rest)


def test_a_terminal_is_not_spoken_to(log: logging.Logger) -> None:
    log.warning("event=call request=%s", "\x1b[2J\x9b31m\x07\0")
    assert r"\x1b[2J\x9b31m\x07\x00" in written(log)
    assert "\x1b" not in written(log)


def test_what_is_readable_is_left_as_it_is(log: logging.Logger) -> None:
    log.warning("event=call why=%r", "Zürich 東京 \\ 50 %")
    assert "Zürich 東京" in written(log)


def test_a_long_value_is_cut_and_the_next_one_is_whole(log: logging.Logger) -> None:
    log_event(log, logging.WARNING, "hello_refused", service="x" * 1_000_000, why="y" * LONGEST_VALUE)
    (line,) = written(log).splitlines()
    assert line.endswith(f" service={'x' * LONGEST_VALUE}… why={'y' * LONGEST_VALUE}")
