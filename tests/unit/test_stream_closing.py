"""Closing a stream or its client ends what reads and what waits, and cancels no task of the caller."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest

from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import Cancelled, Incomplete, KvatlasError
from kvatlas.client.events import Event, Started, Summary
from kvatlas.client.resume import Course
from kvatlas.client.sync import Client
from kvatlas.client.token_stream import AsyncTokenStream, TokenStream
from kvatlas.v1 import generation_pb2 as pb
from tests.losing_server import (
    NUM_TOKENS,
    SUMMARY,
    LosingServer,
    delta,
    finished,
    served,
    started,
    stream_request,
)


class PatientCourse(Course):
    """After a loss it would wait for a minute."""

    def wait_seconds(self, failure: KvatlasError) -> float:
        super().wait_seconds(failure)
        return 60.0


class Lost(grpc.RpcError):
    """The connection died."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "gone"


class ScriptedCall:
    """A call in progress, blocking or not: its messages, then its end."""

    def __init__(self, messages: Sequence[pb.StreamGenerateResponse], *, is_lost: bool) -> None:
        self._messages = self._all(messages, is_lost=is_lost)
        self.is_cancelled = False

    def _all(
        self, messages: Sequence[pb.StreamGenerateResponse], *, is_lost: bool
    ) -> Iterator[pb.StreamGenerateResponse]:
        yield from messages
        if is_lost:
            raise Lost()

    def __iter__(self) -> Iterator[pb.StreamGenerateResponse]:
        return self._messages

    async def read(self) -> object:
        return next(self._messages, grpc.aio.EOF)

    def cancel(self) -> None:
        self.is_cancelled = True


class QuickCourse(Course):
    """Goes on at once."""

    def wait_seconds(self, failure: KvatlasError) -> float:
        super().wait_seconds(failure)
        return 0.0


Read = Callable[[Course, Sequence[ScriptedCall]], list[Event | None]]


def read_blocking(course: Course, calls: Sequence[ScriptedCall]) -> list[Event | None]:
    left = iter(calls)
    stream = TokenStream(course, lambda request, seconds: next(left), "somewhere:1")
    return [*stream, *stream]  # once more behind its end


def read_waiting(course: Course, calls: Sequence[ScriptedCall]) -> list[Event | None]:
    async def main() -> list[Event | None]:
        left = iter(calls)
        stream = AsyncTokenStream(course, lambda request, seconds: next(left), "somewhere:1")
        return [event async for event in stream] + [event async for event in stream]

    return asyncio.run(main())


@pytest.fixture(params=[read_blocking, read_waiting])
def read(request: pytest.FixtureRequest) -> Read:
    made: Read = request.param
    return made


BEGIN = [started(stream_request(), 5), delta(5, 0, 0, 3, ids=True), delta(5, 0, 3, 6, ids=True)]
END = [delta(5, 0, 6, NUM_TOKENS, ids=True), finished(0), SUMMARY]


def test_what_a_second_call_says_again_is_nothing_for_the_reader(read: Read) -> None:
    course = QuickCourse(stream_request(), timeout_seconds=300.0)
    calls = [ScriptedCall(BEGIN, is_lost=True), ScriptedCall([*BEGIN, *END], is_lost=False)]
    events = read(course, calls)
    assert [type(event).__name__ for event in events] == [
        *("Started", "Delta", "Delta", "Delta", "Finished", "Summary")
    ]


def test_a_loss_behind_the_summary_takes_nothing_away(read: Read) -> None:
    course = QuickCourse(stream_request(), timeout_seconds=300.0)
    events = read(course, [ScriptedCall([*BEGIN, *END], is_lost=True)])
    assert isinstance(events[-1], Summary)


def test_a_stream_against_its_rules_is_ended_at_once(read: Read) -> None:
    """Nobody reads on: the server would go on to compute."""
    call = ScriptedCall([BEGIN[0], BEGIN[2], *END], is_lost=False)
    with pytest.raises(Incomplete, match="number 0, number 3 came") as raised:
        read(QuickCourse(stream_request(), timeout_seconds=300.0), [call])
    assert call.is_cancelled, "not when the stream goes with its traceback"
    del raised
    late = ScriptedCall([*BEGIN, *END, END[0]], is_lost=False)
    with pytest.raises(Incomplete, match="after the summary"):
        read(QuickCourse(stream_request(), timeout_seconds=300.0), [late])
    with pytest.raises(Incomplete, match="without its summary"):
        read(QuickCourse(stream_request(), timeout_seconds=300.0), [ScriptedCall(BEGIN, is_lost=False)])


def test_text_is_that_of_one_sample() -> None:
    both = [started(stream_request(), 5), delta(5, 1, 0, 6, ids=True), delta(5, 0, 0, 6, ids=True)]
    course = QuickCourse(stream_request(), timeout_seconds=300.0)
    blocking = TokenStream(course, lambda *_: ScriptedCall([*both, SUMMARY], is_lost=False), "somewhere:1")
    assert list(blocking.text(1)) == [both[1].delta.text]

    async def main() -> list[str]:
        course = QuickCourse(stream_request(), timeout_seconds=300.0)
        call = ScriptedCall([*both, SUMMARY], is_lost=False)
        stream = AsyncTokenStream(course, lambda *_: call, "somewhere:1")
        return [text async for text in stream.text()]

    assert asyncio.run(main()) == [both[2].delta.text]


def test_a_stream_that_is_left_or_dropped_ends_its_call() -> None:
    calls = [ScriptedCall(BEGIN, is_lost=False) for _ in range(4)]
    course = QuickCourse(stream_request(), timeout_seconds=300.0)
    with TokenStream(course, lambda *_: calls[0], "somewhere:1") as stream:
        next(stream)
    assert calls[0].is_cancelled
    dropped = TokenStream(course, lambda *_: calls[1], "somewhere:1")
    assert not calls[1].is_cancelled
    del dropped
    assert calls[1].is_cancelled

    async def main() -> None:
        async with AsyncTokenStream(course, lambda *_: calls[2], "somewhere:1") as stream:
            await anext(stream)
        assert calls[2].is_cancelled
        dropped = AsyncTokenStream(course, lambda *_: calls[3], "somewhere:1")
        assert not calls[3].is_cancelled
        del dropped

    asyncio.run(main())
    assert calls[3].is_cancelled


@pytest.mark.parametrize("kind", [TokenStream, AsyncTokenStream])
def test_a_call_that_cannot_begin_raises_what_it_raised(kind: type[TokenStream | AsyncTokenStream]) -> None:
    def refuse(*_: object) -> None:
        raise Cancelled("no")

    course = QuickCourse(stream_request(), timeout_seconds=300.0)

    async def main() -> None:
        with pytest.raises(Cancelled, match="no"):
            kind(course, refuse, "somewhere:1")

    asyncio.run(main())


def test_a_stream_closed_while_it_begins_another_call_ends_that_too() -> None:
    calls = [ScriptedCall(BEGIN, is_lost=True), ScriptedCall([*BEGIN, *END], is_lost=False)]

    def open_call(*_: object) -> ScriptedCall:
        if len(calls) == 1:
            stream.close()  # as on another thread
        return calls.pop(0)

    last = calls[1]
    stream = TokenStream(QuickCourse(stream_request(), timeout_seconds=300.0), open_call, "somewhere:1")
    list(stream)
    assert last.is_cancelled


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
        assert len(server.requests) == 1, "none is begun for nobody"
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
        assert len(server.requests) == 1
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
