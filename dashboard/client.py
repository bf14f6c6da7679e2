"""The service as the dashboard sees it: one channel per kind of call, protobuf in, frozen values out.

Owns channels, the token and the reading of messages; changes nothing on the server but by `stream` and
`run_integrity_check`. Everything raises kvatlas.client.errors.KvatlasError.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Unpack

import grpc

from dashboard import readings
from dashboard.facts import (
    CheckRun,
    EstimateReport,
    IntegrityFacts,
    PageFacts,
    ServerFacts,
    TableRow,
    TokenizedPrompt,
    WorkerLoad,
)
from kvatlas.client.channel import (
    CACHE_SERVICE_CONFIG,
    INFO_SERVICE_CONFIG,
    SERVICE_CONFIG,
    SHORT_TIMEOUT_SECONDS,
    channel_options,
    direct_options,
)
from kvatlas.client.errors import DeadlineExceeded, PermissionDenied, from_rpc_error
from kvatlas.client.events import Event
from kvatlas.client.request import Message, Options, build_stream, build_tokenize, duration
from kvatlas.client.resume import Course
from kvatlas.client.token_stream import TokenStream
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import (
    cache_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)

WATCH_INTERVAL_SECONDS = 0.05
HEARTBEAT_SECONDS = 1.0
WATCH_TIMEOUT_SECONDS = 1800.0
"""Of one connection; the subscriber opens the next."""
ESTIMATE_TIMEOUT_SECONDS = 60.0
STREAM_TIMEOUT_SECONDS = 600.0

Prompt = str | Sequence[Message]


class Watch(Protocol):
    """Messages of one connection, until `cancel` from any thread."""

    def __iter__(self) -> Iterator[pb.WatchPageMapResponse]:
        """In revision order; KvatlasError when the connection ends."""
        ...

    def cancel(self) -> None:
        """Ends it; harmless after the end."""
        ...


class AnswerStream(Protocol):
    """Events of one generation, in the order of StreamGenerate."""

    def __iter__(self) -> Iterator[Event]:
        """Once; KvatlasError when the server ends it."""
        ...

    def close(self) -> None:
        """Cancels what is not finished."""
        ...


class Source(Protocol):
    """Where pages come from: a service, or a simulated pool."""

    @property
    def address(self) -> str:
        """For people."""
        ...

    def watch(self, worker_id: str, resume_after: pb.Revision | None) -> Watch:
        """Snapshot and changes of a worker's page map, STATE mode."""
        ...

    def server(self) -> ServerFacts:
        """Version, features, workers."""
        ...

    def load(self) -> Sequence[WorkerLoad]:
        """How busy the workers are."""
        ...

    def page(self, worker_id: str, page_id: int) -> PageFacts:
        """One page with its last 20 events."""
        ...

    def table_rows(self, worker_id: str, rows: Sequence[int], *, from_device: bool) -> Sequence[TableRow]:
        """Rows of the page table; `from_device` needs the `admin` scope."""
        ...

    def estimate(
        self, worker_id: str, page_sizes: Sequence[int], policies: Sequence[str], window_seconds: float
    ) -> EstimateReport:
        """Hit rates of other settings."""
        ...

    def integrity(self, worker_id: str) -> IntegrityFacts:
        """What the live audit found."""
        ...

    def run_integrity_check(self, worker_id: str) -> CheckRun:
        """Checks everything once; needs the `admin` scope."""
        ...

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A prompt cut into tokens."""
        ...

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AnswerStream:
        """An answer as it comes."""
        ...

    def close(self) -> None:
        """Ends all calls."""
        ...


class _Call:
    """A watch on a channel."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    def __iter__(self) -> Iterator[pb.WatchPageMapResponse]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from None
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        self._call.cancel()


