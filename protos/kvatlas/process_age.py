"""How long this process has been there: so that a start is measured from its beginning, imports included."""

import os
import time
from pathlib import Path

_LOADED = time.monotonic()
_STAT = Path("/proc/self/stat")
_START_FIELD = 19  # of those behind the name, which may hold spaces and parentheses: number 22 in proc(5)


def process_age() -> float:
    """Seconds since this process was started, to 10 ms; where nobody says, since this module was loaded."""
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[_START_FIELD])
    except OSError:
        return time.monotonic() - _LOADED
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
