"""Every unary call of a client as a value: which method, what is asked, for how long, how its answer is read.

Shared by the blocking and the asyncio client, which differ in how they wait and in nothing else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvatlas.client.channel import LONG_TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS
from kvatlas.client.connection import CACHE, GENERATION, SERVER, Service
from kvatlas.client.events import Generation, Tokens, read_generation, read_tokens
from kvatlas.client.request import Message, Options, Prompt, build_spec, build_tokenize, in_range
from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2

Answer = TypeVar("Answer")


def _as_it_is(answer: Any) -> Any:
    return answer


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One call that has one answer."""

    service: Service
    method: str
    request: Any
    limit_seconds: float = SHORT_TIMEOUT_SECONDS  # where the client's own deadline is later
    read: Callable[[Any], Answer] = _as_it_is


def generate(prompt: Prompt, options: Options) -> Call[Generation]:
    """The whole answer. RequestError, TypeError: see build_spec."""
    request = generation_pb2.GenerateRequest(spec=build_spec(prompt, options))
    return Call(GENERATION, "Generate", request, math.inf, read_generation)


def cancel(request_ids: Sequence[str]) -> Call[generation_pb2.CancelGenerationResponse]:
    """Other calls on this server."""
    request = generation_pb2.CancelGenerationRequest(request_ids=request_ids)
    return Call(GENERATION, "CancelGeneration", request)


def tokenize(prompt: str | Sequence[Message], include_offsets: bool) -> Call[Tokens]:
    """Template and tokenizer without the model."""
    return Call(GENERATION, "Tokenize", build_tokenize(prompt, include_offsets), read=read_tokens)


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool) -> Call[str]:
    """Token ids back to text. RequestError for ids that no request can carry."""
    request = generation_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    with in_range("token_ids", token_ids):
        request.token_ids.extend(token_ids)
    return Call(GENERATION, "Detokenize", request, read=lambda answer: str(answer.text))


def server_info() -> Call[server_pb2.GetServerInfoResponse]:
    """Version, limits, features and workers."""
    return Call(SERVER, "GetServerInfo", server_pb2.GetServerInfoRequest())


def models() -> Call[Sequence[server_pb2.Model]]:
    """Served models (the first 50)."""
    return Call(SERVER, "ListModels", server_pb2.ListModelsRequest(), read=lambda answer: answer.models)


def load() -> Call[server_pb2.Load]:
    """How busy the server is right now."""
    return Call(SERVER, "GetLoad", server_pb2.GetLoadRequest(), read=lambda answer: answer.load)


def page_pool(worker_id: str) -> Call[cache_pb2.GetPagePoolResponse]:
    """Geometry and totals of a worker's pool."""
    return Call(CACHE, "GetPagePool", cache_pb2.GetPagePoolRequest(worker_id=worker_id))


def page(worker_id: str, page_id: int, event_limit: int) -> Call[cache_pb2.GetPageResponse]:
    """One page in words. RequestError for numbers that no request can carry."""
    request = cache_pb2.GetPageRequest(worker_id=worker_id)
    with in_range("page_id", page_id):
        request.page_id = page_id
    with in_range("event_limit", event_limit):
        request.event_limit = event_limit
    return Call(CACHE, "GetPage", request)


def sequences(worker_id: str, max_results: int) -> Call[cache_pb2.ListSequencesResponse]:
    """The live sequences with their pages. RequestError for a number that no request can carry."""
    request = cache_pb2.ListSequencesRequest(worker_id=worker_id)
    with in_range("max_results", max_results):
        request.max_results = max_results
    return Call(CACHE, "ListSequences", request)


def check_integrity(worker_id: str) -> Call[cache_pb2.RunIntegrityCheckResponse]:
    """Every page and row of a worker once."""
    request = cache_pb2.RunIntegrityCheckRequest(worker_id=worker_id)
    return Call(CACHE, "RunIntegrityCheck", request, LONG_TIMEOUT_SECONDS)
