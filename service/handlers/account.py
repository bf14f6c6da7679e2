"""When things happened to one request, and the metrics that follow from it.

Owns its clock readings, all of the monotonic clock: uvloop's ticks in milliseconds. Latencies are observed
by who sends the message.
"""

import re
from collections.abc import Sequence

from service.metrics import ServiceMetrics
from service.request import SequenceStart

STALLED_WRITE_SECONDS = 0.1
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class RequestAccount:
    """Times of one request. `received` and every `now` are of the monotonic clock."""

    __slots__ = (
        *("_last_sent", "_metrics", "_received", "_trace_id"),
        *("admitted_at", "first_token_at", "last_token_at"),
    )

    def __init__(self, metrics: ServiceMetrics, received: float, traceparent: str = "") -> None:
        self._metrics = metrics
        self._received = received
        self._trace_id = _trace_id(traceparent)
        self._last_sent: dict[int, float] = {}  # by sample
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    def admitted(self, now: float, prompt_tokens: int, start: SequenceStart | None) -> None:
        """The request has its pages."""
        self.admitted_at = now
        self._metrics.queue.observe(now - self._received)
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
            exemplar = {"trace_id": self._trace_id} if self._trace_id else None
            self._metrics.ttft.observe(now - self._received, exemplar)
            if self.admitted_at is not None:
                self._metrics.prefill.observe(now - self.admitted_at)
        last = self._last_sent.get(index)
        self._last_sent[index] = now
        if last is not None and are_sent:
            self._metrics.itl.observe(now - last)

    def written(self, seconds: float) -> None:
        """A write took so long."""
        if seconds > STALLED_WRITE_SECONDS:
            self._metrics.send_blocked.inc(seconds)

    def ended(self, outcome: str, now: float, tokens_by_sample: Sequence[int]) -> None:
        """The request is over."""
        self._metrics.requests[outcome].inc()
        self._metrics.duration[outcome].observe(now - self._received)
        if self.admitted_at is None:
            return
        self._metrics.request_generated_tokens.observe(sum(tokens_by_sample))
        longest = max(tokens_by_sample, default=0)
        if self.first_token_at is not None and self.last_token_at is not None and longest > 1:
            decode = self.last_token_at - self.first_token_at
            self._metrics.time_per_token.observe(decode / (longest - 1))

    def age(self, now: float) -> float:
        """Seconds since the call was received."""
        return now - self._received

    @property
    def queue_seconds(self) -> float:
        """Receive to admission."""
        return (self.admitted_at or self._received) - self._received


def _trace_id(traceparent: str) -> str:
    """Trace id of a W3C trace context; empty for anything else, which a client may send."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else ""
