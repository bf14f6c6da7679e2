"""A worker's control plane with a recorder, without threads, sockets and devices. For tests and benchmarks.

Time is counted, not waited for: a step takes what the given function says. Tokens come from a seed.
"""

import random
from array import array
from collections.abc import Callable
from pathlib import Path

from kvatlas.v1 import cache_pb2
from worker.ids import SequenceId
from worker.readers.ledger import Ledger
from worker.readers.prefix_keys import PrefixKeys
from worker.readers.recorder import Recorder
from worker.readers.recording_frames import FrameMaker
from worker.readers.recording_store import RecordingStore
from worker.scheduling.request import AbortReason, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult
from worker.trace.loading import limits_message
from worker.traffic import TRAFFIC_LIMIT, TimedStep, TrafficQueue

EPOCH_NS = 1_700_000_000_000_000_000
KEY = b"test"


class RecordedWorker:
    """A scheduler, its traffic and its recorder, turned by hand."""

    def __init__(
        self,
        config: SchedulerConfig,
        folder: Path,
        *,
        seed: int = 1,
        step_seconds: Callable[[Step], float] = lambda step: 0.01,
        traffic_limit: int = TRAFFIC_LIMIT,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.random = random.Random(seed)
        self.now = 0.0
        self.traffic: TrafficQueue = TrafficQueue(traffic_limit)
        self.scheduler.tell_traffic(self.traffic.put)
        self.asked: list[Callable[[Ledger], None]] = []  # for a ledger, after a loss
        cache = config.cache
        self.store = RecordingStore(folder, "worker-0")
        self.recorder = Recorder(
            self.scheduler.cache.events,
            self.traffic,
            PrefixKeys(KEY, cache.page_size),
            self.store,
            frame_maker(config),
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            start_time=0.0,
            ask_for_ledger=self.asked.append,
            clock=lambda: self.now,
        )
        self._step_seconds = step_seconds
        self._last_end: float | None = None
        self._next_id = 1

    def add(
        self, prompt: "array[int] | list[int]", max_tokens: int, *, samples: int = 1, salt: bytes = b""
    ) -> int:
        """A request; returns the id of sample 0."""
        first = self._next_id
        self._next_id += samples
        spec = RequestSpec(
            SequenceId(first),
            array("I", prompt),
            SamplingParams(max_tokens=max_tokens),
            sample_count=samples,
            request_id=f"r{first}",
            cache_salt=salt,
            source="s",
        )
        self.scheduler.add(spec, self.now)
        return first

    def abort(self, *sequence_ids: int) -> None:
        """Ends sequences."""
        self.scheduler.abort(sequence_ids, AbortReason.CLIENT, self.now)

    def step(self, next_token: Callable[[int], int] | None = None) -> Step | None:
        """One step, committed; None: nothing could run. ``next_token``: of a sequence, by id."""
        began = self.now
        step = self.scheduler.schedule(began)
        if step is None:
            self._last_end = None
            return None
        self.now += self._step_seconds(step)
        choose = next_token or (lambda sequence_id: self.random.randrange(64))
        tokens = [choose(step.sequence_ids[at]) for at in step.sampled]
        self.scheduler.commit(step, StepResult(tokens), self.now)
        self.scheduler.take_outputs()
        self._tell(step, began)
        return step

    def _tell(self, step: Step, began: float) -> None:
        seconds = self.now - (self._last_end or began)
        self._last_end = self.now
        time_us = int(self.now * 1e6)
        self.traffic.put(TimedStep(step.number, time_us, seconds, step.num_decode, step.starts, step.ends))


def frame_maker(config: SchedulerConfig) -> FrameMaker:
    """Frames of a worker of these limits."""
    cache = config.cache
    geometry = cache_pb2.PoolGeometry(
        worker_id="worker-0",
        epoch=EPOCH_NS,
        page_count=cache.num_pages + 1,
        page_size=cache.page_size,
        eviction_policy=cache.eviction_policy,
        row_count=config.max_running + 1,
    )
    keys = PrefixKeys(KEY, cache.page_size)
    return FrameMaker(
        geometry=geometry, limits=limits_message(config), granularity=keys.granularity, model="test"
    )


class RandomLoad:
    """Prompts with common beginnings, samples, cancels, flushes and pins, from a seed."""

    def __init__(self, worker: RecordedWorker, *, arrivals: float = 0.4) -> None:
        self.worker = worker
        self._arrivals = arrivals
        draw = worker.random
        self._longest = worker.scheduler.config.max_context_tokens - 12
        self._prefixes = [[draw.randrange(64) for _ in range(self._longest)] for _ in range(6)]

    def turn(self) -> None:
        """Some commands, one step."""
        worker, draw = self.worker, self.worker.random
        scheduler = worker.scheduler
        if draw.random() < self._arrivals and scheduler.num_live < 24:
            common = draw.choice(self._prefixes)[: draw.randint(1, self._longest - 6)]
            own = [draw.randrange(64) for _ in range(draw.randint(0, 5))]
            worker.add(common + own, draw.randint(1, 12), samples=draw.choice((1, 1, 1, 3)))
        if draw.random() < 0.04 and (live := scheduler.sequence_views()):
            worker.abort(draw.choice(live).sequence_id)
        if draw.random() < 0.005:
            scheduler.flush(worker.now, include_active=draw.random() < 0.5)
        if draw.random() < 0.01:
            prefix = draw.choice(self._prefixes)[: 2 * scheduler.config.page_size]
            name = draw.choice("ab")
            if not scheduler.unpin(name, worker.now):
                scheduler.pin(name, prefix, b"", None, worker.now)
        if worker.step() is None:
            worker.now += 0.01
