"""When a process rehearses: what it does for a request is then done for nobody, so that its code stays hot.

Shared by service and worker, which rehearse their own parts. Knows nothing of them.
"""

import os
from pathlib import Path

LASTING_SECONDS = 0.3  # after the last request
EVERY_SECONDS = 0.004
PROMPT_TOKENS = 512  # of what is rehearsed
ENOUGH_CORES = 4
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def has_cores(quota: Path = _QUOTA) -> bool:
    """Whether this process may use so many that a rehearsal takes nothing from anybody.

    `quota`: the file of its cgroup (version 2), microseconds of processors in so many of the clock.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        most, period = quota.read_text().split()
        cores = min(cores, int(most) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # no such file, or no quota: "max"
    return cores >= ENOUGH_CORES
