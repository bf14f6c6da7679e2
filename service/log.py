"""Log lines for the operator: `time level logger event=... key=value ...`, one per lifecycle event or call.

Knows nothing of what is logged. Nothing here is called per token.
"""

import logging
import sys
from collections.abc import Callable

from kvatlas.log_lines import LineFormatter


def set_up(level: str, context: Callable[[], str] = str) -> None:
    """Sends the logs of this process to stderr; each line ends with what `context` says of its moment."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(ending="%(context)s"))

    def add_context(record: logging.LogRecord) -> bool:
        record.context = context()
        return True

    handler.addFilter(add_context)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
