"""Worker messages to our types and back. The only file of the service that knows worker.proto's planes.

Owns nothing. `Command` and `CommandReply` pass as they are: handlers pass public requests on in them.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvatlas.v1.cache_pb2 import PoolGeometry, PoolStats, Revision
from kvatlas.v1.generation_pb2 import ChoiceConstraint
from kvatlas.v1.server_pb2 import Model, WorkerInfo, WorkerLoad
from kvatlas.worker.v1 import worker_pb2
from kvatlas.worker.v1.worker_pb2 import Command, CommandReply
from service.request import (
    AbortReason,
    AddOutcome,
    AddStatus,
    FinishCode,
    KvBill,
    PrefixCounts,
    Request,
    Run,
    Scores,
    SequenceEnd,
    SequenceStart,
)

__all__ = ["Command", "CommandReply"]

PROTOCOL = 1
MAX_PAGES = (1 << 26) + 1  # the most that a worker is configured with, and its dummy page
MOST_TOKENS = 1 << 31  # of an answer, as a worker takes it
STARTING, SERVING, DRAINING, LOST = 1, 2, 3, 4
"""ServerState, as numbers."""

assert sys.byteorder == "little", "planes are little endian and are read as they lie"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says about itself in Config, for one life of it."""

    worker_id: str
    epoch: int
    state: int  # ServerState
    model_id: str
    vocab_size: int
    tokenizer_sha256: str
    max_context_tokens: int
    max_running_sequences: int
    max_queued_requests: int
    max_pinned_pages: int
    page_count: int  # the dummy page included
    page_size: int
    features: frozenset[str]
    pages_address: str
    fingerprint_key: bytes
    info: WorkerInfo
    model: Model
    geometry: PoolGeometry


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker's heartbeat."""

    state: int  # ServerState
    running_sequences: int
    waiting_requests: int
    last_step_age_seconds: float
    estimated_wait_ms: int  # of a request that comes now; 0: unknown, unless nobody waits
    load: WorkerLoad
    pool: PoolStats
    revision: Revision
    pin_pages: int  # of pinned prefixes, those in use included


@dataclass(frozen=True, slots=True)
class StepColumns:
    """What one engine step did for this service. Entry i of the first three columns belongs together."""

    sequence_ids: Sequence[int]
    token_ids: Sequence[int]
    finish_codes: bytes
    scores: Scores | None
    starts: Sequence[SequenceStart]
    ends: Sequence[SequenceEnd]  # one per non-zero finish code, same order
    prompt_scores: Sequence[tuple[int, Scores]]


# To the worker


def encode_hello(instance_id: str, service_epoch: int, version: str) -> bytes:
    """First message of a connection."""
    hello = worker_pb2.Hello(
        protocol=PROTOCOL, instance_id=instance_id, service_epoch=service_epoch, version=version
    )
    return worker_pb2.ServiceMessage(hello=hello).SerializeToString()


def encode_heartbeat(live_sequences: int) -> bytes:
    """Sign of life."""
    beat = worker_pb2.ServiceHeartbeat(live_sequences=live_sequences)
    return worker_pb2.ServiceMessage(heartbeat=beat).SerializeToString()


def encode_goodbye() -> bytes:
    """Last message of a service."""
    return worker_pb2.ServiceMessage(goodbye=worker_pb2.Goodbye()).SerializeToString()


def encode_abort(sequence_ids: Sequence[int], reason: AbortReason) -> bytes:
    """Sequences to stop."""
    abort = worker_pb2.AbortSequences(
        sequence_ids=array("Q", sequence_ids).tobytes(), reason=cast(Any, reason.value)
    )
    return worker_pb2.ServiceMessage(abort=abort).SerializeToString()


def encode_command(command_id: int, timeout_ms: int, command: Command) -> bytes:
    """A command with its id and time filled in."""
    message = worker_pb2.ServiceMessage(command=command)
    message.command.command_id = command_id
    message.command.timeout_ms = timeout_ms
    return message.SerializeToString()


def encode_cancel_command(command_id: int, cancelled_id: int) -> bytes:
    """Gives up an earlier command."""
    cancel = worker_pb2.CancelCommand(command_id=cancelled_id)
    return encode_command(command_id, 0, Command(cancel=cancel))


