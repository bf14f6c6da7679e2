"""The inner interceptor: bytes that do not parse, deadlines, exceptions, and checks of the caller.

Owns the last word on every status of ours: handlers raise Failure, nothing else leaves this process as a
text of Python's. What `checks` refuse (credentials, scopes) is refused before the content is looked at: a
message is bytes until then. One of too many fields is refused before protobuf takes it apart (field_count).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc

from service import errors
from service.admission import Admission
from service.errors import Failure
from service.field_count import check_fields
from service.interceptor import Behaviour, Interceptor, rewrapped
from service.request import Call, current_call
from service.writing import abort

log = logging.getLogger("service.guard")
MAX_UNASKED = 1024  # streams of health and reflection at once, of everyone who can connect; as many calls
_PASSED = ("/grpc.health.", "/grpc.reflection.")

Check = Callable[[Call, Any], None]
"""Looks at a call and its context, fills in who calls; raises Failure for those it refuses."""


class _Malformed:
    """What the deserializer gives for bytes that are no such message."""


_MALFORMED = _Malformed()


class Guard(Interceptor):
    """Lets calls of ours in and makes their failures ours."""

    def __init__(self, *, default_deadline: float, max_deadline: float, checks: Sequence[Check] = ()) -> None:
        super().__init__()
        self._default_deadline = default_deadline
        self._max_deadline = max_deadline
        self._checks = checks
        # Apart, so that watches, which end when their clients like, leave every probe its place.
        self._unasked = {is_stream: Admission(MAX_UNASKED) for is_stream in (False, True)}

    def wrap(self, method: str, handler: Any) -> Any:
        """Guards every handler; health and reflection ask nobody who he is, so they are bounded instead."""
        if method.startswith(_PASSED):
            answer = partial(self._answer_anyone, self._unasked[handler.response_streaming])
            return rewrapped(handler, answer, _forgiving(_parser(handler)))
        assert not handler.request_streaming, f"{method}: messages of ours come one a call"
        is_watch = method.rpartition("/")[2].startswith("Watch")
        parse = _parser(handler)

        async def around(inner: Behaviour, data: bytes, context: Any) -> Any:
            return await self._call(inner, partial(parse, data), context, is_watch=is_watch)

        return rewrapped(handler, around, bytes)

    async def _answer_anyone(self, places: Admission, inner: Behaviour, request: Any, context: Any) -> Any:
        permit = places.enter()
        try:
            if permit is None:
                raise errors.watch_limit(MAX_UNASKED)
            if request is _MALFORMED:
                raise errors.malformed_message()
            is_stream = hasattr(request, "__aiter__")
            return await inner(_well_formed(request) if is_stream else request, context)
        except Failure as failure:
            await abort(context, failure.to_status(""))
        finally:
            if permit is not None:
                permit.release()

    async def _call(
        self, inner: Behaviour, request: Callable[[], Any], context: Any, *, is_watch: bool
    ) -> Any:
        call = current_call.get()
        timer = asyncio.timeout(self._set_deadline(call, context, is_watch=is_watch))
        try:
            for check in self._checks:
                check(call, context)
            message = request()
            async with timer:
                return await inner(message, context)
        except Failure as raised:
            failure = raised
        except asyncio.CancelledError:
            if _is_own_cancel():
                raise
            log.warning("event=inner_cancel method=%s request=%s", call.method, call.request_id)
            failure = errors.worker_call_lost()
        except TimeoutError as error:
            failure = errors.deadline_passed() if timer.expired() else _bug(call, error)
        except grpc.aio.AbortError:
            raise
        except NotImplementedError as error:
            if context.code() is not grpc.StatusCode.UNIMPLEMENTED:
                failure = _bug(call, error)
            else:  # a method of the protos that no handler of ours has: generated code has set this
                call.code = grpc.StatusCode.UNIMPLEMENTED.name
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have the method")
        except Exception as error:
            failure = _bug(call, error)
        call.code = failure.status.name
        await abort(context, failure.to_status(call.request_id))

    def _set_deadline(self, call: Call, context: Any, *, is_watch: bool) -> float | None:
        """Seconds after which we end the call ourselves; None: gRPC's core does, at the client's deadline.

        A watch has no natural end, so without a deadline it gets the longest one.
        """
        left = context.time_remaining()
        kept = (self._max_deadline if is_watch else self._default_deadline) if left is None else left
        kept = min(kept, self._max_deadline)
        call.deadline = call.received + kept
        call.deadline_is_ours = left is None or kept < left
        return kept if call.deadline_is_ours else None


def _is_own_cancel() -> bool:
    """Whether it is the call that was cancelled, not something it waited for (grpc/grpc#29248)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _bug(call: Call, error: BaseException) -> Failure:
    log.error("event=bug method=%s request=%s", call.method, call.request_id, exc_info=error)
    return errors.internal()


async def _well_formed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _MALFORMED:
            raise errors.malformed_message()
        yield request


def _parser(handler: Any) -> Callable[[bytes], Any]:
    """What makes a message of its bytes; raises Failure."""
    make = handler.request_deserializer or bytes
    kind = getattr(getattr(make, "__self__", None), "DESCRIPTOR", None)  # of what FromString makes

    def parse(data: bytes) -> Any:
        if kind is not None:
            check_fields(data, kind)
        try:
            return make(data)
        except Exception:
            raise errors.malformed_message() from None

    return parse


def _forgiving(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except Failure:
            return _MALFORMED

    return parse_or_mark
