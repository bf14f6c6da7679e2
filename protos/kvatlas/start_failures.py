"""Why a process did not start, for whoever reads `event=start_failed reason=… why=…`.

Owns no list of its own: an exception that ends a start brings its reason along.
"""

import errno
import re

_REASON = re.compile(r"[A-Z][A-Z0-9_]*")
UNKNOWN = "START_FAILED"


def start_reason(error: Exception) -> str:
    """The error's `reason` where it has one (ModelError, for one), or its errno's name (EADDRINUSE)."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and _REASON.fullmatch(reason):
        return str(reason)
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number, UNKNOWN) if number is not None else UNKNOWN
