"""When things happened to one request, and the metrics that follow from it.

Owns its clock readings, all of the monotonic clock: uvloop's ticks in milliseconds. Latencies are observed
by who sends the message.
"""

from collections.abc import Callable, Mapping, Sequence

from service.metrics import ServiceMetrics
from service.request import SequenceStart, sampled_trace_id

STALLED_WRITE_SECONDS = 0.1
MAX_EVENTS = 64  # of one request; a thrashing pool can preempt it for ever

AccountEvent = tuple[str, float, Mapping[str, int | float | str]]
"""What happened, when by the monotonic clock, and its numbers."""


class RequestAccount:
    """Times of one request. `received` and every `now` are of the monotonic clock."""

    __slots__ = (
        *("_exemplar", "_last_sent", "_metrics"),
        *("admitted_at", "events", "first_token_at", "last_token_at", "on_admitted", "received"),
    )

    def __init__(self, metrics: ServiceMetrics, received: float, traceparent: str = "") -> None:
        self._metrics = metrics
        self.received = received
        trace_id = sampled_trace_id(traceparent)
        self._exemplar = {"trace_id": trace_id} if trace_id else None
        self.events: list[AccountEvent] = []  # rare ones, between admission and end
        self._last_sent: dict[int, float] = {}  # by sample
        self.on_admitted: Callable[[], None] | None = None
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    def admitted(self, now: float, prompt_tokens: int, start: SequenceStart | None) -> None:
        """The request has its pages."""
        self.admitted_at = now
        if self.on_admitted is not None:
            self.on_admitted()
        self._metrics.queue.observe(now - self.received)
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.request_prompt_tokens.observe(prompt_tokens)
        if start is not None and start.prefix is not None:
            self._metrics.request_cached_tokens.observe(start.prefix.hit_tokens)

    def tokens(self, index: int, count: int, now: float, *, are_sent: bool) -> None:
        """Tokens of a sample are about to go out, or were put by for an answer that is sent whole."""
        self._metrics.generated_tokens.inc(count)
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
            self._metrics.ttft.observe(now - self.received, self._exemplar)
            if self.admitted_at is not None:
                self._metrics.prefill.observe(now - self.admitted_at)
        last = self._last_sent.get(index)
        self._last_sent[index] = now
        if last is not None and are_sent:
            self._metrics.itl.observe(now - last)

    def happened(self, what: str, now: float, **numbers: int | float | str) -> None:
        """Something that a trace shows: a preemption, another worker."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((what, now, numbers))

    def written(self, seconds: float) -> None:
        """A write took so long."""
        if seconds > STALLED_WRITE_SECONDS:
            self._metrics.send_blocked.inc(seconds)

    def ended(self, outcome: str, now: float, tokens_by_sample: Sequence[int]) -> None:
        """The request is over."""
        self._metrics.requests[outcome].inc()
        self._metrics.duration[outcome].observe(now - self.received)
        if self.admitted_at is None:
            return
        self._metrics.request_generated_tokens.observe(sum(tokens_by_sample))
        longest = max(tokens_by_sample, default=0)
        if self.first_token_at is not None and self.last_token_at is not None and longest > 1:
            decode = self.last_token_at - self.first_token_at
            self._metrics.time_per_token.observe(decode / (longest - 1))

    def age(self, now: float) -> float:
        """Seconds since the call was received."""
        return now - self.received

    @property
    def queue_seconds(self) -> float:
        """Receive to admission."""
        return (self.admitted_at or self.received) - self.received
