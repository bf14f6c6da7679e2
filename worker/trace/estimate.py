"""EstimateCache's work, in a process of its own: a sample of requests in, figures of each setting out.

Apart from the worker, because a simulation is Python at full speed: in a thread it would take the interpreter
from the engine, a millisecond at a time. Reads pickles from its parent, writes one line of JSON.
"""

import json
import math
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import BinaryIO

from worker.readers.samples import LoggedRequest, PoolLook
from worker.trace.building import trace_requests
from worker.trace.counts import Counts, Setting
from worker.trace.mooncake import ASSUMED_STEP
from worker.trace.observed import Observed, observe
from worker.trace.step_time import StepTime, fit
from worker.trace.what_if import COARSEST, Question, answer, calm_collector
from worker.trace.workload import Limits, Trace
from worker.traffic import StepCount

WARMUP_SHARE = 1 / 3  # of a sample that does not reach back to the start of the worker
NICENESS = 5
EXACT_RUNS = 2_048
"""Requests times settings up to which tokens are moved one by one: that takes 4 to 8 times as long. Moved as
one, they let a step take as many more prompts, which then do not find each other's pages: of a burst of equal
prompts 27 % were hits instead of 75 %."""
REQUESTS_PER_PIECE = 32  # so that no pickle holds the interpreter for long


@dataclass(frozen=True, slots=True)
class EstimateTask:
    """Everything but the requests."""

    settings: Sequence[Setting]
    limits: Limits
    page_size: int
    num_pages: int
    policy: str
    granularity: int
    end_us: int
    window_us: int  # 0: all of the sample
    is_whole: bool  # the sample reaches back to the start of the worker
    steps: Sequence[StepCount]
    looks: Sequence[PoolLook]
    num_requests: int


def write_task(task: EstimateTask, requests: Sequence[LoggedRequest], out: BinaryIO) -> None:
    """Hands a task over, piece by piece."""
    pickle.dump(task, out, protocol=5)
    for first in range(0, len(requests), REQUESTS_PER_PIECE):
        pickle.dump(requests[first : first + REQUESTS_PER_PIECE], out, protocol=5)
    out.flush()


def read_task(source: BinaryIO) -> tuple[EstimateTask, list[LoggedRequest]]:
    """The other end."""
    task: EstimateTask = pickle.load(source)
    requests: list[LoggedRequest] = []
    while len(requests) < task.num_requests:
        requests += pickle.load(source)
    return task, requests


def estimate(task: EstimateTask, requests: Sequence[LoggedRequest]) -> dict[str, object]:
    """All settings, what was observed, and what both rest on."""
    start_us = 0 if task.is_whole else min((request.time_us for request in requests), default=task.end_us)
    count_us = start_us
    if not task.is_whole:
        count_us += int((task.end_us - start_us) * WARMUP_SHARE)
    if task.window_us:
        count_us = max(count_us, task.end_us - task.window_us)
    trace = _trace(task, requests, start_us)
    question = Question(
        trace,
        _step_time(task.steps),
        task.settings,
        resolution=_resolution(task, len(requests)),
        warmup_seconds=(count_us - start_us) / 1e6,
    )
    counted = [request for request in requests if request.time_us >= count_us]
    return {
        "estimates": [_figures(counts) for counts in answer(question)],
        "observed": asdict(_observed(task, requests, count_us)),
        "request_count": len(counted),
        "token_count": sum(request.num_prompt for request in counted),
        "start_us": count_us,
        "duration_us": task.end_us - count_us,
    }


def _resolution(task: EstimateTask, num_requests: int) -> int:
    """Tokens that move as one."""
    if num_requests * len(task.settings) <= EXACT_RUNS:
        return 1
    return math.gcd(task.granularity, COARSEST, *[each.page_size for each in task.settings])


def _trace(task: EstimateTask, requests: Sequence[LoggedRequest], start_us: int) -> Trace:
    return Trace(
        requests=trace_requests(requests, start_us, task.limits.max_context_tokens),
        granularity=task.granularity,
        page_size=task.page_size,
        num_pages=task.num_pages,
        policy=task.policy,
        limits=task.limits,
        seconds=(task.end_us - start_us) / 1e6,
    )


def _step_time(steps: Sequence[StepCount]) -> StepTime:
    found = fit(
        [step.seconds for step in steps],
        [step.prefill_tokens for step in steps],
        [step.decode_tokens for step in steps],
        [step.context_tokens for step in steps],
    )
    return found or ASSUMED_STEP


def _observed(task: EstimateTask, requests: Sequence[LoggedRequest], from_us: int) -> Observed:
    looks = [look for look in task.looks if from_us <= look.time_us <= task.end_us]
    evictions = looks[-1].evictions_total - _evictions_before(task, from_us) if looks else None
    wasted = sum(look.unfilled_slots for look in looks) / len(looks) if looks else None
    return observe(requests, from_us, task.end_us, evictions=evictions, mean_wasted_slots=wasted)


def _evictions_before(task: EstimateTask, from_us: int) -> int:
    """As of the last look until then, so that both ends are late by as much; a worker begins with none."""
    return max([look.evictions_total for look in task.looks if look.time_us <= from_us], default=0)


def _figures(counts: Counts) -> dict[str, object]:
    return {
        **asdict(counts.setting),
        "hit_tokens": counts.hit_tokens,
        "miss_cold_tokens": counts.miss_cold_tokens,
        "miss_evicted_tokens": counts.miss_evicted_tokens,
        "unaligned_tokens": counts.unaligned_tokens,
        "hit_ratio": counts.hit_ratio,
        "hit_ratio_error": counts.hit_ratio_error,
        "evictions": counts.evictions,
        "mean_wasted_slots": counts.mean_wasted_slots,
        "preemptions": counts.preemptions,
        "mean_queue_seconds": counts.mean_queue_seconds,
    }


def main() -> None:
    """Child process: one task from stdin, its figures to stdout. Its parent keeps stdin open to its end."""
    os.nice(NICENESS)
    calm_collector()
    try:
        task, requests = read_task(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # cut off
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(estimate(task, requests)), flush=True)  # noqa: T201


def _end_with_parent() -> None:
    """A worker that is killed cannot kill its child, which would compute on for nobody."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
