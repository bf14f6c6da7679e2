"""Requests as what-if runs them again: when they came, how long they were, what they had in common.

A recording has no token ids, only keys of prefixes; marks.py makes ids from them.

Lengths may be counted in units of several tokens (``resolution``). Pages that a prompt needs, may find and
fills are the same then, as long as a page is a whole number of units; a sequence takes a unit in one step.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Output:
    """What one sample of a request put out."""

    num_tokens: int  # at its end; 0: it ended before its first token
    keys: "array[int]"  # 'Q': of the prefixes of prompt and output, after those that the prompt has
    end: float | None = None  # when it ended, in seconds; used where it put out nothing
    is_cut: bool = False  # the trace ended first: num_tokens is its limit


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Keys stand at each multiple of the trace's granularity."""

    arrival: float  # seconds since the start of the trace; before it: 0
    num_prompt: int
    max_tokens: int
    keys: "array[int]"  # 'Q': of the prompt's prefixes
    outputs: Sequence[Output]  # one per sample
    priority: int = 0
    cache_read: bool = True
    cache_write: bool = True
    is_counted: bool = True  # False: it was admitted before the trace begins


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A page that was findable before the first request came."""

    key: int
    parent: int | None  # key of the page before it in the prefix index
    used_ms: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler kept to; see worker.scheduling.settings."""

    max_running: int
    max_step_tokens: int
    max_context_tokens: int
    max_queued_requests: int = 1 << 20
    max_chunk_tokens: int = 0
    watermark_share: float = 0.01  # of the pool
    overlap: bool = False
    prefix_cache: bool = True
    doubling_context: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything that what-if needs."""

    requests: Sequence[TraceRequest]  # by arrival
    granularity: int  # tokens per key
    page_size: int  # as recorded
    num_pages: int  # as recorded, without the dummy page
    policy: str
    limits: Limits
    seconds: float
    cached: Sequence[CachedPage] = field(default=())
    name: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_prompt for request in self.requests)


def prompt_units(request: TraceRequest, resolution: int) -> int:
    """Units that hold the prompt; the last may be partly filled."""
    return -(-request.num_prompt // resolution)


def output_units(request: TraceRequest, sample: int, resolution: int) -> int:
    """Units that a sample puts out, so that it fills as many whole ones as it did; 0: it put out nothing."""
    num_tokens = request.outputs[sample].num_tokens
    if not num_tokens:
        return 0
    whole = (request.num_prompt + num_tokens - 1) // resolution
    return max(1, whole - prompt_units(request, resolution) + 1)
