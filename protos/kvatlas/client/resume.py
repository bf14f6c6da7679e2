"""One generation over as many calls as it takes: what is sent again after a loss, and what was delivered.

Owns the rule of going on. A server resumes what its workers lose; when the server itself is lost in mid
stream, the same request goes to whoever answers at the address: same id, same prompt, and the seed that
`started` told. A single sample says what was delivered before the last message (`resume_after`), and goes on
behind it after one prefill: if that message held the end of the answer, it comes again. Several samples, and
a server that does not know of that, compute everything again; then what comes is compared with what was
delivered, token by token and character by character: equal parts are passed over, the first difference is an
Incomplete. So a reader sees every token once, whatever happened, and never two that contradict each other.
Knows no channel and no thread: shared by the sync and the async stream.
"""

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvatlas.client.errors import DeadlineExceeded, Incomplete, KvatlasError, Reason
from kvatlas.client.events import Delta, Event, Finished, Queued, Started, read_event
from kvatlas.client.stream import StreamOrder
from kvatlas.v1 import generation_pb2 as pb

DEFAULT_RESUME_SECONDS = 30.0
FIRST_WAIT_SECONDS = 0.1
LAST_WAIT_SECONDS = 2.0
MAX_CALLS_WITHOUT_PROGRESS = 3
"""Calls in a row that a server took and lost before a new token came: a request may be what kills it."""

_TRANSPORT_CODES = frozenset({"UNAVAILABLE", "INTERNAL", "CANCELLED", "UNKNOWN"})
_NOT_TAKEN = frozenset({Reason.QUEUE_FULL, Reason.NOT_READY, Reason.DRAINING})


def is_transport_loss(failure: KvatlasError) -> bool:
    """Whether no handler made this status: the connection, the process or something between them died."""
    return not failure.reason and failure.code in _TRANSPORT_CODES


@dataclass(slots=True)
class _Delivered:
    """What the reader has of one choice."""

    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    end: Finished | None = None
    # Where the last message began, in tokens and in characters: a call that goes on repeats that message.
    resume_at: int = 0
    resume_chars: int = 0
    # Of the present call: how far it has come, and the text that it must repeat.
    has_begun: bool = False
    to_repeat: str = ""
    chars_seen: int = 0

    def begin_again(self) -> None:
        """Another call begins."""
        self.texts = ["".join(self.texts)]
        self.has_begun, self.to_repeat, self.chars_seen = False, self.texts[0], 0


