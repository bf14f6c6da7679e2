"""What the spans of a generation say: numbers and settings, named as OpenTelemetry's GenAI conventions do.

Never a prompt, an output, a stop string, a token id, a label or a tenant. Knows no OpenTelemetry: tracing.py
turns this into spans. Everything is read at the end of the request, so nothing is done per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.v1 import generation_pb2 as pb
from service.errors import Failure
from service.handlers.account import AccountEvent, RequestAccount
from service.handlers.run import GenerationRun
from service.request import Request

Value = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class Phase:
    """A span below the generation's; times of the monotonic clock."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ending:
    """All that is said of a generation; times of the monotonic clock."""

    name: str
    at: float
    attributes: Mapping[str, Value]
    phases: Sequence[Phase]
    events: Sequence[AccountEvent]
    error: str  # machine-readable reason; empty: it went well, or the client stopped it


def ending_of(
    spec: pb.GenerationSpec,
    request: Request | None,
    run: GenerationRun | None,
    account: RequestAccount,
    *,
    model: str,
    outcome: str,
    failure: Failure | None,
    now: float,
) -> Ending:
    """The end of a generation, however far it came: `request` and `run` are None where it did not."""
    operation = "chat" if spec.WhichOneof("prompt") == "chat" else "text_completion"
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvatlas",
        "gen_ai.request.model": model,
        "kvatlas.outcome": outcome,
    }
    if request is not None:
        attributes |= _settings(request)
    if run is not None:
        attributes |= _results(run, model)
    if failure is not None:
        attributes["error.type"] = failure.reason
    return Ending(
        name=f"{operation} {model}".rstrip(),
        at=now,
        attributes=attributes,
        phases=tuple(_phases(run, account, now)),
        events=tuple(account.events),
        error=failure.reason if failure is not None else "",
    )


def _settings(request: Request) -> dict[str, Value]:
    sampling = request.sampling
    return {
        "gen_ai.request.max_tokens": request.stops.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": request.num_samples,
        "kvatlas.request.priority": request.priority,
        "gen_ai.response.id": request.request_id,
    }


def _results(run: GenerationRun, model: str) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": len(run.request.prompt_ids),
        "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in run.choices),
        "kvatlas.worker": run.worker_id,
        "kvatlas.resumes": run.resumes,
        "kvatlas.preemptions": run.bill.preemptions,
        "kvatlas.page_seconds": run.bill.page_seconds,
    }
    finishes = [choice.finish.reason.name.lower() for choice in run.choices if choice.finish is not None]
    if finishes:
        attributes["gen_ai.response.finish_reasons"] = finishes
    prefix = run.prefix
    if prefix is not None:
        attributes |= {
            "gen_ai.usage.cache_read.input_tokens": prefix.hit_tokens,
            "kvatlas.prefix.hit_tokens": prefix.hit_tokens,
            "kvatlas.prefix.miss_cold_tokens": prefix.miss_cold_tokens,
            "kvatlas.prefix.miss_evicted_tokens": prefix.miss_evicted_tokens,
            "kvatlas.prefix.unaligned_tokens": prefix.unaligned_tokens,
        }
    return attributes


def _phases(run: GenerationRun | None, account: RequestAccount, now: float) -> Iterator[Phase]:
    """Queue, prefill, decode, one after the other; the last that was reached ends with the request."""
    admitted, first, last = account.admitted_at, account.first_token_at, account.last_token_at
    yield Phase("queue", account.received, admitted if admitted is not None else now)
    if admitted is None:
        return
    cached = run.prefix.hit_tokens if run is not None and run.prefix is not None else 0
    computed = len(run.request.prompt_ids) - cached if run is not None else 0
    attributes = {"kvatlas.cached_tokens": cached, "kvatlas.computed_tokens": computed}
    yield Phase("prefill", admitted, first if first is not None else now, attributes)
    if first is None or last is None:
        return
    tokens = sum(choice.num_tokens for choice in run.choices) if run is not None else 0
    yield Phase("decode", first, last, {"gen_ai.usage.output_tokens": tokens})
