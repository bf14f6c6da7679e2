"""Log lines for the operator: `time level logger event=... key=value ...`, one per lifecycle event or call.

Knows nothing of what is logged. Nothing here is called per token.
"""

import logging
import sys
import time


def set_up(level: str) -> None:
    """Sends the logs of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s")
    formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
