"""What tests share that look at statuses: a caller with a token, and what he was told, taken apart."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvatlas.v1 import cache_pb2_grpc, generation_pb2_grpc, server_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service.testing import Refusal

SECONDS = 120.0  # of a call that should end long before


class Caller:
    """Stubs of one principal at one service."""

    def __init__(self, channel: grpc.Channel, admin: grpc.Channel, token: str) -> None:
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        generation: Any = generation_pb2_grpc.GenerationServiceStub
        cache: Any = cache_pb2_grpc.CacheServiceStub
        server: Any = server_pb2_grpc.ServerServiceStub
        operator: Any = server_pb2_grpc.AdminServiceStub
        self._stubs = (generation(channel), cache(channel), server(channel), operator(admin))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        found = next((getattr(stub, method) for stub in self._stubs if hasattr(stub, method)), None)
        if found is None:
            raise AttributeError(method)

        def call(request: Any, *, timeout: float | None = SECONDS) -> Any:
            return found(request, timeout=timeout, metadata=self.metadata)

        return call

    def stream(self, spec: pb.GenerationSpec, timeout: float | None = SECONDS, **options: Any) -> Any:
        request = pb.StreamGenerateRequest(spec=spec, stream=pb.StreamOptions(**options))
        return self.StreamGenerate(request, timeout=timeout)

    def generate(self, spec: pb.GenerationSpec, timeout: float | None = SECONDS) -> pb.GenerateResponse:
        response: pb.GenerateResponse = self.Generate(pb.GenerateRequest(spec=spec), timeout=timeout)
        return response


@dataclass(frozen=True)
class Told:
    """What a client was told, taken apart; OK has neither reason nor details."""

    status: str
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    retry_ms: int | None = None
    pushback: str | None = None
    quota: str = ""


def told(call: Callable[[], Any]) -> Told:
    """Of a call that fails."""
    error = _error_of(call)
    refusal = Refusal.of(error)
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    quota = error_details_pb2.QuotaFailure()
    for detail in status.details:
        detail.Unpack(quota)
    subjects = ",".join(violation.subject for violation in quota.violations)
    return Told(
        refusal.code,
        refusal.reason,
        dict(refusal.metadata),
        refusal.paths,
        refusal.retry_ms,
        refusal.pushback,
        subjects,
    )


def both(caller: Caller, spec: pb.GenerationSpec, timeout: float | None = SECONDS) -> Told:
    """Of Generate and StreamGenerate, which must be told the same."""
    one = told(lambda: caller.generate(spec, timeout))
    other = told(lambda: caller.stream(spec, timeout))
    assert (one.status, one.reason, one.paths) == (other.status, other.reason, other.paths)
    return one


def _error_of(call: Callable[[], Any]) -> Any:
    try:
        outcome = call()
        if hasattr(outcome, "__next__"):
            outcome = list(outcome)
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"it should have failed: {outcome}")


def raw(channel: grpc.Channel, method: str, data: bytes, metadata: Any = ()) -> Any:
    call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
    return call(data, timeout=SECONDS, metadata=metadata)
