"""Log lines for the operator: `time level logger event=... key=value ...`, one per lifecycle event.

Knows nothing of what is logged. Nothing here is called per token.
"""

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from kvatlas.log_lines import LineFormatter

LONGEST_VALUE = 1024
"""Characters of one: who else has written it, as a service its own id, may have written megabytes."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def log_event(logger: logging.Logger, level: int, name: str, /, **values: object) -> None:
    """Logs one event; values with spaces are quoted, long ones cut."""
    if logger.isEnabledFor(level):
        pairs = " ".join(f"{key}={_quoted(value)}" for key, value in values.items())
        logger.log(level, "event=%s %s", name, pairs)


@contextmanager
def log_phase(logger: logging.Logger, phase: str) -> Iterator[None]:
    """Logs how long a part of the start took, once it is over."""
    began = time.monotonic()
    yield
    log_event(logger, logging.INFO, "phase", phase=phase, seconds=time.monotonic() - began)


def trace_id_of(traceparent: str) -> str:
    """Trace id of a W3C trace context, "-" for anything else: a client may have sent it."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else "-"


def set_up(level: str, stream: TextIO | None = None) -> None:
    """Sends the logs of this process to a stream, stderr if none is given."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > LONGEST_VALUE:
        text = text[:LONGEST_VALUE] + "…"
    if text and not any(character in text for character in ' "=\n'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
