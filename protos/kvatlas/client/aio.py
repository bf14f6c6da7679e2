"""The asyncio client: the same names as the blocking one.

    async with AsyncClient("127.0.0.1:50051") as client:
        async with client.stream("The sky is", max_tokens=8) as stream:
            async for event in stream:
                ...

One event loop per process. A stream that is left early is cancelled: leave the `async with` block,
call `close()`, or drop the stream. gRPC itself would let an abandoned call run on (grpc/grpc#43462).
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from kvatlas.client import calls, watch
from kvatlas.client.channel import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_SECONDS, LONG_TIMEOUT_SECONDS
from kvatlas.client.connection import GENERATION, Connection, client_closed
from kvatlas.client.credentials import Credentials
from kvatlas.client.errors import from_rpc_error
from kvatlas.client.events import Generation, Tokens
from kvatlas.client.request import Message, Options, Prompt, build_stream
from kvatlas.client.resume import DEFAULT_RESUME_SECONDS, Course
from kvatlas.client.token_stream import AsyncTokenStream, is_being_cancelled
from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2

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
        self._connection = Connection(grpc.aio, address, credentials)
        self.address = self._connection.address
        self._timeout = timeout_seconds
        self._resume_seconds = resume_seconds

    # generation

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer. Retried by gRPC while no server took it."""
        return await self._ask(calls.generate(prompt, options), timeout_seconds)

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
        open_call = partial(self._open_stream, life=self._connection.life)
        return AsyncTokenStream(course, open_call, self.address)

    async def chat(
        self, messages: Sequence[Message], *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """`generate` for chat turns; `stream` takes them as well."""
        return await self.generate(messages, timeout_seconds=timeout_seconds, **options)

    async def cancel(self, request_ids: Sequence[str]) -> generation_pb2.CancelGenerationResponse:
        """Ends other calls on this server normally, with finish reason `cancelled`."""
        return await self._ask(calls.cancel(request_ids))

    async def tokenize(self, prompt: str | Sequence[Message], *, include_offsets: bool = False) -> Tokens:
        """Template and tokenizer without the model."""
        return await self._ask(calls.tokenize(prompt, include_offsets))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids back to text."""
        return await self._ask(calls.detokenize(token_ids, skip_special_tokens))

    # server

    async def server_info(self) -> server_pb2.GetServerInfoResponse:
        """Version, limits, features and workers."""
        return await self._ask(calls.server_info())

    async def models(self) -> Sequence[server_pb2.Model]:
        """Served models (the first 50)."""
        return await self._ask(calls.models())

    async def load(self) -> server_pb2.Load:
        """How busy the server is right now."""
        return await self._ask(calls.load())

    def watch_load(
        self, *, interval_seconds: float = 1.0, reconnect_seconds: float = 0.0
    ) -> AsyncGenerator[server_pb2.Load, None]:
        """The load as the server pushes it; connects again after a loss, as `watch_pages` does.
        Wrap it in `contextlib.aclosing` where the loop may be left early.
        """
        return self._watch(watch.watch_load(interval_seconds, reconnect_seconds))

    # cache

    async def page_pool(self, worker_id: str = "") -> cache_pb2.GetPagePoolResponse:
        """Geometry and totals of a worker's pool."""
        return await self._ask(calls.page_pool(worker_id))

    async def page(
        self, page_id: int, *, worker_id: str = "", event_limit: int = 20
    ) -> cache_pb2.GetPageResponse:
        """One page in words."""
        return await self._ask(calls.page(worker_id, page_id, event_limit))

    async def sequences(
        self, worker_id: str = "", *, max_results: int = 1000
    ) -> cache_pb2.ListSequencesResponse:
        """The live sequences with their pages, oldest first."""
        return await self._ask(calls.sequences(worker_id, max_results))

    async def check_integrity(self, worker_id: str = "") -> cache_pb2.RunIntegrityCheckResponse:
        """Checks every page and row of a worker once, between its steps; needs the `admin` scope."""
        return await self._ask(calls.check_integrity(worker_id))

    def watch_pages(
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
        return self._watch(watch.watch_pages(worker_id, interval_seconds, planes, reconnect_seconds))

    async def page_map(self, worker_id: str = "") -> "PageMap":
        """The page map with its sequences, once."""
        limit = min(self._timeout, LONG_TIMEOUT_SECONDS)
        async with aclosing(self._watch(watch.look_at_pages(worker_id, limit))) as maps:
            return await anext(maps)

    # life

    async def close(self) -> None:
        """Ends all calls and closes the channels."""
        for channel in self._connection.take_channels():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_stream(
        self, request: generation_pb2.StreamGenerateRequest, timeout_seconds: float, life: int | None = None
    ) -> Any:
        return self._connection.begin(GENERATION, "StreamGenerate", request, timeout_seconds, life)

    async def _ask(
        self, call: calls.Call[calls.Answer], timeout_seconds: float | None = None
    ) -> calls.Answer:
        limit = min(call.limit_seconds, timeout_seconds or self._timeout)
        try:
            answer = await self._connection.begin(call.service, call.method, call.request, limit)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise client_closed() from None
        return call.read(answer)

    async def _watch(self, what: watch.Watch[watch.State]) -> AsyncGenerator[watch.State, None]:
        life = self._connection.life
        while True:
            request, failure = what.request(), watch.ended()
            call = self._connection.begin(what.service, what.method, request, what.timeout_seconds, life)
            try:
                async for message in call:
                    if (state := what.take(message)) is not None:
                        yield state
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.address)
            except asyncio.CancelledError:
                if is_being_cancelled():
                    raise
                raise client_closed() from None
            finally:
                call.cancel()
            await asyncio.sleep(what.reconnect.wait_seconds(failure))