def encode_add(request: Request, run: Run) -> bytes:
    """A request to run.

    Written in place: built of messages that are copied into one another it took five times as long, in code
    that runs before every first token (104 and 20 us, EPYC, busy; 17 and 9 us, idle).
    """
    message = worker_pb2.ServiceMessage()
    add = message.add
    add.sequence_id = run.sequence_id
    add.sample_count = run.num_samples
    add.prompt_token_ids = _u32(request.prompt_ids)
    add.cache_read = request.cache_read
    add.cache_write = request.cache_write
    add.request_id = request.request_id
    add.receive_time.seconds, add.receive_time.nanos = divmod(request.receive_time_ns, 1_000_000_000)
    _set(
        add,
        priority=request.priority,
        timeout_ms=run.timeout_ms,
        queue_timeout_ms=run.queue_timeout_ms,
        cache_salt=request.page_salt,
        tenant=request.tenant,
        traceparent=request.traceparent,
        adapter=request.adapter,
        first_choice_index=run.first_choice,
        attempt=run.attempt,
    )
    if request.labels:
        add.labels.update(request.labels)
    if run.resume_ids:
        add.resume_token_ids = _u32(run.resume_ids)
    _write_params(add.params, request, run)
    return message.SerializeToString()


def _set(message: Any, **values: object) -> None:
    """Fields that are not optional: one that is 0 or empty need not be set."""
    for name, value in values.items():
        if value:
            setattr(message, name, value)


def _write_params(params: worker_pb2.SequenceParams, request: Request, run: Run) -> None:
    sampling, stops = request.sampling, request.stops
    params.temperature = sampling.temperature
    params.top_p = sampling.top_p
    params.repetition_penalty = sampling.repetition_penalty
    params.seed = sampling.seed
    # The context ends a sequence long before: a worker refuses what no sequence can have.
    params.max_tokens = most = min(stops.max_tokens, MOST_TOKENS)
    params.stop_at_eos = not stops.ignore_eos
    _set(
        params,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        min_tokens=min(stops.min_tokens, most),
        max_duration_ms=run.max_duration_ms,
    )
    if stops.token_ids:
        params.stop_token_ids = _u32(stops.token_ids)
    if request.output.logprobs is not None:
        params.logprobs = request.output.logprobs
    if run.prompt_logprobs is not None:
        params.prompt_logprobs = run.prompt_logprobs
    if sampling.logit_bias:
        params.logit_bias_token_ids = _u32([token for token, _ in sampling.logit_bias])
        params.logit_bias_values = array("f", [bias for _, bias in sampling.logit_bias]).tobytes()
    _set_constraint(params, request)


def _set_constraint(params: worker_pb2.SequenceParams, request: Request) -> None:
    constraint = request.constraint
    if constraint is None:
        return
    if constraint.kind == "choices":
        params.choices.CopyFrom(ChoiceConstraint(choices=constraint.choices))
    else:
        setattr(params, constraint.kind, constraint.text)


def _u32(values: Sequence[int]) -> bytes:
    plane = values if isinstance(values, array) and values.typecode == "I" else array("I", values)
    return plane.tobytes()


# From the worker


def decode(frame: bytes) -> tuple[int, str, Any]:
    """(number, kind, value): the kind is the member's name in WorkerMessage, the value one of our types.

    Raises DecodeError (google.protobuf) or ValueError for what is no such message.
    """
    message = worker_pb2.WorkerMessage.FromString(frame)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError(f"worker message {message.number} has no kind that this release knows")
    return message.number, kind, _DECODERS[kind](getattr(message, kind))


def _facts(config: worker_pb2.Config) -> WorkerFacts:
    if config.geometry.page_count > MAX_PAGES:  # a mirror takes 30 bytes of each
        raise ValueError(f"a pool of {config.geometry.page_count} pages, at most {MAX_PAGES}")
    return WorkerFacts(
        worker_id=config.worker.worker_id,
        epoch=config.worker.epoch,
        state=config.worker.state,
        model_id=config.model.model_id,
        vocab_size=config.model.vocab_size,
        tokenizer_sha256=config.model.tokenizer_sha256,
        max_context_tokens=config.max_context_tokens,
        max_running_sequences=config.max_running_sequences,
        max_queued_requests=config.max_queued_requests,
        max_pinned_pages=config.max_pinned_pages,
        page_count=config.geometry.page_count,
        page_size=config.geometry.page_size,
        features=frozenset(config.features),
        pages_address=config.pages_address,
        fingerprint_key=config.fingerprint_key,
        info=config.worker,
        model=config.model,
        geometry=config.geometry,
    )


