"""What a simulation counts. Plain numbers; owns no clock."""

from dataclasses import dataclass, field

from worker.scheduling.output import SequenceStart
from worker.scheduling.scheduler import Scheduler

NUM_STRETCHES = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """What is tried."""

    num_pages: int  # without the dummy page
    page_size: int
    policy: str

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return self.num_pages * self.page_size


@dataclass(slots=True)
class Counts:
    """What came of a setting, from the moment on at which its warm-up was over."""

    setting: Setting
    resolution: int = 1  # tokens of one unit of the scheduler's counts
    num_requests: int = 0  # admitted
    num_refused: int = 0  # could never fit this pool, or found the queue full
    hit_tokens: int = 0
    miss_cold_tokens: int = 0
    miss_evicted_tokens: int = 0
    unaligned_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # given up by preemption and not found when the sequence came back
    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0  # of virtual time, to the end of the trace or of its last request
    queue_seconds: list[float] = field(default_factory=list)  # of each request admitted
    lookups: list[tuple[int, int]] = field(default_factory=list)  # hit and all tokens of each, in order
    wasted_slot_seconds: float = 0.0
    active_page_seconds: float = 0.0
    _before: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens of all look-ups."""
        return self.hit_tokens + self.miss_cold_tokens + self.miss_evicted_tokens + self.unaligned_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of looked-up tokens that were found, 0..1."""
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0

    @property
    def hit_ratio_error(self) -> float:
        """Standard error of hit_ratio: how much it differs between stretches of the trace (jackknife)."""
        size = -(-len(self.lookups) // NUM_STRETCHES)
        if size < 2:
            return 0.0
        stretches = [self.lookups[at : at + size] for at in range(0, len(self.lookups), size)]
        hits, tokens = self.hit_tokens, self.looked_up_tokens
        without = [
            (hits - sum([hit for hit, _ in part])) / max(1, tokens - sum([count for _, count in part]))
            for part in stretches
        ]
        mean = sum(without) / len(without)
        spread = sum([(ratio - mean) ** 2 for ratio in without])
        return float(((len(without) - 1) / len(without) * spread) ** 0.5)

    @property
    def mean_queue_seconds(self) -> float:
        """Mean wait of those admitted."""
        return sum(self.queue_seconds) / len(self.queue_seconds) if self.queue_seconds else 0.0

    @property
    def mean_wasted_slots(self) -> float:
        """Mean of the slots of active pages that hold no token."""
        return self.wasted_slot_seconds / self.seconds if self.seconds else 0.0

    @property
    def fragmentation(self) -> float:
        """Share of the slots of active pages that hold no token, over time."""
        slots = self.active_page_seconds * self.setting.page_size
        return self.wasted_slot_seconds / slots if slots else 0.0

    def admit(self, start: SequenceStart, excess: int = 0) -> None:
        """A request left the queue; ``excess``: tokens that its last unit does not have."""
        if start.resumed:
            return
        self.num_requests += 1
        self.queue_seconds.append(start.queue_seconds)
        if start.prefix is not None:
            hit, cold, evicted, unaligned = (tokens * self.resolution for tokens in start.prefix)
            unaligned -= excess
            self.hit_tokens += hit
            self.miss_cold_tokens += cold
            self.miss_evicted_tokens += evicted
            self.unaligned_tokens += unaligned
            self.lookups.append((hit, hit + cold + evicted + unaligned))

    def look(self, scheduler: Scheduler, seconds: float) -> None:
        """The pool as it was for so many seconds."""
        self.wasted_slot_seconds += scheduler.unfilled_slots() * self.resolution * seconds
        self.active_page_seconds += scheduler.cache.pool.num_active * seconds

    def start(self, scheduler: Scheduler) -> None:
        """The warm-up is over: totals count from here."""
        self._before = _totals(scheduler)

    def finish(self, scheduler: Scheduler, now: float, count_from: float) -> None:
        """The end."""
        now_totals = _totals(scheduler)
        difference = [after - before for after, before in zip(now_totals, self._before, strict=True)]
        self.evictions, self.preemptions, recomputed, computed, self.num_steps = difference
        self.recomputed_tokens = recomputed * self.resolution
        self.prompt_tokens_computed = computed * self.resolution
        self.output_tokens *= self.resolution
        self.seconds = max(0.0, now - count_from)


def _totals(scheduler: Scheduler) -> tuple[int, int, int, int, int]:
    counts = scheduler.counts()
    return (
        counts.capacity_evictions_total,
        counts.preemptions_total,
        counts.recomputed_tokens_total,
        counts.prompt_tokens_computed_total,
        scheduler.step_number,
    )