class Course:
    """The way of one generation. `clock` counts seconds; `chance` gives [0, 1) and spreads retries."""

    def __init__(
        self,
        request: pb.StreamGenerateRequest,
        *,
        timeout_seconds: float,
        resume_seconds: float = DEFAULT_RESUME_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.resumes = 0
        self._request = request
        self._resume_seconds = resume_seconds
        self._clock = clock
        self._chance = chance
        self._deadline = clock() + timeout_seconds
        # A soft limit on wall time would end a repeated run somewhere else.
        self._may_resume = resume_seconds > 0 and not request.spec.stop.HasField("max_duration")
        self._hides_ids = False
        if self._may_resume:
            self._ask_for_ids()
        self._order = StreamOrder()
        self._started: Started | None = None
        self._choices: dict[int, _Delivered] = {}
        self._lost_at: float | None = None
        self._attempt = 0  # since the loss
        self._is_queued = False  # the present call has told its place in the queue
        self._is_taken = False  # the present call was admitted
        self._without_progress = 0

    # For the stream

    def next_call(self) -> tuple[pb.StreamGenerateRequest, float]:
        """Request and deadline in seconds of the first call, or of the one that goes on."""
        return self._request, max(0.0, self._deadline - self._clock())

    def take(self, message: pb.StreamGenerateResponse) -> Event | None:
        """What of a message is news for the reader. Raises Incomplete."""
        event = read_event(message)
        if event is None:
            return None
        if isinstance(event, Delta):
            self._note_begin(event)
        self._order.check(event)
        if isinstance(event, Started):
            return self._start(event)
        if isinstance(event, Queued):
            self._is_queued = True
            return event if self._started is None else None
        if isinstance(event, Delta):
            return self._news(event)
        if isinstance(event, Finished):
            return self._finish(event)
        return event

    def end(self) -> None:
        """The call ended with status OK. Raises Incomplete without a summary."""
        self._order.end()

    @property
    def is_complete(self) -> bool:
        """Whether the summary has come: nothing that fails afterwards takes anything away."""
        return self._order.is_complete

    def wait_seconds(self, failure: KvatlasError) -> float:
        """The call failed: time until the next one. Raises `failure` where there is to be none."""
        now = self._clock()
        if not self._goes_on_after(failure):
            raise failure
        if self._lost_at is None:
            self._lost_at, self._attempt = now, 0
        backoff = min(FIRST_WAIT_SECONDS * 2.0 ** min(self._attempt, 10), LAST_WAIT_SECONDS)
        wait = max(failure.retry_seconds or 0.0, backoff * (0.5 + self._chance() / 2))
        if now + wait >= self._deadline:
            raise DeadlineExceeded("the deadline passed before a server took over", code="DEADLINE_EXCEEDED")
        if now + wait - self._lost_at > self._resume_seconds:
            raise failure
        self._attempt += 1
        self._begin_again()
        return wait

    # What a call says

    def _start(self, started: Started) -> Started | None:
        self._is_taken, self._lost_at = True, None
        if self._started is not None:
            self.resumes += 1
            return None
        self._started = started
        if self._may_resume:
            spec = self._request.spec
            spec.request_id, spec.sampling.seed = started.request_id, started.seed
            spec.scheduling.ClearField("queue_timeout")  # it has left the queue once
        return started

    def _note_begin(self, delta: Delta) -> None:
        """The first delta of a call says whether it goes on behind what was delivered, or begins again."""
        choice = self._choices.get(delta.index)
        if choice is None or choice.has_begun:
            return
        choice.has_begun = True
        if self._request.resume_after.ids and delta.token_offset == choice.resume_at:
            self._order.begin_behind(delta.index, choice.resume_at)
            choice.chars_seen = choice.resume_chars

    def _news(self, delta: Delta) -> Delta | None:
        choice = self._choices.setdefault(delta.index, _Delivered())
        if delta.token_count and delta.token_offset > choice.resume_at:
            choice.resume_at, choice.resume_chars = delta.token_offset, choice.chars_seen
        known = min(delta.token_count, max(0, choice.num_tokens - delta.token_offset))
        text = self._new_text(choice, delta)
        self._compare_ids(choice, delta, known)
        choice.num_tokens += delta.token_count - known
        if delta.token_count > known:
            self._without_progress = 0
        if self._may_resume:
            choice.token_ids.extend(delta.token_ids[known:])
            choice.texts.append(text)
        if not known and len(text) == len(delta.text):
            return self._shown(delta)
        if known == delta.token_count and not text:
            return None
        return self._shown(
            replace(
                delta,
                text=text,
                token_ids=delta.token_ids[known:],
                logprobs=delta.logprobs[known:],
                token_offset=delta.token_offset + known,
                token_count=delta.token_count - known,
            )
        )

    def _shown(self, delta: Delta) -> Delta:
        return replace(delta, token_ids=()) if self._hides_ids and delta.token_ids else delta

    def _new_text(self, choice: _Delivered, delta: Delta) -> str:
        """What of its text was not delivered yet."""
        begin, text = choice.chars_seen, delta.text
        choice.chars_seen += len(text)
        known = choice.to_repeat[begin : begin + len(text)]
        if not text.startswith(known):
            raise Incomplete(f"choice {delta.index}: a repeated run gave other text than was delivered")
        return text[len(known) :]

    def _compare_ids(self, choice: _Delivered, delta: Delta, known: int) -> None:
        begin = delta.token_offset
        if tuple(choice.token_ids[begin : begin + known]) != delta.token_ids[:known]:
            raise Incomplete(
                f"choice {delta.index}: a repeated run gave other tokens than were delivered, "
                f"from number {begin} on"
            )

    def _finish(self, end: Finished) -> Finished | None:
        choice = self._choices.setdefault(end.index, _Delivered())
        if self.resumes and choice.end is None and end.completion_tokens < choice.num_tokens:
            raise Incomplete(
                f"choice {end.index}: a repeated run ended after {end.completion_tokens} tokens, "
                f"{choice.num_tokens} were delivered"
            )
        before, choice.end = choice.end, end
        return end if before is None else None

    # Losses

    def _goes_on_after(self, failure: KvatlasError) -> bool:
        if not self._may_resume:
            return False
        if self._started is None:
            return self._attempt < MAX_CALLS_WITHOUT_PROGRESS and self._is_left_by_grpc(failure)
        if self._is_taken:
            self._is_taken = False
            self._without_progress += 1
            if self._without_progress > MAX_CALLS_WITHOUT_PROGRESS:
                return False
        is_our_own = failure.reason == Reason.DUPLICATE_REQUEST_ID  # the lost call is not noticed yet
        return is_our_own or failure.reason in _NOT_TAKEN or is_transport_loss(failure)

    def _is_left_by_grpc(self, failure: KvatlasError) -> bool:
        """Before the start gRPC retries; not where a connection broke in other ways, or after a message."""
        if is_transport_loss(failure) and failure.code != "UNAVAILABLE":
            return True
        return self._is_queued and (is_transport_loss(failure) or failure.reason in _NOT_TAKEN)

    def _begin_again(self) -> None:
        self._is_queued = False
        self._order = StreamOrder()
        for choice in self._choices.values():
            choice.begin_again()
        request, first = self._request, self._choices.get(0)
        request.ClearField("resume_after")
        is_single = not request.spec.sampling.HasField("n") or request.spec.sampling.n == 1
        if is_single and first is not None and first.end is None:
            # The last token may be the one that ended the answer, so it is computed again.
            request.resume_after.ids.extend(first.token_ids[: first.resume_at])

    def _ask_for_ids(self) -> None:
        """A run is compared by its ids, also where the reader wants text only."""
        output = self._request.spec.output
        if output.format in (pb.OUTPUT_FORMAT_UNSPECIFIED, pb.OUTPUT_FORMAT_TEXT):
            output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
            self._hides_ids = True
