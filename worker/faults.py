"""Faults planted on purpose: what alarms and audits must see, in a running worker.

Reached only by the setting `debug_faults`. Each fault is what a bug of that kind leaves behind; nothing
else of the worker knows of them.
"""

import logging
from array import array
from collections.abc import Callable

from worker.log import log_event
from worker.scheduling.scheduler import Scheduler

logger = logging.getLogger("worker.faults")

NOBODY = 65_535  # owner number of the pages that are lost


def lose_page(scheduler: Scheduler) -> None:
    """A page stays referenced by no row: an end path that forgot it."""
    pages = scheduler.cache.allocate(array("H", (NOBODY,)))
    assert pages is not None, "a pool without a free page"


FAULTS: dict[str, Callable[[Scheduler], None]] = {"page_leak": lose_page}


def plant(name: str, scheduler: Scheduler) -> None:
    """Before the engine runs."""
    log_event(logger, logging.WARNING, "fault_planted", fault=name)
    FAULTS[name](scheduler)
