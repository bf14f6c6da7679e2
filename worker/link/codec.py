"""Messages of the engine socket ⇄ our types: sequences, steps, load. Pages are in page_codec.py.

Protobuf stops here. Ids: a service counts its own sequences, so two services use the same numbers;
inside the worker the number of the service's session stands above them and nothing can meet.
"""

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from kvatlas.constraints.text import ConstraintText
from kvatlas.v1 import generation_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.ids import SequenceId
from worker.messages import AddAnswer, CallFailure
from worker.scheduling.output import BillCounters, OutputColumns, PrefixCounts, SequenceEnd, SequenceStart
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import TokenLogprob

PROTOCOL = 1
SESSION_SHIFT = 40
LOCAL_ID_MASK = (1 << SESSION_SHIFT) - 1
"""A service's own sequence ids are below 2^40: 12 days at a million sequences a second."""

MAX_SAMPLES = 1024
MAX_CHOICES = 1 << 31  # of a request; kernels count them in 32 bits
MAX_UNIX_SECONDS = 253_402_300_799  # the last second of a Timestamp
MAX_ALTERNATIVES = 255  # of a token: they are counted in a byte of LogprobColumns
REPLY_FIELD_TAG = b"\x3a"  # WorkerMessage.reply: field 7, length-delimited

assert sys.byteorder == "little", "planes are little endian and are copied as they lie in memory"
assert array("I").itemsize == 4
assert array("Q").itemsize == 8

Number = TypeVar("Number", int, float)


