"""Observation on against off, in turns, in one run: under constant load, and on a published workload.

Constant load: a runner that answers at once or after a fixed time (a device on which the host waits without
holding the interpreter), or the CPU engine; what ends is replaced. Workload: offline256 on a device.
"""

import math
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np

from benchmarks.observed_loop import Loop, Run
from benchmarks.workloads import TEMPERATURE, Workload
from worker.execution.fake_runner import CopiedRows
from worker.execution.runner import Runner
from worker.ids import SequenceId
from worker.pages.page_cache import CacheConfig
from worker.scheduling.audit import RowSpan
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult

PAGE_SIZE = 16
CONTEXT = 4096
PROMPT = 512
MAX_TOKENS = 96
WORKLOAD_SECONDS = 300.0  # after which a run of a workload counts as hung


class Done:
    """A step whose result is there after a time."""

    is_replayed = False

    def __init__(self, step: Step, ready: float) -> None:
        self._step = step
        self._ready = ready

    def is_ready(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() >= self._ready

    def result(self) -> StepResult:
        """Waits as for a device: without the interpreter."""
        if (left := self._ready - time.perf_counter()) > 0:
            time.sleep(left)
        return StepResult([7] * len(self._step.sampled))


class InstantRunner:
    """No model: every token is 7. Keeps the page table, by page, for the audit."""

    def __init__(self, step_seconds: float, max_running: int) -> None:
        self._step_seconds = step_seconds
        self._pages = np.zeros((max_running + 1, CONTEXT // PAGE_SIZE), dtype=np.int32)

    def launch(self, step: Step) -> Done:
        """Ready after the fixed time."""
        if step.new_page_ids:
            rows, indexes, ids = step.new_page_rows, step.new_page_indexes, step.new_page_ids
            self._pages[np.asarray(rows), np.asarray(indexes)] = np.asarray(ids)
        return Done(step, time.perf_counter() + self._step_seconds)

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """Slots of rows."""
        offsets = np.arange(PAGE_SIZE, dtype=np.int32)
        slots = (self._pages[rows][:, :, None] * PAGE_SIZE + offsets).reshape(len(rows), -1)
        return [row[:count].tolist() for row, count in zip(slots, num_slots, strict=True)]

    def begin_read(self, spans: Sequence[RowSpan]) -> CopiedRows:
        """Parts of rows, copied at once."""
        lengths = [span.first + len(span.slots) for span in spans]
        whole = self.read_rows([span.row for span in spans], lengths)
        return CopiedRows([row[span.first :] for row, span in zip(whole, spans, strict=True)])

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True)
class Setting:
    """One kind of run."""

    sequences: int
    pages: int
    step_ms: float
    seconds: float
    prompt: int = PROMPT  # tokens


def cpu_runner(model: str, setting: Setting) -> Runner:
    """The CPU engine's device, with real weights."""
    # Here and not above: the rest of this benchmark needs no torch.
    from worker.config import WorkerConfig
    from worker.torch_device import TorchDevice

    config = WorkerConfig(
        model=model,
        page_size=PAGE_SIZE,
        num_pages=setting.pages,
        max_running=setting.sequences,
        max_context=CONTEXT,
        max_batch_tokens=512,
    )
    return TorchDevice().build(config)


def under_load(setting: Setting, observed: bool, runner: Runner | None) -> Run:
    """Figures of a window after a warm-up; what ends is replaced."""
    config = SchedulerConfig(
        CacheConfig(setting.pages, PAGE_SIZE),
        max_running=setting.sequences,
        max_step_tokens=8192,
        max_context_tokens=CONTEXT,
    )
    instant = InstantRunner(setting.step_ms / 1000, setting.sequences)
    numbers = count(1)

    def add() -> None:
        number = next(numbers)
        prompt = array("I", [number % 997 + 100]) * setting.prompt
        loop.add(RequestSpec(SequenceId(number), prompt, SamplingParams(max_tokens=MAX_TOKENS), source="s"))

    with TemporaryDirectory() as folder:
        loop = Loop(
            Scheduler(config),
            runner or cast(Runner, instant),
            Path(folder),
            observed=observed,
            overlap=setting.step_ms > 0,
            on_end=add,
        )
        for _ in range(setting.sequences):
            add()
        with loop.running():
            time.sleep(1.0)
            first = loop.marks()
            time.sleep(setting.seconds)
            found = Run.between(first, loop.marks())
    return replace(found, unrecorded=loop.unrecorded)


def on_workload(
    scheduler: Scheduler, runner: Runner, workload: Workload, *, observed: bool, overlap: bool
) -> Run:
    """All requests at once, to the last end; a fresh scheduler, so nothing is cached."""
    left, is_done = len(workload.prompts), threading.Event()

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            is_done.set()

    with TemporaryDirectory() as folder:
        loop = Loop(scheduler, runner, Path(folder), observed=observed, overlap=overlap, on_end=ended)
        with loop.running():
            first = loop.marks()
            requests = zip(workload.prompts, workload.output_tokens, strict=True)
            for number, (prompt, tokens) in enumerate(requests, 1):
                params = SamplingParams(
                    temperature=TEMPERATURE, max_tokens=tokens, stop_at_eos=False, seed=number
                )
                loop.add(RequestSpec(SequenceId(number), array("I", prompt), params, source="s"))
            if not is_done.wait(WORKLOAD_SECONDS):
                raise TimeoutError(f"{left} of {len(workload.prompts)} have not ended")
            last = loop.marks()
        assert last.tokens == sum(workload.output_tokens), f"{last.tokens} tokens came"
        assert not loop.unrecorded, f"{loop.unrecorded} page events are missing in the recording"
        return Run.between(first, last)


def in_turns(run: Callable[[bool], Run], rounds: int, deadline: float = math.inf) -> dict[str, object]:
    """Off and on, each round beginning with the other one; ``cost``: of each round, share of tokens/s.

    ``deadline``, of the monotonic clock: no round begins that would end after it, going by the longest.
    """
    runs: dict[bool, list[Run]] = {False: [], True: []}
    longest = 0.0
    for number in range(rounds):
        began = time.monotonic()
        if number and began + longest > deadline:
            break
        for observed in (False, True) if number % 2 == 0 else (True, False):
            runs[observed].append(run(observed))
        longest = max(longest, time.monotonic() - began)
    off, on = (_median(runs[observed]) for observed in (False, True))
    pairs = zip(runs[False], runs[True], strict=True)
    costs = [1 - seen.tokens_per_second / unseen.tokens_per_second for unseen, seen in pairs]
    return {
        "rounds": len(costs),
        "tokens_per_second_off": round(off.tokens_per_second),
        "tokens_per_second_on": round(on.tokens_per_second),
        "cost_median": round(statistics.median(costs), 4),
        "cost_standard_error": round(_standard_error(costs), 4),
        "cost_of_each_round": [round(cost, 4) for cost in costs],
        "engine_cpu_us_per_step_off": round(off.engine_seconds_per_step * 1e6, 1),
        "engine_cpu_us_per_step_on": round(on.engine_seconds_per_step * 1e6, 1),
        "engine_look_share": round(on.look_share, 4),
        "observer_cpu_share": round(on.observer_share, 4),
        "unrecorded_events": sum(run.unrecorded for run in runs[True]),
    }


def compare(setting: Setting, rounds: int, runner: Runner | None = None) -> dict[str, object]:
    """Constant load, off and on."""
    return in_turns(lambda observed: under_load(setting, observed, runner), rounds)


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; 0: a single one tells nothing."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _median(runs: Sequence[Run]) -> Run:
    return Run(
        statistics.median(run.tokens_per_second for run in runs),
        statistics.median(run.engine_seconds_per_step for run in runs),
        statistics.median(run.look_share for run in runs),
        statistics.median(run.observer_share for run in runs),
    )
