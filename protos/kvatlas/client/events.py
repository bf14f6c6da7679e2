"""What a generation sends back, as frozen values: events of a stream, and the whole answer.

Owns the way from protobuf to these types; knows nothing of channels. Durations are seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another token at the same position."""

    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token; `logprob` is None for the first prompt token."""

    token_id: int
    logprob: float | None
    rank: int
    token_bytes: bytes
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """How the prompt fared in the prefix cache; the four counts add up to the prompt's tokens."""

    hit_tokens: int
    miss_cold_tokens: int
    miss_evicted_tokens: int
    unaligned_tokens: int


@dataclass(frozen=True, slots=True)
class KvBill:
    """What the request cost in KV memory, over all its sequences."""

    page_seconds: float = 0.0
    shared_page_seconds_saved: float = 0.0
    peak_pages: int = 0
    reused_pages: int = 0
    copied_pages: int = 0
    tail_waste_slots: int = 0
    evictions_caused: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    saved_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and the KV bill. `prefix` is None when the cache was not looked up."""

    prompt_tokens: int
    completion_tokens: int
    prefix: Prefix | None
    kv: KvBill
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in seconds."""

    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class Queued:
    """Still waiting; only with `queue_updates`."""

    position: int
    estimated_wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Started:
    """Admitted: the request has its pages."""

    request_id: str
    model: str
    prompt_tokens: int
    prefix: Prefix | None
    seed: int
    queue_seconds: float
    worker_id: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice. `text` may be empty while a character is incomplete."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    token_offset: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice ended. `stop_match` is the stop string or token id that matched."""

    index: int
    reason: str  # eos, stop_string, stop_token, max_tokens, context_length, time_limit, cancelled
    stop_match: str | int | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals; always the last event of a whole stream."""

    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[Logprob, ...] = ()


Event = Queued | Started | Delta | Finished | Summary


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished sample."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: str
    stop_match: str | int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole answer of `generate`."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    seed: int
    worker_id: str
    prompt_logprobs: tuple[Logprob, ...] = field(default=())

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Tokens:
    """Answer of `tokenize`. `start_offsets` are UTF-8 bytes of `rendered_text`."""

    token_ids: tuple[int, ...]
    start_offsets: tuple[int, ...]
    rendered_text: str
    page_count: int
    cached_tokens: int


def read_event(message: pb.StreamGenerateResponse) -> Event | None:
    """The event of a message; None for a kind that this version does not know."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return _read_delta(message.delta)
    if kind == "started":
        return _read_started(message.started)
    if kind == "choice_finished":
        end = message.choice_finished
        return Finished(end.index, _reason(end.finish_reason), _stop_match(end), end.completion_tokens)
    if kind == "summary":
        total = message.summary
        return Summary(_usage(total.usage), _timing(total.timing), _logprobs(total.prompt_logprobs))
    if kind == "queued":
        queued = message.queued
        known = queued.HasField("estimated_wait")
        return Queued(queued.position, _seconds(queued.estimated_wait) if known else None)
    return None


def read_generation(message: pb.GenerateResponse) -> Generation:
    """The answer of the unary call."""
    return Generation(
        request_id=message.request_id,
        model=message.model,
        choices=tuple(
            Choice(
                index=choice.index,
                text=choice.text,
                token_ids=tuple(choice.token_ids),
                logprobs=_logprobs(choice.logprobs),
                finish_reason=_reason(choice.finish_reason),
                stop_match=_stop_match(choice),
            )
            for choice in message.choices
        ),
        usage=_usage(message.usage),
        timing=_timing(message.timing),
        seed=message.seed,
        worker_id=message.worker_id,
        prompt_logprobs=_logprobs(message.prompt_logprobs),
    )


def read_tokens(message: pb.TokenizeResponse) -> Tokens:
    """The answer of Tokenize."""
    return Tokens(
        token_ids=tuple(message.token_ids),
        start_offsets=tuple(message.start_offsets),
        rendered_text=message.rendered_text,
        page_count=message.page_count,
        cached_tokens=message.cached_tokens,
    )


def _read_delta(delta: pb.TokenDelta) -> Delta:
    return Delta(
        delta.index,
        delta.text,
        tuple(delta.token_ids),
        _logprobs(delta.logprobs),
        delta.token_offset,
        delta.token_count,
    )


def _read_started(started: pb.GenerationStarted) -> Started:
    return Started(
        request_id=started.request_id,
        model=started.model,
        prompt_tokens=started.prompt_tokens,
        prefix=_prefix(started.prefix) if started.HasField("prefix") else None,
        seed=started.seed,
        queue_seconds=_seconds(started.queue_time),
        worker_id=started.worker_id,
    )


def _prefix(prefix: pb.PrefixLookup) -> Prefix:
    return Prefix(
        prefix.hit_tokens, prefix.miss_cold_tokens, prefix.miss_evicted_tokens, prefix.unaligned_tokens
    )


def _usage(usage: pb.Usage) -> Usage:
    bill = usage.kv
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        prefix=_prefix(usage.prefix) if usage.HasField("prefix") else None,
        kv=KvBill(**{name: getattr(bill, name) for name in KvBill.__slots__}),
        resumes=usage.resumes,
    )


def _timing(timing: pb.Timing) -> Timing:
    return Timing(
        queue_seconds=_seconds(timing.queue_time),
        prefill_seconds=_seconds(timing.prefill_time),
        first_token_seconds=_seconds(timing.time_to_first_token),
        decode_seconds=_seconds(timing.decode_time),
    )


def _logprobs(entries: Iterable[pb.TokenLogprob]) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(
            token_id=entry.token_id,
            logprob=entry.logprob if entry.HasField("logprob") else None,
            rank=entry.rank,
            token_bytes=entry.token_bytes,
            alternatives=tuple(
                Alternative(other.token_id, other.logprob, other.token_bytes) for other in entry.alternatives
            ),
        )
        for entry in entries
    )


def _reason(reason: int) -> str:
    """`eos` for FINISH_REASON_EOS; a number this version does not know stays a number."""
    try:
        return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    except ValueError:
        return f"reason_{reason}"


def _stop_match(end: pb.Choice | pb.ChoiceFinished) -> str | int | None:
    kind = end.WhichOneof("stop_match")
    if kind == "stop_string":
        return end.stop_string
    return end.stop_token_id if kind == "stop_token_id" else None


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
