"""Requests of nobody, scheduled on books of their own while the engine sleeps: the way of the next stays hot.

A processor forgets code that it has not run for a while. Behind a tenth of a second of sleep (host of an
H200) queueing and scheduling a prompt of 512 tokens took 0.46 ms, and 0.32 with rehearsals; launching it 0.91
and 0.61. Owns a small scheduler that nobody sees; what it launches, if anything, is the dummy row's. The
engine asks it only where it has nothing to do. Takes under 1 ms of this process every 4 ms, for 0.3 s after
the last step, and only where processors are plenty.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace

from kvatlas.rehearsal import EVERY_SECONDS, LASTING_SECONDS, PROMPT_TOKENS
from worker.ids import SequenceId
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import StepResult

FIRST_SECONDS = 0.0005  # after it: the next of requests one right after the other comes 2 ms later
EVENTS = 4096  # of pages, that nobody reads; a power of two


class Rehearsal:
    """One for an engine; runs on its thread. Times are those of the engine's clock."""

    def __init__(
        self, config: SchedulerConfig, launch: Callable[[int], None] = lambda num_tokens: None
    ) -> None:
        self._launch = launch
        pages = -(-PROMPT_TOKENS // config.page_size) + 2
        cache = replace(config.cache, num_pages=pages, event_capacity=EVENTS, max_remembered=pages)
        self._scheduler = Scheduler(
            replace(
                config,
                cache=cache,
                max_context_tokens=PROMPT_TOKENS + 1,
                watermark_pages=0,
                max_pinned_pages=0,
            )
        )
        self._spec = RequestSpec(
            SequenceId(1),
            array("I", bytes(4 * PROMPT_TOKENS)),
            SamplingParams(temperature=0.5, max_tokens=1),
            cache_write=False,  # so that nothing of it is found by the next
            request_id="rehearsal",
            source="rehearsal",
        )
        self._until = 0.0
        self._pause = EVERY_SECONDS

    def stepped(self, now: float) -> None:
        """There was a real step: the next request may come soon."""
        self._until = now + LASTING_SECONDS
        self._pause = FIRST_SECONDS

    def next_time(self, now: float) -> float | None:
        """When to play again, if nothing else comes; None: it is over."""
        return now + self._pause if now < self._until else None

    def play(self, now: float) -> None:
        """Takes a request, schedules its steps, ends it with its first token; launches such a prompt."""
        self._pause = EVERY_SECONDS
        scheduler = self._scheduler
        scheduler.add(self._spec, now)
        while (step := scheduler.schedule(now)) is not None:
            scheduler.commit(step, StepResult([1] * len(step.sampled), {}, {}, {}, 0.0, set()), now)
        assert not scheduler.num_live, "a rehearsal has an end"
        scheduler.take_outputs()
        scheduler.take_changes()
        self._launch(PROMPT_TOKENS)
