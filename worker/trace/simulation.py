"""The worker's own scheduler and page cache under recorded traffic, on a clock that is only counted.

The cache's pool and index are those that keep nothing for observers and know prefixes by marks
(pages/unwatched_pool.py, pages/marked_prefixes.py); they answer as the worker's do.

Owns the virtual time and what is counted. Decides nothing that the real worker decides: it hands over
requests when they came, gives each step the time that the model says, and each sequence the tokens that it
had; a sequence ends after as many tokens as it did then.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat

from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import NO_TOKEN, OutputColumns
from worker.scheduling.request import AbortReason, AddStatus, RequestSpec
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult
from worker.trace.counts import Counts, Setting
from worker.trace.prepared import Prepared, PreparedRequest, prepare
from worker.trace.step_time import StepTime
from worker.trace.warm_start import fill_cache
from worker.trace.workload import Limits, Trace, TraceRequest

LOOK_STEPS = 64
"""Between two looks at waste and progress, or as many as sequences run: a look costs as much as there are."""
_ENDED = repeat(0)  # tokens of a sequence that ended behind the launch: nobody looks at them


class Cancelled(Exception):
    """Whoever asked for the simulation does not wait for it any more."""


class Simulation:
    """One setting. Run once. ``progress`` is told the virtual time now and then; False: give up.

    ``resolution``: tokens of one unit, a divisor of the trace's granularity and of the page size. Inside,
    all lengths are units; a step with sequences that decode stands for as many real ones. ``prepared``: of
    the same trace and resolution, where several settings are run.
    """

    def __init__(
        self,
        trace: Trace,
        setting: Setting,
        step_time: StepTime,
        *,
        resolution: int = 1,
        prepared: Prepared | None = None,
        count_from: float = 0.0,
        progress: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        if setting.page_size % resolution:
            text = f"does not divide pages of {setting.page_size}"
            raise ValueError(f"a resolution of {resolution} tokens {text}")
        self.counts = Counts(setting, resolution)
        self.scheduler = Scheduler(scheduler_config(trace.limits, setting, resolution))
        self._trace = trace
        self._step_time = step_time
        self._resolution = resolution
        self._count_from = count_from
        self._progress = progress
        self._now = 0.0
        self._device_free = 0.0
        self._in_flight: deque[tuple[Step, float]] = deque()
        prepared = prepared or prepare(trace, resolution)
        self._cached = prepared.cached
        self._waiting = deque(prepared.requests)
        self._tokens: dict[int, Iterator[int]] = {}  # what each live sequence will put out
        self._excess: dict[int, int] = {}  # tokens that the last unit of a prompt does not have, by sample 0
        self._whole: set[int] = set()  # live ones whose end is known
        self._uncounted: set[int] = set()  # live ones that were admitted before the trace begins
        self._cuts: list[tuple[float, int]] = []  # heap: when sequences without output were ended
        self._num_turns = 0
        self._looked = 0.0
        self._looked_turn = 0

    def run(self) -> Counts:
        """Until all requests have ended whose end is known. Raises Cancelled."""
        if self.scheduler.config.cache.sharing:
            fill_cache(self.scheduler.cache, self._cached)
        self.counts.start(self.scheduler)
        while self._waiting or self.scheduler.num_live:
            self._arrive()
            if not self._turn() and not self._skip():
                break
            if not self._waiting and not self._whole and self._now >= self._trace.seconds:
                break
        self._look()
        self._stand_until(self._trace.seconds)  # means are over all of it
        if self._now < self._count_from:  # all of it was warm-up
            self.counts.start(self.scheduler)
        self.counts.finish(self.scheduler, self._now, self._count_from)
        return self.counts

    # Requests.

    def _arrive(self) -> None:
        """Hands over what came up to now, and ends what was ended from outside."""
        waiting, now = self._waiting, self._now
        while waiting and waiting[0].request.arrival <= now:
            self._add(waiting.popleft())
        if self._cuts and self._cuts[0][0] <= now:
            due = []
            while self._cuts and self._cuts[0][0] <= now:
                due.append(heapq.heappop(self._cuts)[1])
            self.scheduler.abort(due, AbortReason.CLIENT, now)

    def _add(self, coming: PreparedRequest) -> None:
        request, spec, first = coming.request, coming.spec, coming.spec.sequence_id
        if not (self._may_fit(request) and self._is_accepted(spec)):
            self.counts.num_refused += self._now >= self._count_from
            return
        if not request.is_counted:
            self._uncounted.add(first)
        self._excess[first] = len(spec.prompt_token_ids) * self._resolution - request.num_prompt
        for sequence_id, own, output in zip(count(first), coming.outputs, request.outputs, strict=False):
            if not output.is_cut:
                self._whole.add(sequence_id)
            if not own:
                heapq.heappush(self._cuts, (self._now if output.end is None else output.end, sequence_id))
            # A step that was launched before the end was seen asks for one more.
            self._tokens[sequence_id] = chain(own, count(coming.filler))

    def _is_accepted(self, spec: RequestSpec) -> bool:
        return self.scheduler.add(spec, self._now).status == AddStatus.ACCEPTED

    def _may_fit(self, request: TraceRequest) -> bool:
        """Whether this pool takes a request of that limit, as the worker judges it when it comes.

        A limit that was all the room there was stands for none: it would have been less in a smaller pool.
        """
        trace, setting = self._trace, self.counts.setting
        longest = trace.limits.max_context_tokens
        limit = min(request.num_prompt + request.max_tokens, longest)
        if limit >= min(longest, trace.num_pages * trace.page_size):
            limit = request.num_prompt + 1
        return -(-limit // setting.page_size) <= setting.num_pages

    # Steps.

    def _turn(self) -> bool:
        """One turn of the engine's loop; whether anything was launched or committed."""
        scheduler = self.scheduler
        step = scheduler.schedule(self._now)
        if step is not None:
            self._device_free = max(self._now, self._device_free) + self._step_time.seconds(
                step, self._resolution
            )
            self._in_flight.append((step, self._device_free))
        keep = 1 if self._trace.limits.overlap and step is not None else 0
        is_busy = len(self._in_flight) > keep or step is not None
        while len(self._in_flight) > keep:
            self._commit_oldest()
        for columns in scheduler.take_outputs().values():
            self._collect(columns)
        self._num_turns += 1
        num_running = len(step.sequence_ids) if step is not None else 1
        if self._num_turns - self._looked_turn >= min(LOOK_STEPS, num_running):
            self._look()
        return is_busy

    def _commit_oldest(self) -> None:
        step, ready = self._in_flight.popleft()
        self._go_on_to(ready)
        ids = step.sequence_ids
        if len(step.sampled) < len(ids):
            ids = [ids[at] for at in step.sampled]
        token_ids = self._tokens.get
        tokens = [next(token_ids(sequence_id, _ENDED)) for sequence_id in ids]
        self.scheduler.commit(step, StepResult(tokens), self._now)

    def _collect(self, columns: OutputColumns) -> None:
        is_counted = self._now >= self._count_from
        if is_counted:
            token_ids = columns.token_ids
            self.counts.output_tokens += len(token_ids) - token_ids.count(NO_TOKEN)
            for start in columns.starts:
                if start.sequence_id not in self._uncounted:
                    self.counts.admit(start, self._excess.get(start.sequence_id, 0))
        for end in columns.ends:
            del self._tokens[end.sequence_id]
            self._excess.pop(end.sequence_id, None)
            self._uncounted.discard(end.sequence_id)
            self._whole.discard(end.sequence_id)

    def _skip(self) -> bool:
        """Nothing can run: on to when something happens; False: nothing will."""
        times = [self._waiting[0].request.arrival] if self._waiting else []
        times += [self._cuts[0][0]] if self._cuts else []
        if not times:
            return False
        self._stand_until(min(times))
        return True

    def _stand_until(self, time: float) -> None:
        """Nothing runs until then: what was not looked at before is not what it is meanwhile."""
        began = self._now
        self._go_on_to(time)
        self._count_waste(began, self._now)
        self._looked += self._now - began

    def _go_on_to(self, time: float) -> None:
        """Later, or still now; totals count from where the warm-up ends."""
        if self._now < self._count_from <= time:
            self.counts.start(self.scheduler)
        self._now = max(self._now, time)

    def _look(self) -> None:
        """Waste since the last look, and the word to whoever waits."""
        self._count_waste(self._looked, self._now)
        self._looked, self._looked_turn = self._now, self._num_turns
        if not self._progress(self._now):
            raise Cancelled

    def _count_waste(self, since: float, until: float) -> None:
        since = max(since, self._count_from)
        if until > since:
            self.counts.look(self.scheduler, until - since)


def scheduler_config(limits: Limits, setting: Setting, resolution: int = 1) -> SchedulerConfig:
    """The recorded limits around another pool, lengths in units. In one unit of time the budget is whole."""
    cache = CacheConfig(
        setting.num_pages,
        setting.page_size // resolution,
        eviction_policy=setting.policy,
        sharing=limits.prefix_cache,
        event_capacity=0,
    )
    return SchedulerConfig(
        cache,
        max_running=limits.max_running,
        max_step_tokens=limits.max_step_tokens,
        # The longest prompt that leaves room for a token does so in units, too.
        max_context_tokens=1 + max(1, -(-(limits.max_context_tokens - 1) // resolution)),
        max_queued_requests=limits.max_queued_requests,
        max_chunk_tokens=limits.max_chunk_tokens,
        doubling_context=limits.doubling_context // resolution,
        watermark_pages=int(limits.watermark_share * setting.num_pages),
    )
