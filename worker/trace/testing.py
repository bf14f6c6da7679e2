"""A worker's control plane with a recorder, without threads, sockets and devices. For tests and benchmarks.

Time is counted, not waited for: a step takes what the given function says. Tokens come from a seed.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
        overlap: bool = False,
    ) -> None:
        self.scheduler = Scheduler(config)
        self._overlap = overlap
        self._in_flight: deque[tuple[Step, float]] = deque()  # steps, and when they were launched
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
            PrefixKeys(cache.fingerprint_key, cache.page_size),
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
        """One step, and the commit of it, with overlap of the one before; None: nothing could run.

        ``next_token``: of a sequence, by id.
        """
        step = self.scheduler.schedule(self.now)
        if step is not None:
            self._in_flight.append((step, self.now))
            self.now += self._step_seconds(step)
        elif not self._in_flight:
            self._last_end = None
            return None
        choose = next_token or (lambda sequence_id: self.random.randrange(64))
        while len(self._in_flight) > (self._overlap and step is not None):
            self._commit_oldest(choose)
        return step

    def _commit_oldest(self, choose: Callable[[int], int]) -> None:
        step, began = self._in_flight.popleft()
        tokens = [choose(step.sequence_ids[at]) for at in step.sampled]
        self.scheduler.commit(step, StepResult(tokens), self.now)
        self.scheduler.take_outputs()
        self._tell(step, began)

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
    keys = PrefixKeys(cache.fingerprint_key, cache.page_size)
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


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: when it comes, its prompt, and what is answered."""

    time: float
    prompt: Sequence[int]
    answer: Sequence[int]


def conversations(
    seed: int,
    *,
    seconds: float,
    rate: float,
    system_prompts: int = 12,
    system_tokens: tuple[int, int] = (40, 120),
    question_tokens: tuple[int, int] = (5, 40),
    answer_tokens: tuple[int, int] = (1, 60),
    live: int = 60,
    most_tokens: int = 500,
    vocabulary: int = 1000,
) -> list[Turn]:
    """Poisson arrivals; half of them go on with a conversation, others begin one under a system prompt.

    System prompts are of unequal favour (Pareto), so some prefixes are hot and most are not.
    """
    draw = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(*bounds))]

    systems = [tokens(system_tokens) for _ in range(system_prompts)]
    open_ones: list[list[int]] = []
    turns: list[Turn] = []
    now = 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        if open_ones and draw.random() < 0.5:
            text = draw.choice(open_ones)
        else:
            text = list(systems[min(int(draw.paretovariate(1.0)) - 1, len(systems) - 1)])
            open_ones.append(text)
            if len(open_ones) > live:
                open_ones.pop(0)
        text += tokens(question_tokens)
        answer = tokens(answer_tokens)
        if len(text) + len(answer) > most_tokens:
            open_ones = [each for each in open_ones if each is not text]
            continue
        turns.append(Turn(now, tuple(text), tuple(answer)))
        text += answer
    return turns


def run_turns(worker: RecordedWorker, turns: Sequence[Turn], *, every: int = 20) -> None:
    """Feeds requests when their time comes, until all have ended; the recorder has a turn now and then."""
    answers: dict[int, Iterator[int]] = {}
    waiting = deque(turns)
    count = 0
    while waiting or worker.scheduler.num_live:
        while waiting and waiting[0].time <= worker.now:
            turn = waiting.popleft()
            first = worker.add(list(turn.prompt), len(turn.answer))
            answers[first] = iter(turn.answer)
        if worker.step(lambda sequence_id: next(answers[sequence_id])) is None:
            assert waiting, "live sequences, and nothing can run"
            worker.now = max(worker.now, waiting[0].time)
        count += 1
        if count % every == 0:
            worker.recorder.turn()
    worker.recorder.turn()


def hit_ratio(worker: RecordedWorker) -> float:
    """Share of looked-up prompt tokens that were found."""
    counts = worker.scheduler.counts()
    looked_up = counts.hit_tokens_total + counts.miss_cold_tokens_total
    looked_up += counts.miss_evicted_tokens_total + counts.unaligned_tokens_total
    return counts.hit_tokens_total / looked_up
