"""What the engine tells of requests and steps, for recordings and estimates: frozen records, one queue.

The engine's thread only makes a record and appends it. Token ids are lent, not copied: a prompt never
changes, and a sequence that ended changes no more. Knows neither scheduler nor readers.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from worker.channels import Handover
from worker.ids import SequenceId

TRAFFIC_LIMIT = 32_768
"""Records that wait for their reader; at a thousand steps a second half a minute."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that was accepted."""

    time_us: int  # since the start of the epoch
    number: int  # of the last page event before it
    sequence_id: SequenceId  # of sample 0
    request_id: str
    token_ids: Sequence[int]  # the prompt, and what it is to be resumed from
    sample_count: int
    max_tokens: int
    priority: int
    cache_read: bool
    cache_write: bool
    cache_salt: bytes


@dataclass(frozen=True, slots=True)
class Departure:
    """A sequence that ended."""

    time_us: int
    number: int
    first_id: SequenceId  # of sample 0 of its request
    sequence_id: SequenceId
    token_ids: Sequence[int]  # prompt and output
    finish_code: int  # FinishCode
    preemptions: int
    prefix: tuple[int, int, int, int] | None  # hit, cold, evicted, unaligned tokens of its request
    queue_us: int  # from arrival to admission of its request; 0: never admitted


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that was committed. Its sums are left to the reader: at 256 sequences they take 5 us."""

    number: int
    time_us: int  # of its end
    seconds: float  # since the end of the one before, or its launch where the engine had been idle
    num_decode: int  # sequences that took one token
    starts: "array[int]"  # 'i': first position of each sequence
    ends: "array[int]"  # 'i': one past the last

    def counted(self) -> "StepCount":
        """The same as sums."""
        context = sum(self.ends)
        computed = context - sum(self.starts)
        return StepCount(
            self.number, self.time_us, self.seconds, computed - self.num_decode, self.num_decode, context
        )


@dataclass(frozen=True, slots=True)
class StepCount:
    """A step in numbers."""

    number: int
    time_us: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int  # that attention read, for each of its sequences, together


Traffic = Arrival | Departure | TimedStep
TrafficQueue = Handover[Traffic]
