"""The events of one generation, blocking and with asyncio: the same class twice, line by line.

Owns the call in progress, and ends it whatever way the reader leaves. What a message means and whether a lost
call is made again is decided in resume.py.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc

from kvatlas.client.errors import Cancelled, KvatlasError, from_rpc_error
from kvatlas.client.events import Delta, Event
from kvatlas.client.resume import Course
from kvatlas.v1 import generation_pb2

OpenCall = Callable[[generation_pb2.StreamGenerateRequest, float], Any]
"""Begins StreamGenerate with a deadline in seconds."""


class TokenStream:
    """Events of one generation, in the order of StreamGenerate. Iterate it once.

    Goes on in another call when the server is lost (`resumes` counts how often): see resume.py. Whoever reads
    or waits while another thread closes it gets Cancelled.
    """

    def __init__(self, course: Course, open_call: OpenCall, address: str) -> None:
        self._is_closed = threading.Event()
        self._course = course
        self._open_call = open_call
        self._address = address
        self._call = open_call(*course.next_call())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while True:
            try:
                for message in self._call:
                    event = self._course.take(message)
                    if event is not None:
                        return event
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self._address)
            except BaseException:  # an interrupt, or an event out of order: nothing of the call may go on
                self.close()
                raise
            else:
                self._course.end()
                raise StopIteration
            if self._course.is_complete:
                raise StopIteration
            self._begin_again(failure)

    @property
    def resumes(self) -> int:
        """How often another server, or the same one restarted, has taken over. Beside `usage.resumes`."""
        return self._course.resumes

    def _begin_again(self, failure: KvatlasError) -> None:
        if self._is_closed.is_set():
            raise _closed() from None
        if self._is_closed.wait(self._course.wait_seconds(failure)):
            raise _closed() from None
        self._call = self._open_call(*self._course.next_call())
        if self._is_closed.is_set():  # meanwhile, on another thread
            self._call.cancel()

    def text(self, index: int = 0) -> Iterator[str]:
        """Only the pieces of text of one choice."""
        return (event.text for event in self if isinstance(event, Delta) and event.index == index)

    def close(self) -> None:
        """Cancels what is not finished; harmless after the end."""
        self._is_closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()


class AsyncTokenStream:
    """Events of one generation, in the order of StreamGenerate. Iterate it once.

    Goes on in another call when the server is lost (`resumes` counts how often): see resume.py. Whoever reads
    or waits while another task closes it gets Cancelled.
    """

    def __init__(self, course: Course, open_call: OpenCall, address: str) -> None:
        self._is_closed = asyncio.Event()
        self._course = course
        self._open_call = open_call
        self._address = address
        self._call = open_call(*course.next_call())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            try:
                while (message := await self._call.read()) is not grpc.aio.EOF:
                    event = self._course.take(message)
                    if event is not None:
                        return event
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self._address)
            except asyncio.CancelledError:  # gRPC raises it for a call that was cancelled, too
                self.close()
                if is_being_cancelled():
                    raise
                raise _closed() from None
            except BaseException:  # an event out of order, or whatever else: raised again, and the call ends
                self.close()
                raise
            else:
                self._course.end()
                raise StopAsyncIteration
            if self._course.is_complete:
                raise StopAsyncIteration
            await self._begin_again(failure)

    @property
    def resumes(self) -> int:
        """How often another server, or the same one restarted, has taken over. Beside `usage.resumes`."""
        return self._course.resumes

    async def _begin_again(self, failure: KvatlasError) -> None:
        if self._is_closed.is_set():
            raise _closed() from None
        seconds = self._course.wait_seconds(failure)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_closed.wait(), seconds)
            raise _closed() from None
        self._call = self._open_call(*self._course.next_call())

    async def text(self, index: int = 0) -> AsyncIterator[str]:
        """Only the pieces of text of one choice."""
        async for event in self:
            if isinstance(event, Delta) and event.index == index:
                yield event.text

    def close(self) -> None:
        """Cancels what is not finished; harmless after the end. Does not wait."""
        self._is_closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()


def _closed() -> Cancelled:
    return Cancelled("the stream was closed", code="CANCELLED")


def is_being_cancelled() -> bool:
    """Whether somebody cancels the task that reads, not only the call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
