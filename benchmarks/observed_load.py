"""Observation on against off, in turns, in one run: under constant load, and on a published workload.

Constant load: a device whose steps take a fixed time, or the CPU engine; what ends is replaced. Workload:
offline256 on a device. The interpreter is set up as a worker's: how soon a thread gives it up, and what the
collector need not walk.
"""

import gc
import math
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fixed_device import FixedDevice
from benchmarks.launch_marks import Mark, MarkedRunner, StepTimes
from benchmarks.observed_loop import Loop, Run
from benchmarks.workloads import TEMPERATURE, Workload
from worker.__main__ import SWITCH_SECONDS
from worker.execution.runner import Runner
from worker.ids import SequenceId
from worker.pages.page_cache import CacheConfig
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig

PAGE_SIZE = 16
CONTEXT = 4096
PROMPT = 512
MAX_TOKENS = 96
WORKLOAD_SECONDS = 300.0  # after which a run of a workload counts as hung


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
    scripted = FixedDevice(setting.step_ms / 1000, setting.sequences, context=CONTEXT, page_size=PAGE_SIZE)
    numbers = count(1)

    def add() -> None:
        number = next(numbers)
        prompt = array("I", [number % 997 + 100]) * setting.prompt
        loop.add(RequestSpec(SequenceId(number), prompt, SamplingParams(max_tokens=MAX_TOKENS), source="s"))

    with TemporaryDirectory() as folder:
        loop = Loop(
            Scheduler(config),
            runner or scripted,
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
    scheduler: Scheduler, runner: Runner, workload: Workload, mark: Mark, *, observed: bool, overlap: bool
) -> Run:
    """All requests at once, to the last end; a fresh scheduler, so nothing is cached."""
    marked = MarkedRunner(runner, mark)
    left, is_done = len(workload.prompts), threading.Event()

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            is_done.set()

    with TemporaryDirectory() as folder:
        loop = Loop(
            scheduler,
            marked,
            Path(folder),
            observed=observed,
            overlap=overlap,
            on_end=ended,
            read_memory=getattr(runner, "memory_bytes", None),
        )
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
        return replace(Run.between(first, last), times=marked.times())


def in_turns(run: Callable[[bool], Run], rounds: int, deadline: float = math.inf) -> dict[str, object]:
    """Off and on, each round beginning with the other one: figures of both, and what on costs.

    ``deadline``, of the monotonic clock: no round begins that would end after it, going by the longest.
    """
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    pairs: list[tuple[Run, Run]] = []
    longest = 0.0
    try:
        for number in range(rounds):
            began = time.monotonic()
            if number and began + longest > deadline:
                break
            order = (False, True) if number % 2 == 0 else (True, False)
            found = {observed: _settled(run, observed) for observed in order}
            pairs.append((found[False], found[True]))
            longest = max(longest, time.monotonic() - began)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(switch_seconds)
    return _compared(pairs)


def _settled(run: Callable[[bool], Run], observed: bool) -> Run:
    """One run, in which the collector walks nothing that was there before."""
    gc.collect()
    gc.freeze()  # with what is frozen already: only the first run waits until all of it was walked
    return run(observed)


def _compared(pairs: Sequence[tuple[Run, Run]]) -> dict[str, object]:
    """Of runs off and on. ``cost``: of each round, the share of tokens/s that is lost. ``cost_by_idle``: the
    share of its time that the device waited longer for the host than without; it lacks what observation
    makes the device slower by, and has none of the noise of a device's clock.
    """
    off, on = (_median([pair[which] for pair in pairs]) for which in (0, 1))
    costs = [1 - seen.tokens_per_second / unseen.tokens_per_second for unseen, seen in pairs]
    idle = [(seen.times.idle - unseen.times.idle) / unseen.seconds for unseen, seen in pairs]
    return {
        "rounds": len(costs),
        "tokens_per_second_off": round(off.tokens_per_second),
        "tokens_per_second_on": round(on.tokens_per_second),
        "cost_mean": round(statistics.mean(costs), 4),
        "cost_median": round(statistics.median(costs), 4),
        "cost_standard_error": round(_standard_error(costs), 4),
        "cost_of_each_round": [round(cost, 4) for cost in costs],
        "cost_by_idle_mean": round(statistics.mean(idle), 5),
        "cost_by_idle_standard_error": round(_standard_error(idle), 5),
        "cost_by_idle_of_each_round": [round(cost, 5) for cost in idle],
        "device_off": _rounded(off.times),
        "device_on": _rounded(on.times),
        "engine_cpu_us_per_step_off": round(off.engine_seconds_per_step * 1e6, 1),
        "engine_cpu_us_per_step_on": round(on.engine_seconds_per_step * 1e6, 1),
        "engine_look_share": round(on.look_share, 4),
        "observer_cpu_share": round(on.observer_share, 4),
        "unrecorded_events": sum(seen.unrecorded for _, seen in pairs),
    }


def _rounded(times: StepTimes) -> dict[str, float]:
    """Medians over runs, in milliseconds."""
    return {
        "idle_ms": round(times.idle * 1e3, 2),
        "late_steps": times.late_steps,
        "turn_ms_p50": round(times.turn_p50 * 1e3, 3),
        "turn_ms_p99": round(times.turn_p99 * 1e3, 3),
        "turn_ms_max": round(times.turn_max * 1e3, 3),
    }


def compare(setting: Setting, rounds: int, runner: Runner | None = None) -> dict[str, object]:
    """Constant load, off and on."""
    return in_turns(lambda observed: under_load(setting, observed, runner), rounds)


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; 0: a single one tells nothing."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _median(runs: Sequence[Run]) -> Run:
    """Each figure's own median."""

    def of(figure: Callable[[Run], float]) -> float:
        return statistics.median(map(figure, runs))

    return Run(
        of(lambda run: run.tokens_per_second),
        of(lambda run: run.engine_seconds_per_step),
        of(lambda run: run.look_share),
        of(lambda run: run.observer_share),
        of(lambda run: run.seconds),
        StepTimes(
            of(lambda run: run.times.idle),
            round(of(lambda run: run.times.late_steps)),
            of(lambda run: run.times.turn_p50),
            of(lambda run: run.times.turn_p99),
            of(lambda run: run.times.turn_max),
        ),
    )
