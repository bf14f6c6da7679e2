"""Log lines for the operator: `time level logger event=... key=value ...`, one per lifecycle event or call.

Knows nothing of what is logged. Nothing here is called per token.
"""

import logging
import sys
import time
from collections.abc import Callable


def set_up(level: str, context: Callable[[], str] = str) -> None:
    """Sends the logs of this process to stderr; each line ends with what `context` says of its moment."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s%(context)s"
    )
    formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)

    def add_context(record: logging.LogRecord) -> bool:
        record.context = context()
        return True

    handler.addFilter(add_context)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
