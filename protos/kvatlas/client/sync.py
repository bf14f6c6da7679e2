"""The blocking client.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The sky is", max_tokens=8).text)
        with client.stream([Message("user", "Hello!")]) as stream:
            for event in stream:
                ...

Every call has a deadline, and every stream that is left early is cancelled: leave the `with` block, call
`close()`, or drop the stream, and its pages go back to the pool. What is asked, and where, is in calls.py,
watch.py and connection.py, which the asyncio client shares; here is how this one waits.
"""

import time
from collections.abc import Generator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from kvatlas.client import calls, watch
from kvatlas.client.channel import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_SECONDS, LONG_TIMEOUT_SECONDS
from kvatlas.client.connection import GENERATION, Connection
from kvatlas.client.credentials import Credentials
from kvatlas.client.errors import from_rpc_error
from kvatlas.client.events import Generation, Tokens
from kvatlas.client.request import Message, Options, Prompt, build_stream
from kvatlas.client.resume import DEFAULT_RESUME_SECONDS, Course
from kvatlas.client.token_stream import TokenStream
from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2

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
        self._connection = Connection(grpc, address, credentials)
        self.address = self._connection.address
        self._timeout = timeout_seconds
        self._resume_seconds = resume_seconds

    # generation

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer. Retried by gRPC while no server took it."""
        return self._ask(calls.generate(prompt, options), timeout_seconds)

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
        open_call = partial(self._open_stream, life=self._connection.life)
        return TokenStream(course, open_call, self.address)

    def chat(
        self, messages: Sequence[Message], *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """`generate` for chat turns; `stream` takes them as well."""
        return self.generate(messages, timeout_seconds=timeout_seconds, **options)

    def cancel(self, request_ids: Sequence[str]) -> generation_pb2.CancelGenerationResponse:
        """Ends other calls on this server normally, with finish reason `cancelled`."""
        return self._ask(calls.cancel(request_ids))

    def tokenize(self, prompt: str | Sequence[Message], *, include_offsets: bool = False) -> Tokens:
        """Template and tokenizer without the model."""
        return self._ask(calls.tokenize(prompt, include_offsets))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids back to text."""
        return self._ask(calls.detokenize(token_ids, skip_special_tokens))

    # server

    def server_info(self) -> server_pb2.GetServerInfoResponse:
        """Version, limits, features and workers."""
        return self._ask(calls.server_info())

    def models(self) -> Sequence[server_pb2.Model]:
        """Served models (the first 50)."""
        return self._ask(calls.models())

    def load(self) -> server_pb2.Load:
        """How busy the server is right now."""
        return self._ask(calls.load())

    def watch_load(
        self, *, interval_seconds: float = 1.0, reconnect_seconds: float = 0.0
    ) -> Generator[server_pb2.Load, None, None]:
        """The load as the server pushes it; connects again after a loss, as `watch_pages` does."""
        return self._watch(watch.watch_load(interval_seconds, reconnect_seconds))

    # cache

    def page_pool(self, worker_id: str = "") -> cache_pb2.GetPagePoolResponse:
        """Geometry and totals of a worker's pool."""
        return self._ask(calls.page_pool(worker_id))

    def page(self, page_id: int, *, worker_id: str = "", event_limit: int = 20) -> cache_pb2.GetPageResponse:
        """One page in words."""
        return self._ask(calls.page(worker_id, page_id, event_limit))

    def sequences(self, worker_id: str = "", *, max_results: int = 1000) -> cache_pb2.ListSequencesResponse:
        """The live sequences with their pages, oldest first."""
        return self._ask(calls.sequences(worker_id, max_results))

    def check_integrity(self, worker_id: str = "") -> cache_pb2.RunIntegrityCheckResponse:
        """Checks every page and row of a worker once, between its steps; needs the `admin` scope."""
        return self._ask(calls.check_integrity(worker_id))

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
        return self._watch(watch.watch_pages(worker_id, interval_seconds, planes, reconnect_seconds))

    def page_map(self, worker_id: str = "") -> "PageMap":
        """The page map with its sequences, once."""
        limit = min(self._timeout, LONG_TIMEOUT_SECONDS)
        maps = self._watch(watch.look_at_pages(worker_id, limit))
        try:
            return next(maps)
        finally:
            maps.close()

    # life

    def close(self) -> None:
        """Ends all calls and closes the channels."""
        for channel in self._connection.take_channels():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_stream(
        self, request: generation_pb2.StreamGenerateRequest, timeout_seconds: float, life: int | None = None
    ) -> Any:
        return self._connection.begin(GENERATION, "StreamGenerate", request, timeout_seconds, life)

    def _ask(self, call: calls.Call[calls.Answer], timeout_seconds: float | None = None) -> calls.Answer:
        limit = min(call.limit_seconds, timeout_seconds or self._timeout)
        try:
            answer = self._connection.begin(call.service, call.method, call.request, limit)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None
        return call.read(answer)

    def _watch(self, what: watch.Watch[watch.State]) -> Generator[watch.State, None, None]:
        life = self._connection.life
        while True:
            request, failure = what.request(), watch.ended()
            call = self._connection.begin(what.service, what.method, request, what.timeout_seconds, life)
            try:
                for message in call:
                    if (state := what.take(message)) is not None:
                        yield state
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.address)
            finally:
                call.cancel()
            time.sleep(what.reconnect.wait_seconds(failure))
