"""Closing a stream or its client ends what reads and what waits, and cancels no task of the caller."""

import asyncio
import threading

import pytest

from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import Cancelled, KvatlasError
from kvatlas.client.events import Event, Started
from kvatlas.client.resume import Course
from kvatlas.client.sync import Client
from kvatlas.client.token_stream import AsyncTokenStream, TokenStream
from tests.losing_server import NUM_TOKENS, LosingServer, served, stream_request


class PatientCourse(Course):
    """After a loss it would wait for a minute."""

    def wait_seconds(self, failure: KvatlasError) -> float:
        super().wait_seconds(failure)
        return 60.0


@pytest.mark.parametrize("is_lost", [False, True])
def test_closing_a_stream_ends_its_reading_and_its_wait_for_a_server(is_lost: bool) -> None:
    server = LosingServer()
    if is_lost:
        server.lose_after = [1]
    else:
        server.proceed.clear()
    with served(server) as (_, port), Client(f"127.0.0.1:{port}") as client:
        course = PatientCourse(stream_request(), timeout_seconds=300.0)
        stream = TokenStream(course, client._open_stream, client.address)
        assert isinstance(next(stream), Started)
        closer = threading.Timer(0.05, stream.close)
        closer.start()
        with pytest.raises(Cancelled, match="the stream was closed"):
            list(stream)
        with pytest.raises(Cancelled, match="the stream was closed"):
            next(stream)
        closer.join()
        server.proceed.set()


@pytest.mark.parametrize("is_lost", [False, True])
def test_closing_an_async_stream_ends_its_reading_and_its_wait_and_cancels_no_task(is_lost: bool) -> None:
    """gRPC raises CancelledError for a call that was cancelled: the reader's task was not."""
    server = LosingServer()
    if is_lost:
        server.lose_after = [1]
    else:
        server.proceed.clear()

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            course = PatientCourse(stream_request(), timeout_seconds=300.0)
            stream = AsyncTokenStream(course, client._open_stream, address)
            assert isinstance(await anext(stream), Started)
            asyncio.get_running_loop().call_later(0.05, stream.close)
            with pytest.raises(Cancelled, match="the stream was closed"):
                async for _ in stream:
                    pass
            with pytest.raises(Cancelled, match="the stream was closed"):
                await anext(stream)

    with served(server) as (_, port):
        asyncio.run(main(f"127.0.0.1:{port}"))
        server.proceed.set()


def test_closing_a_client_ends_its_streams_and_none_goes_on_in_another_call() -> None:
    """The closed channel looked like a lost server: the stream went on, on a channel that nobody closed."""
    server = LosingServer()
    server.proceed.clear()
    with served(server) as (_, port):
        client = Client(f"127.0.0.1:{port}")
        stream = client.stream("x")
        assert isinstance(next(stream), Started)
        closer = threading.Timer(0.05, client.close)
        closer.start()
        with pytest.raises(Cancelled, match="the client was closed"):
            list(stream)
        closer.join()
        assert len(server.requests) == 1
        server.proceed.set()
        with client.stream("x") as again:  # a client that is closed may be used again
            list(again)
        client.close()


def test_closing_an_async_client_ends_its_streams_and_cancels_no_task() -> None:
    server = LosingServer()
    server.proceed.clear()

    async def main(address: str) -> None:
        client = AsyncClient(address)
        stream = client.stream("x")
        assert isinstance(await anext(stream), Started)
        closing = asyncio.create_task(client.close())
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        await closing

    with served(server) as (_, port):
        asyncio.run(main(f"127.0.0.1:{port}"))
        assert len(server.requests) == 1
        server.proceed.set()


def test_a_task_that_is_cancelled_while_its_stream_is_closed_is_cancelled() -> None:
    server = LosingServer()
    server.proceed.clear()

    async def main(address: str) -> None:
        async with AsyncClient(address) as client, client.stream("x") as stream:
            came: list[Event] = []

            async def read() -> None:
                async for event in stream:
                    came.append(event)

            reader = asyncio.create_task(read())
            async with asyncio.timeout(30):
                while len(came) < 1 + NUM_TOKENS:
                    await asyncio.sleep(0.001)
            stream.close()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    with served(server) as (_, port):
        asyncio.run(main(f"127.0.0.1:{port}"))
        server.proceed.set()
