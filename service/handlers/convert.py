"""Protobuf to our types and back, on the public side.

Owns the defaults of unset fields. Everything here has been validated already; nothing is looked up.
"""

import math
import os
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from kvatlas.constraints.text import ConstraintText
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1.server_pb2 import DefaultSampling, Model
from service.handlers.validate import plane_of, seconds, set_fields
from service.request import Call, KvBill, Output, PrefixCounts, Request, Sampling, Scores, Stops

TokenBytes = Callable[[int], bytes]
DEFAULT_HOLD_SECONDS = 0.1
LEAST_PENALTY = 2.0**-19
"""No smaller repetition penalty is sent: scores divided by it overflow. A worker refuses less than 1e-6."""
_DRAW = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How a stream is cut into messages, and where it begins."""

    min_tokens: int = 1
    hold_seconds: float = DEFAULT_HOLD_SECONDS
    queue_updates: bool = False
    resume_ids: Sequence[int] = ()  # output that the client has already


# From the client


def prompt_ids(spec: pb.GenerationSpec) -> "array[int]":
    """The ids that a client sent; none where its prompt is text or a chat."""
    return plane_of(spec.token_ids.ids)


def request_from(
    spec: pb.GenerationSpec, call: Call, model: Model, prompt_ids: "array[int]", context_tokens: int = 0
) -> Request:
    """A spec with its defaults filled in; `with_prompt` completes it. Reads what is set, nothing else."""
    given = set_fields(spec)
    sampling = set_fields(spec.sampling) if "sampling" in given else _NOTHING
    scheduling = set_fields(spec.scheduling) if "scheduling" in given else _NOTHING
    cache = set_fields(spec.cache) if "cache" in given else _NOTHING
    return Request(
        request_id=call.request_id,
        prompt_ids=prompt_ids,
        sampling=_sampling(sampling, model.defaults),
        stops=_stops(set_fields(spec.stop)) if "stop" in given else _NO_STOPS,
        output=_output(set_fields(spec.output)) if "output" in given else _PLAIN_OUTPUT,
        model_id=model.model_id,
        context_tokens=context_tokens,
        num_samples=sampling.get("n", 1),
        priority=scheduling.get("priority", 0),
        queue_timeout_ms=milliseconds(scheduling.get("queue_timeout")),
        cache_read=cache.get("read", True),
        cache_write=cache.get("write", True),
        cache_salt=cache.get("salt", "").encode(),
        tenant=call.tenant,
        labels=dict(spec.labels) if "labels" in given else {},
        adapter=given.get("adapter", ""),
        constraint=_constraint(spec),
        traceparent=call.traceparent,
        receive_time_ns=call.receive_time_ns,
        deadline=call.deadline,
    )


def with_prompt(request: Request, prompt_ids: Sequence[int], max_tokens: int) -> Request:
    """The request with its ids, and with the most tokens it can get."""
    stops = request.stops
    if request.prompt_ids is prompt_ids and stops.max_tokens == max_tokens:
        return request
    if stops.max_tokens != max_tokens:
        stops = replace(stops, max_tokens=max_tokens)
    return replace(request, prompt_ids=prompt_ids, stops=stops)


def stream_shape(request: pb.StreamGenerateRequest) -> StreamShape:
    """StreamOptions with its defaults filled in, and what is there already."""
    options = request.stream
    hold = seconds(options.max_hold) if options.HasField("max_hold") else DEFAULT_HOLD_SECONDS
    resume_ids = plane_of(request.resume_after.ids)
    return StreamShape(max(1, options.min_tokens_per_message), hold, options.queue_updates, resume_ids)


def milliseconds(duration: Duration | None) -> int:
    """0 for an unset one; a set one is never 0, since 0 means no limit on the seam."""
    if duration is None:
        return 0
    value = seconds(duration)
    return max(1, round(value * 1000)) if value > 0 else 0


def new_request_id() -> str:
    """A UUIDv7: 48 bits of Unix milliseconds, then chance; ids sort by time."""
    value = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _sampling(given: Mapping[str, Any], defaults: DefaultSampling) -> Sampling:
    bias = given.get("logit_bias")
    return Sampling(
        temperature=given.get("temperature", defaults.temperature),
        top_p=given.get("top_p", defaults.top_p) or 1.0,
        top_k=given.get("top_k", defaults.top_k),
        min_p=given.get("min_p", defaults.min_p),
        repetition_penalty=max(
            LEAST_PENALTY, given.get("repetition_penalty", defaults.repetition_penalty) or 1.0
        ),
        frequency_penalty=given.get("frequency_penalty", defaults.frequency_penalty),
        presence_penalty=given.get("presence_penalty", defaults.presence_penalty),
        seed=given["seed"] if "seed" in given else _DRAW.getrandbits(64),
        logit_bias=tuple(bias.items()) if bias is not None else (),
    )


def _stops(given: Mapping[str, Any]) -> Stops:
    return Stops(
        max_tokens=given.get("max_tokens", 0),  # 0 while unset; with_prompt resolves it
        is_limit_given="max_tokens" in given,
        min_tokens=given.get("min_tokens", 0),
        strings=tuple(given.get("stop_strings", ())),
        token_ids=tuple(given.get("stop_token_ids", ())),
        ignore_eos=given.get("ignore_eos", False),
        include_in_output=given.get("include_stop_in_output", False),
        max_duration_ms=milliseconds(given.get("max_duration")),
    )


def _output(given: Mapping[str, Any]) -> Output:
    form = given.get("format", pb.OUTPUT_FORMAT_UNSPECIFIED)
    return Output(
        text=form != pb.OUTPUT_FORMAT_TOKEN_IDS,
        ids=form in (pb.OUTPUT_FORMAT_TOKEN_IDS, pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        skip_special=given.get("skip_special_tokens", True),
    )


def _constraint(spec: pb.GenerationSpec) -> ConstraintText | None:
    kind = spec.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choices":
        return ConstraintText(kind, choices=tuple(spec.choices.choices))
    return ConstraintText(kind, getattr(spec, kind))


_NOTHING: Mapping[str, Any] = {}
_NO_STOPS, _PLAIN_OUTPUT = _stops(_NOTHING), _output(_NOTHING)


# To the client


def to_duration(value: float) -> Duration:
    """A length of time; never negative."""
    nanoseconds = int(max(0.0, value) * 1e9)
    return Duration(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)


def to_timestamp(ns: int) -> Timestamp:
    """A Unix time in ns."""
    return Timestamp(seconds=ns // 1_000_000_000, nanos=ns % 1_000_000_000)


def to_prefix(counts: PrefixCounts) -> pb.PrefixLookup:
    """What the prefix cache had."""
    return pb.PrefixLookup(
        hit_tokens=counts.hit_tokens,
        miss_cold_tokens=counts.miss_cold_tokens,
        miss_evicted_tokens=counts.miss_evicted_tokens,
        unaligned_tokens=counts.unaligned_tokens,
    )


def to_bill(bill: KvBill) -> pb.KvBill:
    """What a request cost in KV memory."""
    return pb.KvBill(
        page_seconds=bill.page_seconds,
        shared_page_seconds_saved=bill.shared_page_seconds_saved,
        peak_pages=bill.peak_pages,
        reused_pages=bill.reused_pages,
        copied_pages=bill.copied_pages,
        tail_waste_slots=bill.tail_waste_slots,
        evictions_caused=bill.evictions_caused,
        preemptions=bill.preemptions,
        recomputed_tokens=bill.recomputed_tokens,
        saved_tokens=bill.saved_tokens,
    )


def to_logprobs(token_ids: Sequence[int], scores: Scores, token_bytes: TokenBytes) -> list[pb.TokenLogprob]:
    """Log-probabilities of tokens; one that is not known (NaN: the first of a prompt) stays unset."""
    entries, at = [], 0
    for index, token_id in enumerate(token_ids):
        end = at + scores.counts[index]
        logprob = scores.logprobs[index]
        alternatives = [
            pb.AlternativeToken(token_id=other, logprob=value, token_bytes=token_bytes(other))
            for other, value in zip(
                scores.alternative_ids[at:end], scores.alternative_logprobs[at:end], strict=True
            )
        ]
        entries.append(
            pb.TokenLogprob(
                token_id=token_id,
                logprob=None if math.isnan(logprob) else logprob,
                rank=scores.ranks[index],
                token_bytes=token_bytes(token_id),
                alternatives=alternatives,
            )
        )
        at = end
    return entries
