"""What the interceptors share: a handler of any of the four kinds, run inside a scope of ours.

Owns nothing. Wrapped handlers are kept by method, since interception happens on every call.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc

from service.writing import write

Behaviour = Callable[[Any, Any], Any]  # (request or request iterator, context): coroutine or async generator
Around = Callable[[Behaviour, Any, Any], Awaitable[Any]]  # runs the behaviour; its result is the response


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler of one server once. Subclasses say which, and what goes around."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of this method, wrapped."""
        method: str = handler_call_details.method
        known = self._wrapped.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return self.unknown_method()
        wrapped = self._wrapped[method] = self.wrap(method, handler)
        return wrapped

    def wrap(self, method: str, handler: Any) -> Any:
        """The handler that is called instead."""
        raise NotImplementedError

    def unknown_method(self) -> Any:
        """What answers a method that does not exist; None: gRPC's core does."""
        return None


def rewrapped(handler: Any, around: Around, deserializer: Callable[[bytes], Any] | None = None) -> Any:
    """The same kind of handler with `around` around its behaviour."""
    streams = (handler.request_streaming, handler.response_streaming)
    inner, make = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }[streams]
    behaviour = _written(inner) if handler.response_streaming else inner

    async def call(request: Any, context: Any) -> Any:
        return await around(behaviour, request, context)

    return make(
        call,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _written(inner: Behaviour) -> Behaviour:
    """A response stream as a coroutine that writes, whichever way the handler was made."""

    async def write_all(request: Any, context: Any) -> None:
        outcome = inner(request, context)
        if hasattr(outcome, "__aiter__"):
            async for response in outcome:
                await write(context, response)
        else:
            await outcome

    return write_all


def metadata_values(context: Any, keys: Collection[str]) -> list[str]:
    """Text values of the call's metadata, the first of each key; empty where there is none.

    All at once: gRPC makes the whole of it anew each time it is asked for.
    """
    found: dict[str, Any] = {}
    for name, value in context.invocation_metadata() or ():
        if name in keys:
            found.setdefault(name, value)
    values = (found.get(key, "") for key in keys)
    return [value if isinstance(value, str) else "" for value in values]
