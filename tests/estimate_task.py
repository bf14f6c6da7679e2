"""An estimate of a pool of eight pages with its own setting, of which a test says what was seen."""

from typing import Any

from worker.trace.counts import Setting
from worker.trace.estimate import EstimateTask
from worker.trace.workload import Limits


def estimate_task(**seen: Any) -> EstimateTask:
    """`seen` are fields of EstimateTask: the window, the steps, the looks, the number of requests."""
    pool = {"page_size": 16, "num_pages": 8, "policy": "lru", "granularity": 8}
    return EstimateTask(settings=(Setting(8, 16, "lru"),), limits=Limits(8, 256, 512), **pool, **seen)
