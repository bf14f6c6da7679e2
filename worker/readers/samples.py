"""The last requests as keys and lengths: what estimates rest on, and where a recording looks back.

Owns a bounded log. No text and no token ids stay: prompts become keys of their prefixes as soon as they are
read. Lives on the recorder's thread.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field, replace

from worker.ids import SequenceId
from worker.readers.prefix_keys import PrefixKeys
from worker.traffic import Arrival, Departure, StepCount

MAX_REQUESTS = 16_384
MAX_KEYS = 2_000_000  # 16 MB
MAX_STEPS = 8_192
MAX_LOOKS = 4_096
LOOK_US = 1_000_000


@dataclass(frozen=True, slots=True)
class LoggedEnd:
    """One sample of a request, ended."""

    time_us: int
    number: int
    sequence_id: SequenceId
    num_output: int
    finish_code: int
    preemptions: int
    prefix: tuple[int, int, int, int] | None  # hit, cold, evicted, unaligned tokens of the request
    queue_us: int
    keys: "array[int]"  # 'Q': of prompt and output, after those of the request


@dataclass(slots=True)
class LoggedRequest:
    """A request and what became of its samples so far."""

    time_us: int  # since the start of the epoch
    number: int  # of the last page event before it
    sequence_id: SequenceId  # of sample 0
    request_id: str
    sample_count: int
    num_prompt: int
    max_tokens: int
    priority: int
    cache_read: bool
    cache_write: bool
    keys: "array[int]"  # 'Q': of the prompt
    salt: bytes = b""  # for the keys of its output; goes no further
    ends: list[LoggedEnd] = field(default_factory=list)
    is_kept: bool = True  # in the log; a live one may be too old for it

    @property
    def is_over(self) -> bool:
        """Whether all samples have ended."""
        return len(self.ends) == self.sample_count

    @property
    def num_keys(self) -> int:
        """Keys that it holds."""
        return len(self.keys) + sum([len(end.keys) for end in self.ends])


@dataclass(frozen=True, slots=True)
class PoolLook:
    """The pool at one moment."""

    time_us: int
    evictions_total: int  # for room, not by a flush
    unfilled_slots: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A copy of the log, for another thread."""

    requests: tuple[LoggedRequest, ...]  # by arrival
    steps: tuple[StepCount, ...]
    looks: tuple[PoolLook, ...]
    is_whole: bool  # it reaches back to the start of the worker
    granularity: int
    time_us: int  # of its end


class RequestLog:
    """The newest requests, bounded in number and in keys; live ones beside them however old."""

    def __init__(
        self, keys: PrefixKeys, *, max_requests: int = MAX_REQUESTS, max_keys: int = MAX_KEYS
    ) -> None:
        self._keys = keys
        self._max_requests = max_requests
        self._max_keys = max_keys
        self._num_keys = 0
        self._live: dict[int, LoggedRequest] = {}  # by id of sample 0
        self.requests: deque[LoggedRequest] = deque()
        self.steps: deque[StepCount] = deque(maxlen=MAX_STEPS)
        self._looks: list[PoolLook] = []
        self._look_us = LOOK_US
        self.is_whole = True

    @property
    def granularity(self) -> int:
        """Tokens per key."""
        return self._keys.granularity

    @property
    def live(self) -> list[LoggedRequest]:
        """Requests that did not end, oldest first."""
        return list(self._live.values())

    def arrive(self, arrival: Arrival) -> LoggedRequest:
        """A request was accepted."""
        keys = self._keys.of(arrival.token_ids, arrival.cache_salt)
        request = LoggedRequest(
            time_us=arrival.time_us,
            number=arrival.number,
            sequence_id=arrival.sequence_id,
            request_id=arrival.request_id,
            sample_count=arrival.sample_count,
            num_prompt=len(arrival.token_ids),
            max_tokens=arrival.max_tokens,
            priority=arrival.priority,
            cache_read=arrival.cache_read,
            cache_write=arrival.cache_write,
            keys=keys,
            salt=arrival.cache_salt,
        )
        self._live[arrival.sequence_id] = request
        self.requests.append(request)
        self._num_keys += len(keys)
        self._shrink()
        return request

    def depart(self, departure: Departure) -> tuple[LoggedRequest, LoggedEnd] | None:
        """A sequence ended; None: its request is not known."""
        request = self._live.get(departure.first_id)
        if request is None:
            return None
        end = LoggedEnd(
            time_us=departure.time_us,
            number=departure.number,
            sequence_id=departure.sequence_id,
            num_output=len(departure.token_ids) - request.num_prompt,
            finish_code=departure.finish_code,
            preemptions=departure.preemptions,
            prefix=departure.prefix,
            queue_us=departure.queue_us,
            keys=self._keys.of(departure.token_ids, request.salt, request.keys),
        )
        request.ends.append(end)
        self._num_keys += len(end.keys) if request.is_kept else 0
        if request.is_over:
            del self._live[departure.first_id]
        self._shrink()
        return request, end

    def lose(self) -> None:
        """Some records were never seen: live requests may have ended."""
        self._live.clear()
        self.is_whole = False

    def look(self, time_us: int, evictions_total: int, unfilled_slots: int) -> None:
        """The pool as it is; kept once a second, and half as often each time that there are too many."""
        looks = self._looks
        if looks and time_us - looks[-1].time_us < self._look_us:
            return
        if len(looks) == MAX_LOOKS:  # all of the time stays covered, as it may be that of the requests
            self._looks = looks = looks[::2]
            self._look_us *= 2
        looks.append(PoolLook(time_us, evictions_total, unfilled_slots))

    def _shrink(self) -> None:
        while len(self.requests) > self._max_requests or self._num_keys > self._max_keys:
            if len(self.requests) < 2:
                return
            oldest = self.requests.popleft()
            self._num_keys -= oldest.num_keys
            oldest.is_kept = self.is_whole = False

    def sample(self, time_us: int) -> Sample:
        """A copy. Ends that come later are not in it."""
        requests = tuple([replace(request, ends=list(request.ends)) for request in self.requests])
        return Sample(
            requests, tuple(self.steps), tuple(self._looks), self.is_whole, self._keys.granularity, time_us
        )