class Unfit(Exception):
    """An AddSequence that must not run; carries the status of its AddResult."""

    def __init__(self, status: AddStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def inner_id(session: int, sequence_id: int) -> SequenceId:
    """The worker's id of a service's sequence."""
    return SequenceId(session << SESSION_SHIFT | sequence_id)


def outer_id(sequence_id: int) -> int:
    """The service's own id of a sequence."""
    return sequence_id & LOCAL_ID_MASK


def session_of(sequence_id: int) -> int:
    """The session that a sequence belongs to."""
    return sequence_id >> SESSION_SHIFT


def outer_ids_plane(sequence_ids: "array[int]") -> bytes:
    """Plane of u64: the services' own ids of many sequences."""
    return (np.frombuffer(sequence_ids, dtype=np.uint64) & np.uint64(LOCAL_ID_MASK)).tobytes()


# Service to worker.


def plane(kind: str, data: bytes, name: str) -> "array[int]":
    """A plane as numbers of one width; Unfit when it is cut short."""
    values: array[int] = array(kind)
    if len(data) % values.itemsize:
        raise Unfit(
            AddStatus.INVALID, f"{name}: {len(data)} bytes are no plane of {values.itemsize} bytes each"
        )
    values.frombytes(data)
    return values


def request_spec(
    add: worker_pb2.AddSequence, *, session: int, source: str, now: float, vocab_size: int
) -> RequestSpec:
    """An AddSequence as the scheduler takes it, deadlines on this process's clock. Raises Unfit."""
    samples = add.sample_count
    if not 1 <= samples <= MAX_SAMPLES or add.sequence_id + samples - 1 > LOCAL_ID_MASK:
        raise Unfit(
            AddStatus.INVALID, f"sample_count {samples} from sequence_id {add.sequence_id} is out of range"
        )
    _within(add.first_choice_index, 0, MAX_CHOICES - samples, "first_choice_index")
    if add.adapter:
        raise Unfit(AddStatus.FEATURE_DISABLED, "adapters")
    prompt = token_ids(add.prompt_token_ids, vocab_size, "prompt_token_ids")
    if not prompt:
        raise Unfit(AddStatus.INVALID, "prompt_token_ids is empty")
    # What most requests do not have is not looked at: this is code that runs cold before a first token.
    resume_plane = add.resume_token_ids
    resume = token_ids(resume_plane, vocab_size, "resume_token_ids") if resume_plane else array("I")
    if resume and samples > 1:
        raise Unfit(AddStatus.INVALID, "resume_token_ids with several samples")
    return RequestSpec(
        sequence_id=inner_id(session, add.sequence_id),
        prompt_token_ids=prompt,
        params=_sampling_params(add.params, vocab_size),
        sample_count=samples,
        priority=add.priority,
        deadline=now + add.timeout_ms / 1000 if add.timeout_ms else None,
        queue_deadline=now + add.queue_timeout_ms / 1000 if add.queue_timeout_ms else None,
        cache_read=add.cache_read,
        cache_write=add.cache_write,
        cache_salt=add.cache_salt,
        request_id=add.request_id,
        tenant=add.tenant,
        labels=dict(add.labels),
        receive_time_ns=_nanoseconds(add.receive_time),
        source=source,
        first_choice_index=add.first_choice_index,
        resume_token_ids=resume,
        attempt=add.attempt,
        traceparent=add.traceparent,
    )


def _nanoseconds(time: Timestamp) -> int:
    """Since 1970, of a time that can be told again."""
    nanos = _within(time.nanos, 0, 999_999_999, "receive_time")
    return _within(time.seconds, 0, MAX_UNIX_SECONDS, "receive_time") * 1_000_000_000 + nanos


def token_ids(data: bytes, vocab_size: int, name: str) -> "array[int]":
    """A plane of ids, all in the vocabulary: what is behind it would be read out of bounds. Raises Unfit."""
    ids = plane("I", data, name)
    if data and (highest := int(np.maximum.reduce(np.frombuffer(data, dtype=np.uint32)))) >= vocab_size:
        raise Unfit(AddStatus.INVALID, f"{name}: token id {highest}, the vocabulary ends before {vocab_size}")
    return ids


def _sampling_params(params: worker_pb2.SequenceParams, vocab_size: int) -> SamplingParams:
    seconds = params.max_duration_ms / 1000
    stop_ids = params.stop_token_ids
    return SamplingParams(
        temperature=_within(params.temperature, 0.0, 1e6, "temperature"),
        top_p=_within(params.top_p, 0.0, 1.0, "top_p"),
        top_k=params.top_k,
        min_p=_within(params.min_p, 0.0, 1.0, "min_p"),
        repetition_penalty=_within(params.repetition_penalty, 1e-6, 1e6, "repetition_penalty"),
        frequency_penalty=_within(params.frequency_penalty, -1e6, 1e6, "frequency_penalty"),
        presence_penalty=_within(params.presence_penalty, -1e6, 1e6, "presence_penalty"),
        seed=params.seed,
        logit_bias=_logit_bias(params, vocab_size),
        max_tokens=_within(params.max_tokens, 1, 1 << 31, "max_tokens"),
        min_tokens=_within(params.min_tokens, 0, params.max_tokens, "min_tokens"),
        stop_token_ids=frozenset(token_ids(stop_ids, vocab_size, "stop_token_ids") if stop_ids else ()),
        stop_at_eos=params.stop_at_eos,
        max_duration_seconds=seconds or None,
        logprobs=_alternatives(params, "logprobs"),
        prompt_logprobs=_alternatives(params, "prompt_logprobs"),
    )


def _alternatives(
    params: worker_pb2.SequenceParams, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    return _within(getattr(params, name), 0, MAX_ALTERNATIVES, name) if params.HasField(name) else None


def _logit_bias(params: worker_pb2.SequenceParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not params.logit_bias_token_ids and not params.logit_bias_values:
        return ()
    ids = token_ids(params.logit_bias_token_ids, vocab_size, "logit_bias_token_ids")
    if len(params.logit_bias_values) != 4 * len(ids):
        raise Unfit(AddStatus.INVALID, "logit_bias_values does not fit logit_bias_token_ids")
    bias = np.frombuffer(params.logit_bias_values, dtype=np.float32).tolist()
    if not all(map(math.isfinite, bias)):
        raise Unfit(AddStatus.INVALID, "logit_bias_values is not finite")
    return tuple(zip(ids, bias, strict=True))


def constraint_text(params: worker_pb2.SequenceParams) -> ConstraintText | None:
    """The constraint of a request as its client wrote it."""
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choices":
        return ConstraintText(kind, choices=tuple(params.choices.choices))
    return ConstraintText(kind, getattr(params, kind))


def _within(value: Number, low: Number, high: Number, name: str) -> Number:
    if not low <= value <= high:  # also false for NaN
        raise Unfit(AddStatus.INVALID, f"{name}: {value} is not in {low} .. {high}")
    return value


# Worker to service.


def add_result(answer: AddAnswer) -> worker_pb2.AddResult:
    """The one answer to an AddSequence."""
    outcome = answer.outcome
    return worker_pb2.AddResult(
        sequence_id=outer_id(answer.sequence_id),
        status=int(outcome.status),  # type: ignore[arg-type]  # the numbers are the enum's
        queue_position=outcome.queue_position,
        estimated_wait_ms=milliseconds(outcome.estimated_wait_seconds),
        needed_pages=outcome.needed_pages,
        total_pages=outcome.total_pages,
        message=outcome.message,
    )


def step_output(step: int, seconds: float, columns: OutputColumns) -> worker_pb2.StepOutput:
    """One service's share of a step; about ten times cheaper as planes than as a message per token."""
    message = worker_pb2.StepOutput(
        step=step,
        step_us=min(int(seconds * 1e6), 0xFFFFFFFF),  # a process that was stopped for an hour goes on
        sequence_ids=outer_ids_plane(columns.sequence_ids),
        token_ids=columns.token_ids.tobytes(),
        finish_codes=bytes(columns.finish_codes),
    )
    if columns.starts:
        message.starts.extend([_start(start) for start in columns.starts])
    if columns.ends:
        message.ends.extend([_end(end) for end in columns.ends])
    if columns.logprobs:
        entries = [columns.logprobs.get(entry) for entry in range(len(columns.token_ids))]
        message.logprobs.CopyFrom(logprob_columns(entries))
    for sequence_id, prompt_entries in columns.prompt_logprobs:
        message.prompt_logprobs.add(
            sequence_id=outer_id(sequence_id), columns=logprob_columns(prompt_entries)
        )
    return message


def _start(start: SequenceStart) -> worker_pb2.SequenceStart:
    return worker_pb2.SequenceStart(
        sequence_id=outer_id(start.sequence_id),
        prefix=None if start.prefix is None else prefix_lookup(start.prefix),
        reused_pages=start.reused_pages,
        queue_us=int(start.queue_seconds * 1e6),
        resumed=start.resumed,
    )


def _end(end: SequenceEnd) -> worker_pb2.SequenceEnd:
    return worker_pb2.SequenceEnd(
        sequence_id=outer_id(end.sequence_id),
        completion_tokens=end.completion_tokens,
        bill=None if end.bill is None else _bill(end.bill),
        error_reason=None if end.failure is None else int(end.failure),  # type: ignore[arg-type]
        message=end.message,
    )


def _bill(bill: BillCounters) -> generation_pb2.KvBill:
    return generation_pb2.KvBill(
        page_seconds=bill.page_seconds,
        shared_page_seconds_saved=bill.shared_page_seconds_saved,
        saved_tokens=bill.saved_tokens,
        peak_pages=bill.peak_pages,
        reused_pages=bill.reused_pages,
        copied_pages=bill.copied_pages,
        tail_waste_slots=bill.tail_waste_slots,
        evictions_caused=bill.evictions_caused,
        preemptions=bill.preemptions,
        recomputed_tokens=bill.recomputed_tokens,
    )


def prefix_lookup(prefix: PrefixCounts) -> generation_pb2.PrefixLookup:
    """What the prefix cache had for one prompt."""
    return generation_pb2.PrefixLookup(
        hit_tokens=prefix.hit_tokens,
        miss_cold_tokens=prefix.miss_cold_tokens,
        miss_evicted_tokens=prefix.miss_evicted_tokens,
        unaligned_tokens=prefix.unaligned_tokens,
    )


def logprob_columns(entries: Sequence[TokenLogprob | None]) -> worker_pb2.LogprobColumns:
    """Log-probabilities as planes, one entry per token; None: not asked for, or the first of a prompt."""
    alternatives = [pair for entry in entries if entry is not None for pair in entry.alternatives]
    return worker_pb2.LogprobColumns(
        logprobs=array("f", [math.nan if entry is None else entry.logprob for entry in entries]).tobytes(),
        ranks=array("I", [0 if entry is None else entry.rank for entry in entries]).tobytes(),
        alternative_counts=bytes(0 if entry is None else len(entry.alternatives) for entry in entries),
        alternative_token_ids=array("I", [token_id for token_id, _ in alternatives]).tobytes(),
        alternative_logprobs=array("f", [logprob for _, logprob in alternatives]).tobytes(),
    )


def failure_reply(failure: CallFailure) -> worker_pb2.CommandReply:
    """A call that could not be done."""
    return worker_pb2.CommandReply(
        command_id=failure.ticket.command_id,
        code=int(failure.error),
        error_reason=int(failure.reason),  # type: ignore[arg-type]
        message=failure.message,
        metadata=failure.metadata,
    )


def wrapped_reply(number: int, payload: bytes) -> bytes:
    """A WorkerMessage around a CommandReply that is bytes already: large ones are encoded elsewhere."""
    head = worker_pb2.WorkerMessage(number=number).SerializeToString()
    return b"".join((head, REPLY_FIELD_TAG, _varint(len(payload)), payload))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def milliseconds(seconds: float) -> int:
    """Whole milliseconds for a u32 field, rounded up so that a short wait is not 0, which means unknown."""
    return min(math.ceil(seconds * 1000), 0xFFFFFFFF)
