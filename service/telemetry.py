"""The outer interceptor: call metrics, the Call record, one access log line per call.

Owns what is counted of every call, whoever answers it. A method that does not exist is `other`, so that
a client cannot make series.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import Counter, Histogram

from service.interceptor import Behaviour, Interceptor, metadata_values, rewrapped
from service.metrics import ServiceMetrics
from service.request import Call, current_call, is_deadline_over

log = logging.getLogger("service.access")
_QUIET = ("/grpc.health.", "/grpc.reflection.")
_POLLED = frozenset({"/kvatlas.v1.ServerService/GetServerInfo", "/kvatlas.v1.ServerService/GetLoad"})
"""Asked again and again by dashboards and routers: only a failure is worth a line."""

_TOLD = ("grpc-previous-rpc-attempts", "traceparent", "tracestate")
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class _MethodSeries:
    started: Counter
    handled: dict[str, Counter]  # by status name
    seconds: Histogram
    labels: tuple[str, str, str]


class Telemetry(Interceptor):
    """Counts and logs calls."""

    def __init__(self, metrics: ServiceMetrics, *, access_log: bool = True) -> None:
        super().__init__()
        self._metrics = metrics
        self._access_log = access_log
        self._other = self._series("unary", "other", "other")

    def wrap(self, method: str, handler: Any) -> Any:
        """Counts around the handler."""
        service, _, name = method.strip("/").partition("/")
        series = self._series(_type_of(handler), service, name)

        async def around(inner: Behaviour, request: Any, context: Any) -> Any:
            return await self._call(method, series, inner, request, context)

        return rewrapped(handler, around)

    def unknown_method(self) -> Any:
        """gRPC's core answers UNIMPLEMENTED; it is counted here, since nothing of ours runs."""
        self._other.started.inc()
        self._count(self._other, "UNIMPLEMENTED", 0.0)
        return None

    async def _call(
        self, method: str, series: _MethodSeries, inner: Behaviour, request: Any, context: Any
    ) -> Any:
        received_ns, received = time.time_ns(), time.monotonic()
        attempts, traceparent, tracestate = metadata_values(context, _TOLD)
        call = Call(
            method=method,
            receive_time_ns=received_ns,
            received=received,
            attempts_before=_whole(attempts),
            traceparent=traceparent,
            tracestate=tracestate,
        )
        token = current_call.set(call)
        series.started.inc()
        code = "UNKNOWN"
        try:
            response = await inner(request, context)
            code = "OK"
            return response
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if _is_late(call, context.time_remaining()) else "CANCELLED"
            raise
        except grpc.aio.AbortError:
            code = call.code if call.code != "OK" else _CODE_NAMES.get(context.code(), "UNKNOWN")
            raise
        finally:
            self._end(call, series, code)  # its line in the log still knows the call
            current_call.reset(token)

    def _end(self, call: Call, series: _MethodSeries, code: str) -> None:
        seconds = time.monotonic() - call.received
        self._count(series, code, seconds)
        if self._access_log and not call.method.startswith(_QUIET):
            log.log(
                logging.DEBUG if code == "OK" and call.method in _POLLED else logging.INFO,
                "event=call method=%s code=%s request=%s principal=%s seconds=%.3f attempt=%d",
                call.method,
                code,
                call.request_id or "-",
                call.principal or "-",
                seconds,
                call.attempts_before + 1,
            )

    def _count(self, series: _MethodSeries, code: str, seconds: float) -> None:
        handled = series.handled.get(code)
        if handled is None:
            handled = self._metrics.calls_handled.labels(*series.labels, code)
            series.handled[code] = handled
        handled.inc()
        series.seconds.observe(seconds)

    def _series(self, kind: str, service: str, name: str) -> _MethodSeries:
        labels = (kind, service, name)
        ok = self._metrics.calls_handled.labels(*labels, "OK")
        return _MethodSeries(
            self._metrics.calls_started.labels(*labels),
            {"OK": ok},
            self._metrics.call_seconds.labels(*labels),
            labels,
        )


def _type_of(handler: Any) -> str:
    names = {
        (False, False): "unary",
        (False, True): "server_stream",
        (True, False): "client_stream",
        (True, True): "bidi_stream",
    }
    return names[(handler.request_streaming, handler.response_streaming)]


def _is_late(call: Call, left: float | None) -> bool:
    return left is not None and is_deadline_over(left, time.monotonic() - call.received + left)


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 6 else 0
