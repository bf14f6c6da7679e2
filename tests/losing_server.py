"""A stream whose every token is known, a server that loses it, and the client's rule without a connection."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvatlas.client.errors import KvatlasError, Unavailable
from kvatlas.client.resume import Course
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

NUM_TOKENS = 12


def token_of(seed: int, index: int, number: int) -> int:
    return (seed * 31 + index * 7 + number * number) % 997


def text_of(seed: int, index: int, count: int) -> str:
    """What may be shown after so many tokens: every third one only completes a character."""
    shown = count if count == NUM_TOKENS else count - count % 3 // 2
    return "".join(f"{token_of(seed, index, number)}," for number in range(shown))


def started(request: pb.StreamGenerateRequest, drawn_seed: int) -> pb.StreamGenerateResponse:
    spec = request.spec
    seed = spec.sampling.seed if spec.sampling.HasField("seed") else drawn_seed
    return pb.StreamGenerateResponse(
        started=pb.GenerationStarted(request_id=spec.request_id or "made-here", seed=seed)
    )


def delta(seed: int, index: int, begin: int, end: int, *, ids: bool) -> pb.StreamGenerateResponse:
    before, after = (text_of(seed, index, count) for count in (begin, end))
    return pb.StreamGenerateResponse(
        delta=pb.TokenDelta(
            index=index,
            text=after.removeprefix(before),
            token_ids=[token_of(seed, index, n) for n in range(begin, end)] if ids else [],
            token_offset=begin,
            token_count=end - begin,
        )
    )


def finished(index: int, count: int = NUM_TOKENS) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(
        choice_finished=pb.ChoiceFinished(
            index=index, finish_reason=pb.FINISH_REASON_MAX_TOKENS, completion_tokens=count
        )
    )


SUMMARY = pb.StreamGenerateResponse(summary=pb.GenerationSummary())


def stream_request(**spec: Any) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="x", **spec))


def lost(code: str = "UNAVAILABLE", reason: str = "") -> KvatlasError:
    return Unavailable("gone", code=code, reason=reason)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def course_of(request: pb.StreamGenerateRequest, **more: Any) -> Course:
    return Course(request, **({"timeout_seconds": 60.0, "clock": Clock(), "chance": lambda: 0.0} | more))


class LosingServer(generation_pb2_grpc.GenerationServiceServicer):
    """Ends its first calls after some tokens, as a proxy does whose server has died."""

    def __init__(self) -> None:
        self.knows_resume = True
        self.lose_after: list[int] = []  # tokens of each call in turn; calls beyond are whole
        self.failure: tuple[grpc.StatusCode, str] = (grpc.StatusCode.UNAVAILABLE, "")
        self.requests: list[pb.StreamGenerateRequest] = []
        self.proceed = threading.Event()
        self.proceed.set()

    def StreamGenerate(self, request: Any, context: Any) -> Iterator[pb.StreamGenerateResponse]:
        call = len(self.requests)
        self.requests.append(request)
        first = started(request, drawn_seed=40 + call)
        seed = first.started.seed
        yield first
        end = self.lose_after[call] if call < len(self.lose_after) else NUM_TOKENS
        begin = len(request.resume_after.ids) if self.knows_resume else 0
        for number in range(begin, end):
            ids = request.spec.output.format == pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
            yield delta(seed, 0, number, number + 1, ids=ids)
        self.proceed.wait(10)
        if end < NUM_TOKENS:
            self._lose(context)
        yield finished(0)
        yield SUMMARY

    def _lose(self, context: Any) -> None:
        code, reason = self.failure
        if reason:
            packed = any_pb2.Any()
            packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvatlas.v1"))
            status = status_pb2.Status(code=code.value[0], details=[packed])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(code, "gone")


@contextmanager
def served(servicer: LosingServer, port: int = 0) -> Iterator[tuple[Any, int]]:
    running = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, running)
    bound = running.add_insecure_port(f"127.0.0.1:{port}")
    running.start()
    try:
        yield running, bound
    finally:
        running.stop(0).wait()