def _refusal(refusal: worker_pb2.Refusal) -> str:
    return f"speaks protocol {refusal.protocol}: {refusal.message}"


def _outcome(result: worker_pb2.AddResult) -> AddOutcome:
    return AddOutcome(
        result.sequence_id,
        AddStatus(result.status),
        result.queue_position,
        result.estimated_wait_ms,
        result.needed_pages,
        result.total_pages,
        result.message,
    )


def _beat(heartbeat: worker_pb2.Heartbeat) -> Beat:
    load = heartbeat.load
    age = load.last_step_age
    return Beat(
        state=load.state,
        running_sequences=load.running_sequences,
        waiting_requests=load.waiting_requests,
        last_step_age_seconds=age.seconds + age.nanos * 1e-9,
        estimated_wait_ms=heartbeat.estimated_wait_ms,
        load=load,
        pool=heartbeat.pool,
        revision=heartbeat.revision,
        pin_pages=heartbeat.pin_pages,
    )


def _step(step: worker_pb2.StepOutput) -> StepColumns:
    return StepColumns(
        sequence_ids=memoryview(step.sequence_ids).cast("Q").tolist(),
        token_ids=memoryview(step.token_ids).cast("I").tolist(),
        finish_codes=step.finish_codes,
        scores=_scores(step.logprobs) if step.HasField("logprobs") else None,
        starts=[_start(start) for start in step.starts],
        ends=_ends(step),
        prompt_scores=[(prompt.sequence_id, _scores(prompt.columns)) for prompt in step.prompt_logprobs],
    )


def _start(start: worker_pb2.SequenceStart) -> SequenceStart:
    prefix = None
    if start.HasField("prefix"):
        counts = start.prefix
        prefix = PrefixCounts(
            counts.hit_tokens, counts.miss_cold_tokens, counts.miss_evicted_tokens, counts.unaligned_tokens
        )
    return SequenceStart(start.sequence_id, prefix, start.reused_pages, start.queue_us, start.resumed)


def _ends(step: worker_pb2.StepOutput) -> list[SequenceEnd]:
    codes = [code for code in step.finish_codes if code]
    ends = step.ends
    if len(codes) != len(ends):
        raise ValueError(f"step {step.step}: {len(codes)} finish codes, {len(ends)} ends")
    return [_end(end, FinishCode(code)) for end, code in zip(ends, codes, strict=True)]


def _end(end: worker_pb2.SequenceEnd, code: FinishCode) -> SequenceEnd:
    bill = _bill(end.bill) if end.HasField("bill") else None
    return SequenceEnd(end.sequence_id, code, end.completion_tokens, bill, end.error_reason, end.message)


def _bill(bill: Any) -> KvBill:
    return KvBill(
        bill.page_seconds,
        bill.shared_page_seconds_saved,
        bill.peak_pages,
        bill.reused_pages,
        bill.copied_pages,
        bill.tail_waste_slots,
        bill.evictions_caused,
        bill.preemptions,
        bill.recomputed_tokens,
        bill.saved_tokens,
    )


def _scores(columns: worker_pb2.LogprobColumns) -> Scores:
    return Scores(
        _array("f", columns.logprobs),
        _array("I", columns.ranks),
        bytearray(columns.alternative_counts),
        _array("I", columns.alternative_token_ids),
        _array("f", columns.alternative_logprobs),
    )


def _array(typecode: str, plane: bytes) -> "array[Any]":
    values: array[Any] = array(typecode)
    values.frombytes(plane)
    return values


_DECODERS: Mapping[str, Any] = {
    "config": _facts,
    "refusal": _refusal,
    "add_result": _outcome,
    "step": _step,
    "heartbeat": _beat,
    "reply": lambda reply: reply,
}
