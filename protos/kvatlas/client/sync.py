"""The blocking client.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The sky is", max_tokens=8).text)
        with client.stream([Message("user", "Hello!")]) as stream:
            for event in stream:
                ...

Owns channels and calls. Every call has a deadline, and every stream that is left early is cancelled:
leave the `with` block, call `close()`, or drop the stream, and its pages go back to the pool.
"""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
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
from kvatlas.client.token_stream import TokenStream
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


class Client:
    """A service by its address: `host:port`, `dns:///name:port`, `unix:path`, or several `ip:port`.

    Thread-safe. A stream whose server is lost goes on elsewhere, for `resume_seconds` at most; 0: never.
    Raises CredentialsError and ValueError for what cannot be used as it stands.

    Lists, totals and load are returned as the messages of kvatlas.v1, which are typed; what a program
    works with (answers, events, the page map) has types of its own.
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
        self._channels: dict[int, grpc.Channel] = {}
        self._lock = threading.Lock()  # of the table above

    # generation

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer. Retried by gRPC while no server took it."""
        request = generation_pb2.GenerateRequest(spec=build_spec(prompt, options))
        return read_generation(self._unary(self._generation().Generate, request, timeout_seconds))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_seconds: float | None = None,
        queue_updates: bool = False,
        min_tokens_per_message: int = 0,
        max_hold_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> TokenStream:
        """The answer as it comes. Use it in a `with` block."""
        request = build_stream(prompt, options, queue_updates, min_tokens_per_message, max_hold_seconds)
        timeout = timeout_seconds or self._timeout
        course = Course(request, timeout_seconds=timeout, resume_seconds=self._resume_seconds)
        return TokenStream(course, self._open_stream, self.address)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """`generate` for chat turns; `stream` takes them as well."""
        return self.generate(messages, timeout_seconds=timeout_seconds, **options)

    def cancel(self, request_ids: Sequence[str]) -> generation_pb2.CancelGenerationResponse:
        """Ends other calls on this server normally, with finish reason `cancelled`."""
        request = generation_pb2.CancelGenerationRequest(request_ids=request_ids)
        answer: generation_pb2.CancelGenerationResponse = self._unary(
            self._generation().CancelGeneration, request, SHORT_TIMEOUT_SECONDS
        )
        return answer

    def tokenize(self, prompt: str | Sequence[Message], *, include_offsets: bool = False) -> Tokens:
        """Template and tokenizer without the model."""
        request = build_tokenize(prompt, include_offsets)
        return read_tokens(self._unary(self._generation().Tokenize, request, SHORT_TIMEOUT_SECONDS))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids back to text."""
        request = generation_pb2.DetokenizeRequest(
            token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        answer: generation_pb2.DetokenizeResponse = self._unary(
            self._generation().Detokenize, request, SHORT_TIMEOUT_SECONDS
        )
        return answer.text

    # server

    def server_info(self) -> server_pb2.GetServerInfoResponse:
        """Version, limits, features and workers."""
        answer: server_pb2.GetServerInfoResponse = self._unary(
            self._server().GetServerInfo, server_pb2.GetServerInfoRequest(), SHORT_TIMEOUT_SECONDS
        )
        return answer

    def models(self) -> Sequence[server_pb2.Model]:
        """Served models (the first 50)."""
        answer: server_pb2.ListModelsResponse = self._unary(
            self._server().ListModels, server_pb2.ListModelsRequest(), SHORT_TIMEOUT_SECONDS
        )
        return answer.models

    def load(self) -> server_pb2.Load:
        """How busy the server is right now."""
        answer: server_pb2.GetLoadResponse = self._unary(
            self._server().GetLoad, server_pb2.GetLoadRequest(), SHORT_TIMEOUT_SECONDS
        )
        return answer.load

    def watch_load(
        self, *, interval_seconds: float = 1.0, reconnect_seconds: float = 0.0
    ) -> Generator[server_pb2.Load, None, None]:
        """The load as the server pushes it; connects again after a loss, as `watch_pages` does."""
        request = server_pb2.WatchLoadRequest(interval=duration(interval_seconds))
        reconnect = Reconnect(reconnect_seconds, time.monotonic)
        while True:
            call = self._server().WatchLoad(
                request, timeout=WATCH_TIMEOUT_SECONDS, metadata=self._target.metadata()
            )
            failure: KvatlasError = Unavailable("the server ended the watch", code="UNAVAILABLE")
            try:
                for message in call:
                    reconnect.succeeded()
                    yield message.load
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.address)
            finally:
                call.cancel()
            time.sleep(reconnect.wait_seconds(failure))

    # cache

    def page_pool(self, worker_id: str = "") -> cache_pb2.GetPagePoolResponse:
        """Geometry and totals of a worker's pool."""
        request = cache_pb2.GetPagePoolRequest(worker_id=worker_id)
        answer: cache_pb2.GetPagePoolResponse = self._unary(
            self._cache().GetPagePool, request, SHORT_TIMEOUT_SECONDS
        )
        return answer

    def page(self, page_id: int, *, worker_id: str = "", event_limit: int = 20) -> cache_pb2.GetPageResponse:
        """One page in words."""
        request = cache_pb2.GetPageRequest(worker_id=worker_id, page_id=page_id, event_limit=event_limit)
        answer: cache_pb2.GetPageResponse = self._unary(self._cache().GetPage, request, SHORT_TIMEOUT_SECONDS)
        return answer

    def sequences(self, worker_id: str = "", *, max_results: int = 1000) -> cache_pb2.ListSequencesResponse:
        """The live sequences with their pages, oldest first."""
        request = cache_pb2.ListSequencesRequest(worker_id=worker_id, max_results=max_results)
        answer: cache_pb2.ListSequencesResponse = self._unary(
            self._cache().ListSequences, request, SHORT_TIMEOUT_SECONDS
        )
        return answer

    def check_integrity(self, worker_id: str = "") -> cache_pb2.RunIntegrityCheckResponse:
        """Checks every page and row of a worker once, between its steps; needs the `admin` scope."""
        request = cache_pb2.RunIntegrityCheckRequest(worker_id=worker_id)
        answer: cache_pb2.RunIntegrityCheckResponse = self._unary(
            self._cache().RunIntegrityCheck, request, LONG_TIMEOUT_SECONDS
        )
        return answer

    def watch_pages(
        self,
        worker_id: str = "",
        *,
        interval_seconds: float = 0.1,
        planes: Sequence[str] = (),
        reconnect_seconds: float = 0.0,
    ) -> Generator["PageMap", None, None]:
        """The worker's page map, again after each change; always the same object, brought up to date.

        After a loss it connects again, for `reconnect_seconds` at most, and goes on where it stood.
        Close the iterator, or leave the loop, and the watch is cancelled.
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
                for message in call:
                    reconnect.succeeded()
                    if page_map.apply(message):
                        yield page_map
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.address)
            finally:
                call.cancel()
            time.sleep(reconnect.wait_seconds(failure))

    def page_map(self, worker_id: str = "") -> "PageMap":
        """The page map with its sequences, once."""
        watch = self.watch_pages(worker_id)
        try:
            return next(watch)
        finally:
            watch.close()

    # life

    def close(self) -> None:
        """Ends all calls and closes the channels."""
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _channel(self, service_config: Mapping[str, Any]) -> grpc.Channel:
        """One per service config, opened on first use."""
        key = id(service_config)
        with self._lock:
            if key not in self._channels:
                self._channels[key] = self._target.open(grpc, service_config)
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

    def _unary(self, method: Callable[..., Any], request: Any, timeout_seconds: float | None) -> Any:
        try:
            return method(request, timeout=timeout_seconds or self._timeout, metadata=self._target.metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None
