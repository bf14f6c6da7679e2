"""What is sent and fails: because the client has left, or otherwise."""

import asyncio

import grpc
import pytest

from service import errors, writing
from service.guard import Guard
from service.request import Call, current_call


class Context:
    """A call whose client is gone: core fails the write, and cancels the call a little later, or never."""

    def __init__(self, *, is_cancelled: bool) -> None:
        self._is_cancelled = is_cancelled

    def time_remaining(self) -> None:
        return None

    async def abort_with_status(self, status: object) -> None:
        await self.write("")

    async def write(self, message: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._is_cancelled:
            asyncio.get_running_loop().call_later(0.01, task.cancel)
        raise grpc.aio.InternalError("execute_batch")


def test_a_client_that_left_during_a_write_is_a_cancel_and_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LEFT_SECONDS", 600.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(writing.write(Context(is_cancelled=True), "x"))


def test_a_write_that_fails_without_a_cancel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LEFT_SECONDS", 0.01)
    with pytest.raises(grpc.aio.InternalError):
        asyncio.run(writing.write(Context(is_cancelled=False), "x"))


def test_a_client_that_left_before_its_refusal_is_a_cancel() -> None:
    async def refuse(request: object, context: object) -> None:
        raise errors.not_ready()

    async def work() -> None:
        current_call.set(Call("/kvatlas.v1.CacheService/GetPage"))
        handler = Guard(default_deadline=600, max_deadline=600).wrap(
            "/kvatlas.v1.CacheService/GetPage", grpc.unary_unary_rpc_method_handler(refuse)
        )
        await handler.unary_unary(object(), Context(is_cancelled=False))  # none comes behind a status

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