class ServiceSource:
    """A service by its address. Thread-safe. `read_token` is asked at each call: a new one counts at once.

    `server_ca`, PEM: TLS; empty: plaintext. `identity`: this client's key and certificates, PEM, for mTLS.
    """

    def __init__(
        self,
        address: str,
        read_token: Callable[[], str] = str,
        server_ca: bytes = b"",
        identity: tuple[bytes, bytes] | None = None,
    ) -> None:
        key, chain = identity or (None, None)
        self._tls = grpc.ssl_channel_credentials(server_ca, key, chain) if server_ca else None
        self._address = address
        self._read_token = read_token
        self._channels: dict[int, grpc.Channel] = {}
        self._lock = threading.Lock()  # of the table above

    @property
    def address(self) -> str:
        """Of the service."""
        return self._address

    # looking

    def watch(self, worker_id: str, resume_after: pb.Revision | None) -> Watch:
        """One connection of WatchPageMap."""
        request = pb.WatchPageMapRequest(
            worker_id=worker_id,
            mode=pb.WATCH_MODE_STATE,
            min_interval=duration(WATCH_INTERVAL_SECONDS),
            heartbeat_interval=duration(HEARTBEAT_SECONDS),
            resume_after=resume_after,
        )
        call = self._cache().WatchPageMap(request, timeout=WATCH_TIMEOUT_SECONDS, metadata=self._metadata())
        return _Call(call, self._address)

    def server(self) -> ServerFacts:
        """Version, features, workers."""
        request = server_pb2.GetServerInfoRequest()
        return readings.server(self._unary(self._server().GetServerInfo, request))

    def load(self) -> Sequence[WorkerLoad]:
        """How busy the workers are."""
        answer = self._unary(self._server().GetLoad, server_pb2.GetLoadRequest())
        return [readings.worker_load(each) for each in answer.load.workers]

    def page(self, worker_id: str, page_id: int) -> PageFacts:
        """One page with its last 20 events."""
        request = pb.GetPageRequest(worker_id=worker_id, page_id=page_id, event_limit=20)
        return readings.page(page_id, self._unary(self._cache().GetPage, request))

    def table_rows(self, worker_id: str, rows: Sequence[int], *, from_device: bool) -> Sequence[TableRow]:
        """Rows of the page table."""
        request = pb.GetPageTableRequest(worker_id=worker_id, rows=rows, from_device=from_device)
        call = self._cache().GetPageTable(request, timeout=SHORT_TIMEOUT_SECONDS, metadata=self._metadata())
        try:
            return [readings.table_row(row) for row in call]
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from None
        finally:
            call.cancel()

    def estimate(
        self, worker_id: str, page_sizes: Sequence[int], policies: Sequence[str], window_seconds: float
    ) -> EstimateReport:
        """Hit rates of other settings."""
        request = pb.EstimateCacheRequest(
            worker_id=worker_id, page_sizes=page_sizes, eviction_policies=policies
        )
        if window_seconds:
            request.window.CopyFrom(duration(window_seconds))
        answer = self._unary(self._cache().EstimateCache, request, ESTIMATE_TIMEOUT_SECONDS)
        return readings.estimate_report(answer)

    def integrity(self, worker_id: str) -> IntegrityFacts:
        """What the live audit found."""
        request = pb.GetIntegrityRequest(worker_id=worker_id)
        return readings.integrity(self._unary(self._cache().GetIntegrity, request))

    def run_integrity_check(self, worker_id: str) -> CheckRun:
        """Checks everything once."""
        request = pb.RunIntegrityCheckRequest(worker_id=worker_id)
        answer = self._unary(self._cache().RunIntegrityCheck, request, ESTIMATE_TIMEOUT_SECONDS)
        return readings.check_run(answer)

    # the playground

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A prompt cut into tokens."""
        request = build_tokenize(prompt, True)
        return readings.tokenized(self._unary(self._generation().Tokenize, request))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AnswerStream:
        """An answer as it comes."""
        course = Course(build_stream(prompt, options, True, 0), timeout_seconds=STREAM_TIMEOUT_SECONDS)
        return TokenStream(course, self._open_stream, self._address)

    def _open_stream(self, request: generation_pb2.StreamGenerateRequest, timeout_seconds: float) -> Any:
        stub = self._generation()
        return stub.StreamGenerate(request, timeout=timeout_seconds, metadata=self._metadata())

    # life

    def close(self) -> None:
        """Ends all calls and closes the channels."""
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _channel(self, service_config: Mapping[str, Any]) -> grpc.Channel:
        # Core waits up to two minutes before it tries a lost server again; people watch the screen.
        patience = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000)]
        with self._lock:
            key = id(service_config)
            if key not in self._channels:
                options = [*channel_options(service_config), *direct_options([self._address]), *patience]
                self._channels[key] = (
                    grpc.secure_channel(self._address, self._tls, options)
                    if self._tls is not None
                    else grpc.insecure_channel(self._address, options)
                )
            return self._channels[key]

    def _cache(self) -> Any:
        return cache_pb2_grpc.CacheServiceStub(self._channel(CACHE_SERVICE_CONFIG))  # type: ignore[no-untyped-call]

    def _server(self) -> Any:
        return server_pb2_grpc.ServerServiceStub(self._channel(INFO_SERVICE_CONFIG))  # type: ignore[no-untyped-call]

    def _generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self._channel(SERVICE_CONFIG))  # type: ignore[no-untyped-call]

    def _metadata(self) -> list[tuple[str, str]]:
        try:
            token = self._read_token()
        except (OSError, UnicodeDecodeError) as error:
            raise PermissionDenied(f"the token file cannot be read: {error}") from None
        return [("authorization", f"Bearer {token}")] if token else []

    def _unary(self, method: Any, request: Any, timeout_seconds: float = SHORT_TIMEOUT_SECONDS) -> Any:
        try:
            return method(request, timeout=timeout_seconds, metadata=self._metadata())
        except grpc.RpcError as error:
            failure = from_rpc_error(error, self._address)
            if isinstance(failure, DeadlineExceeded):
                late = f"no answer in {timeout_seconds:g} s: the server is busy, or much was asked of it"
                raise DeadlineExceeded(late, code=failure.code, reason=failure.reason) from None
            raise failure from None
