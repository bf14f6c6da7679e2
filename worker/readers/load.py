"""Rates over the last seconds, for load reports. Folds counters, on the observer's thread."""

from collections import deque
from dataclasses import dataclass

from worker.stats import EngineCounts, LoadView, PoolTotals, StepStats

RATE_SECONDS = 10.0
HIT_SECONDS = 60.0
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    counts: EngineCounts
    steps: int
    step_seconds: float


class LoadMeter:
    """Keeps a minute of counter samples."""

    def __init__(self, now: float) -> None:
        self._samples = deque([_Sample(now, EngineCounts(), 0, 0.0)])
        self._steps = 0
        self._step_seconds = 0.0

    def step(self, step: StepStats) -> None:
        """One step that ended."""
        self._steps += 1
        self._step_seconds += step.seconds

    def view(self, now: float, counts: EngineCounts, pool: PoolTotals) -> LoadView:
        """The load now."""
        recent = next(
            (sample for sample in self._samples if now - sample.time <= RATE_SECONDS), self._samples[-1]
        )  # before this one is among them: after a long turn it would be the only one within reach
        if now - self._samples[-1].time >= SAMPLE_SECONDS:
            self._samples.append(_Sample(now, counts, self._steps, self._step_seconds))
        while len(self._samples) > 1 and now - self._samples[1].time >= HIT_SECONDS:
            self._samples.popleft()
        seconds = max(now - recent.time, SAMPLE_SECONDS)
        steps = self._steps - recent.steps
        return LoadView(
            counts=counts,
            pool=pool,
            output_tokens_per_second=(counts.output_tokens_total - recent.counts.output_tokens_total)
            / seconds,
            prompt_tokens_per_second=(
                (counts.prompt_tokens_computed_total - recent.counts.prompt_tokens_computed_total) / seconds
            ),
            prefix_hit_rate=_hit_rate(self._samples[0].counts, counts),
            mean_step_seconds=(self._step_seconds - recent.step_seconds) / steps if steps else 0.0,
        )


def _hit_rate(before: EngineCounts, after: EngineCounts) -> float:
    hits = after.hit_tokens_total - before.hit_tokens_total
    misses = (
        after.miss_cold_tokens_total
        + after.miss_evicted_tokens_total
        + after.unaligned_tokens_total
        - before.miss_cold_tokens_total
        - before.miss_evicted_tokens_total
        - before.unaligned_tokens_total
    )
    return hits / (hits + misses) if hits + misses else 0.0
