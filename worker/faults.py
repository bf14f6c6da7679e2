"""Faults planted on purpose: what alarms, audits and services must see, in a running worker.

Reached only by the setting `debug_faults`. `page_leak` is there from the start, as a bug of that kind leaves
it behind; with `requests` a client brings one by a prompt that begins with MARK times the id of a `Fault`.
Nothing else of the worker knows of them.
"""

import logging
import os
import signal
import time
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from worker.execution.runner import RowsRead, Runner, StepHandle
from worker.ids import SequenceId
from worker.log import log_event
from worker.scheduling.audit import RowSpan
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import Step

logger = logging.getLogger("worker.faults")

NOBODY = 65_535  # owner number of the pages that are lost
MARK = 8  # equal tokens at the beginning of a prompt
SLOW_STEP_SECONDS = 0.25


class Fault(IntEnum):
    """What a request does to its worker; the token id that asks for it."""

    BREAKS_STEP = 1  # every step that has its prompt raises
    OUT_OF_MEMORY = 2  # the device has no memory left for it
    KILLS_WORKER = 3  # the process is gone
    SLOW_STEPS = 4  # while it runs, each step takes SLOW_STEP_SECONDS: what runs goes on running


def lose_page(scheduler: Scheduler) -> None:
    """A page stays referenced by no row: an end path that forgot it."""
    pages = scheduler.cache.allocate(array("H", (NOBODY,)))
    assert pages is not None, "a pool without a free page"


class FaultyRunner:
    """A `Runner` around another: does what marked prompts ask for, everything else as that one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._slow: set[SequenceId] = set()

    def launch(self, step: Step) -> StepHandle:
        """See Runner."""
        for start in step.row_starts:
            fault = _fault_of(start.token_ids)
            if fault is Fault.SLOW_STEPS:
                self._slow.add(start.sequence_id)
            elif fault is not None:
                _commit(fault)
        self._slow.intersection_update(step.sequence_ids)
        if self._slow:
            time.sleep(SLOW_STEP_SECONDS)
        return self._runner.launch(step)

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """See Runner."""
        return self._runner.read_rows(rows, num_slots)

    def begin_read(self, spans: Sequence[RowSpan]) -> RowsRead:
        """See Runner."""
        return self._runner.begin_read(spans)

    def close(self) -> None:
        """See Runner."""
        self._runner.close()

    def __getattr__(self, name: str) -> Any:
        """What only some runners have."""
        return getattr(self._runner, name)


def _fault_of(token_ids: Sequence[int]) -> Fault | None:
    mark = list(token_ids[:MARK])
    is_marked = len(mark) == MARK and len(set(mark)) == 1 and mark[0] in set(Fault)
    return Fault(mark[0]) if is_marked else None


def _commit(fault: Fault) -> None:
    if fault is Fault.KILLS_WORKER:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault is Fault.OUT_OF_MEMORY:
        raise MemoryError("a planted fault")
    raise RuntimeError("a planted fault")


def plant(name: str, scheduler: Scheduler, runner: Runner) -> Runner:
    """Before the engine runs; the runner that it is to have."""
    log_event(logger, logging.WARNING, "fault_planted", fault=name)
    if name == "page_leak":
        lose_page(scheduler)
        return runner
    assert name == "requests", f"no fault is called {name!r}"
    return FaultyRunner(runner)
