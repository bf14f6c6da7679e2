"""The asyncio client: the same names as the blocking one.

    async with AsyncClient("127.0.0.1:50051") as client:
        async with client.stream("The sky is", max_tokens=8) as stream:
            async for event in stream:
                ...

One event loop per process. A stream that is left early is cancelled: leave the `async with` block,
call `close()`, or drop the stream. gRPC itself would let an abandoned call run on (grpc/grpc#43462).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from kvatlas.client.channel import (
    CACHE_SERVICE_CONFIG,
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_SECONDS,
    INFO_SERVICE_CONFIG,
    LONG_TIMEOUT_SECONDS,
    SERVICE_CONFIG,
    SHORT_TIMEOUT_SECONDS,
    Target,
)
from kvatlas.client.credentials import Credentials
from kvatlas.client.errors import KvatlasError, Unavailable, from_rpc_error
from kvatlas.client.events import Generation, Tokens, read_generation, read_tokens
from kvatlas.client.request import (
    Message,
    Options,
    Prompt,
    build_spec,
    build_stream,
    build_tokenize,
    duration,
)
from kvatlas.client.resume import DEFAULT_RESUME_SECONDS, Course
from kvatlas.client.token_stream import AsyncTokenStream
from kvatlas.client.watch import WATCH_TIMEOUT_SECONDS, Reconnect, WatchOptions, watch_request
from kvatlas.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)

if TYPE_CHECKING:
    from kvatlas.client.page_map import PageMap


class AsyncClient:
    """A service by its address: `host:port`, `dns:///name:port`, `unix:path`, or several `ip:port`.

    A stream whose server is lost goes on elsewhere, for `resume_seconds` at most; 0: never.
    Raises CredentialsError and ValueError for what cannot be used as it stands.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        credentials: Credentials | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        resume_seconds: float = DEFAULT_RESUME_SECONDS,
    ) -> None:
        self._target = Target(address, credentials)
        self.address = str(self._target)
        self._timeout = timeout_seconds
        self._resume_seconds = resume_seconds
        self._channels: dict[int, grpc.aio.Channel] = {}

    # generation

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer. Retried by gRPC while no server took it."""
        request = generation_pb2.GenerateRequest(spec=build_spec(prompt, options))
        return read_generation(await self._unary(self._generation().Generate, request, timeout_seconds))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_seconds: float | None = None,
        queue_updates: bool = False,
        min_tokens_per_message: int = 0,
        max_hold_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncTokenStream:
        """The answer as it comes. Use it in an `async with` block."""
        request = build_stream(prompt, options, queue_updates, min_tokens_per_message, max_hold_seconds)
        timeout = timeout_seconds or self._timeout
        course = Course(request, timeout_seconds=timeout, resume_seconds=self._resume_seconds)
        return AsyncTokenStream(course, self._open_stream, self.address)

    async def chat(
        self, messages: Sequence[Message], *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """`generate` for chat turns; `stream` takes them as well."""
        return await self.generate(messages, timeout_seconds=timeout_seconds, **options)

    async def cancel(self, request_ids: Sequence[str]) -> generation_pb2.CancelGenerationResponse:
        """Ends other calls on this server normally, with finish reason `cancelled`."""
        request = generation_pb2.CancelGenerationRequest(request_ids=request_ids)
        answer: generation_pb2.CancelGenerationResponse = await self._unary(
            self._generation().CancelGeneration, request, SHORT_TIMEOUT_SECONDS
        )
        return answer

    async def tokenize(self, prompt: str | Sequence[Message], *, include_offsets: bool = False) -> Tokens:
        """Template and tokenizer without the model."""
        request = build_tokenize(prompt, include_offsets)
        return read_tokens(await self._unary(self._generation().Tokenize, request, SHORT_TIMEOUT_SECONDS))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids back to text."""
        request = generation_pb2.DetokenizeRequest(
            token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        answer: generation_pb2.DetokenizeResponse = await self._unary(
            self._generation().Detokenize, request, SHORT_TIMEOUT_SECONDS
        )
        return answer.text

    # server

    async def server_info(self) -> server_pb2.GetServerInfoResponse:
        """Version, limits, features and workers."""
        answer: server_pb2.GetServerInfoResponse = await self._unary(
            self._server().GetServerInfo, server_pb2.GetServerInfoRequest(), SHORT_TIMEOUT_SECONDS
        )
        return answer

    async def models(self) -> Sequence[server_pb2.Model]:
        """Served models (the first 50)."""
        answer: server_pb2.ListModelsResponse = await self._unary(
            self._server().ListModels, server_pb2.ListModelsRequest(), SHORT_TIMEOUT_SECONDS
        )
        return answer.models

    async def load(self) -> server_pb2.Load:
        """How busy the server is right now."""
        answer: server_pb2.GetLoadResponse = await self._unary(
            self._server().GetLoad, server_pb2.GetLoadRequest(), SHORT_TIMEOUT_SECONDS
        )
        return answer.load

    async def watch_load(
        self, *, interval_seconds: float = 1.0, reconnect_seconds: float = 0.0
    ) -> AsyncGenerator[server_pb2.Load, None]:
        """The load as the server pushes it; connects again after a loss, as `watch_pages` does.
        Wrap it in `contextlib.aclosing` where the loop may be left early.
        """
        request = server_pb2.WatchLoadRequest(interval=duration(interval_seconds))
        reconnect = Reconnect(reconnect_seconds, time.monotonic)
        while True:
            call = self._server().WatchLoad(
                request, timeout=WATCH_TIMEOUT_SECONDS, metadata=self._target.metadata()
            )
            failure: KvatlasError = Unavailable("the server ended the watch", code="UNAVAILABLE")
            try:
                async for message in call:
                    reconnect.succeeded()
                    yield message.load
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.address)
            finally:
                call.cancel()
            await asyncio.sleep(reconnect.wait_seconds(failure))

    # cache

    async def page_pool(self, worker_id: str = "") -> cache_pb2.GetPagePoolResponse:
        """Geometry and totals of a worker's pool."""
        request = cache_pb2.GetPagePoolRequest(worker_id=worker_id)
        answer: cache_pb2.GetPagePoolResponse = await self._unary(
            self._cache().GetPagePool, request, SHORT_TIMEOUT_SECONDS
        )
        return answer

    async def page(
        self, page_id: int, *, worker_id: str = "", event_limit: int = 20
    ) -> cache_pb2.GetPageResponse:
        """One page in words."""
        request = cache_pb2.GetPageRequest(worker_id=worker_id, page_id=page_id, event_limit=event_limit)
        answer: cache_pb2.GetPageResponse = await self._unary(
            self._cache().GetPage, request, SHORT_TIMEOUT_SECONDS
        )
        return answer

    async def sequences(
        self, worker_id: str = "", *, max_results: int = 1000
    ) -> cache_pb2.ListSequencesResponse:
        """The live sequences with their pages, oldest first."""
        request = cache_pb2.ListSequencesRequest(worker_id=worker_id, max_results=max_results)
        answer: cache_pb2.ListSequencesResponse = await self._unary(
            self._cache().ListSequences, request, SHORT_TIMEOUT_SECONDS
        )
        return answer

    async def check_integrity(self, worker_id: str = "") -> cache_pb2.RunIntegrityCheckResponse:
        """Checks every page and row of a worker once, between its steps; needs the `admin` scope."""
        request = cache_pb2.RunIntegrityCheckRequest(worker_id=worker_id)
        answer: cache_pb2.RunIntegrityCheckResponse = await self._unary(
            self._cache().RunIntegrityCheck, request, LONG_TIMEOUT_SECONDS
        )
        return answer

    async def watch_pages(
        self,
        worker_id: str = "",
        *,
        interval_seconds: float = 0.1,
        planes: Sequence[str] = (),
        reconnect_seconds: float = 0.0,
    ) -> AsyncGenerator["PageMap", None]:
        """The worker's page map, again after each change; always the same object, brought up to date.

        After a loss it connects again, for `reconnect_seconds` at most, and goes on where it stood.
        Wrap it in `contextlib.aclosing` where the loop may be left early.
        """
        from kvatlas.client.page_map import PageMap

        page_map = PageMap()
        options = WatchOptions(worker_id, interval_seconds, tuple(planes))
        reconnect = Reconnect(reconnect_seconds, time.monotonic)
        while True:
            call = self._cache().WatchPageMap(
                watch_request(options, page_map),
                timeout=options.timeout_seconds,
                metadata=self._target.metadata(),
            )
            failure: KvatlasError = Unavailable("the server ended the watch", code="UNAVAILABLE")
            try:
                async for message in call:
                    reconnect.succeeded()
                    if page_map.apply(message):
                        yield page_map
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.address)
            finally:
                call.cancel()
            await asyncio.sleep(reconnect.wait_seconds(failure))

    async def page_map(self, worker_id: str = "") -> "PageMap":
        """The page map with its sequences, once."""
        async with aclosing(self.watch_pages(worker_id)) as watch:
            return await anext(watch)

    # life

    async def close(self) -> None:
        """Ends all calls and closes the channels."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _channel(self, service_config: Mapping[str, Any]) -> grpc.aio.Channel:
        """One per service config, opened on first use."""
        key = id(service_config)
        if key not in self._channels:
            self._channels[key] = self._target.open(grpc.aio, service_config)
        return self._channels[key]

    def _open_stream(self, request: generation_pb2.StreamGenerateRequest, timeout_seconds: float) -> Any:
        metadata = self._target.metadata()
        return self._generation().StreamGenerate(request, timeout=timeout_seconds, metadata=metadata)

    def _generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self._channel(SERVICE_CONFIG))  # type: ignore[no-untyped-call]

    def _cache(self) -> Any:
        return cache_pb2_grpc.CacheServiceStub(self._channel(CACHE_SERVICE_CONFIG))  # type: ignore[no-untyped-call]

    def _server(self) -> Any:
        return server_pb2_grpc.ServerServiceStub(self._channel(INFO_SERVICE_CONFIG))  # type: ignore[no-untyped-call]

    async def _unary(self, method: Callable[..., Any], request: Any, timeout_seconds: float | None) -> Any:
        try:
            return await method(
                request, timeout=timeout_seconds or self._timeout, metadata=self._target.metadata()
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None
