"""A client's deadline ends its call by a cancel that comes before our time: core rounds timeouts up."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from service.metrics import ServiceMetrics
from service.request import Call, current_call
from service.telemetry import Telemetry

METHOD = "/kvatlas.v1.GenerationService/Generate"


class _Context:
    def __init__(self, left: float | None) -> None:
        self._left = left

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    def time_remaining(self) -> float | None:
        return self._left


async def _code_of_cancel(after: float, left: float | None) -> str:
    """What is counted of a call that was cancelled after so many seconds, so many before its deadline."""

    async def cancelled(request: Any, context: Any) -> None:
        current_call.get().received -= after
        raise asyncio.CancelledError

    metrics = ServiceMetrics(CollectorRegistry(), version="0", commit="")
    handler = Telemetry(metrics).wrap(METHOD, grpc.unary_unary_rpc_method_handler(cancelled))
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(None, _Context(left))
    samples = next(iter(metrics.calls_handled.collect())).samples
    (code,) = (each.labels["grpc_code"] for each in samples if each.value)
    return code


@pytest.mark.parametrize(
    ("after", "left", "code"),
    [
        (10.51, 0.09, "DEADLINE_EXCEEDED"),  # core told us 10.6 s of 10.51
        (99.01, 0.99, "DEADLINE_EXCEEDED"),  # 100 s of 99.01
        (1.0, 0.0, "DEADLINE_EXCEEDED"),
        (1.0, 0.009, "DEADLINE_EXCEEDED"),
        (10.0, 0.2, "CANCELLED"),
        (0.1, 0.02, "CANCELLED"),
        (5.0, None, "CANCELLED"),
    ],
)
def test_a_cancel_at_the_clients_deadline_counts_as_the_deadline(
    after: float, left: float | None, code: str
) -> None:
    assert asyncio.run(_code_of_cancel(after, left)) == code


def test_a_generation_at_its_deadline_is_no_cancel() -> None:
    call = Call(METHOD, received=100.0, deadline=110.6)
    assert call.is_over(110.51)
    assert not call.is_over(110.4)
    ours = Call(METHOD, received=100.0, deadline=700.0, deadline_is_ours=True)
    assert ours.is_over(699.995)
    assert not ours.is_over(697.0), "nothing rounds what we set ourselves"
    assert not Call(METHOD, received=100.0).is_over(1e9)
