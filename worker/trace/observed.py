"""What the worker itself counted in a stretch of time: by it an estimate of the same setting is judged."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.readers.samples import LoggedRequest


@dataclass(frozen=True, slots=True)
class Observed:
    """Figures as they were. Tokens of requests that were admitted in the stretch and have ended."""

    num_requests: int
    hit_tokens: int
    miss_cold_tokens: int
    miss_evicted_tokens: int
    unaligned_tokens: int
    preemptions: int
    evictions: int | None  # None: not known
    mean_wasted_slots: float | None
    mean_queue_seconds: float

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens of all look-ups."""
        return self.hit_tokens + self.miss_cold_tokens + self.miss_evicted_tokens + self.unaligned_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of them that was found, 0..1."""
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0


def observe(
    requests: Sequence[LoggedRequest],
    from_us: int,
    to_us: int,
    *,
    evictions: int | None = None,
    mean_wasted_slots: float | None = None,
) -> Observed:
    """Adds up what the ends of requests tell."""
    totals = [0, 0, 0, 0]
    num_requests = preemptions = queue_us = 0
    for request in requests:
        preemptions += sum([end.preemptions for end in request.ends if from_us <= end.time_us <= to_us])
        first = next((end for end in request.ends if end.prefix is not None), None)
        if first is None or first.prefix is None:
            continue
        if from_us <= request.time_us + first.queue_us <= to_us:
            num_requests += 1
            queue_us += first.queue_us
            totals = [total + count for total, count in zip(totals, first.prefix, strict=True)]
    hit, cold, evicted, unaligned = totals
    return Observed(
        num_requests,
        hit,
        cold,
        evicted,
        unaligned,
        preemptions=preemptions,
        evictions=evictions,
        mean_wasted_slots=mean_wasted_slots,
        mean_queue_seconds=queue_us / 1e6 / num_requests if num_requests else 0.0,
    )
