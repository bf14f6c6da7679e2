"""How long a client waits for each of its calls."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from kvatlas.client import calls
from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import DeadlineExceeded
from kvatlas.client.sync import Client
from kvatlas.v1 import generation_pb2


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_client_waits_for_no_call_longer_than_it_was_told(silent: str) -> None:
    """`kvatlas load --timeout 1` waited ten seconds."""
    began = time.monotonic()
    with Client(silent, timeout_seconds=0.1) as client:
        for ask in (client.load, client.page_pool, client.check_integrity, lambda: client.cancel(["r"])):
            with pytest.raises(DeadlineExceeded):
                ask()
    assert time.monotonic() - began < calls.load().limit_seconds


def test_an_async_client_waits_no_longer_either(silent: str) -> None:
    asyncio.run(_ask_models(silent))


async def _ask_models(silent: str) -> None:
    began = time.monotonic()
    async with AsyncClient(silent, timeout_seconds=0.1) as client:
        with pytest.raises(DeadlineExceeded):
            await client.models()
    assert time.monotonic() - began < calls.models().limit_seconds


class Deadlines(grpc.GenericRpcHandler):
    """Answers every method with an empty message, and keeps the seconds it was given."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            self.seconds.append(context.time_remaining())
            return generation_pb2.GenerateResponse().SerializeToString()

        is_ours = details.method.startswith("/kvatlas.v1.")  # of the health service there is nothing here
        return grpc.unary_unary_rpc_method_handler(answer) if is_ours else None


def test_an_answer_has_the_seconds_of_its_call_or_of_the_client_and_a_look_has_few() -> None:
    handler = Deadlines()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with Client(address, timeout_seconds=90.0) as client:
        client.generate("hello")
        client.generate("hello", timeout_seconds=300.0)
        client.generate("hello", timeout_seconds=30.0)
        client.load()
        client.check_integrity()
    server.stop(None).wait()
    # Less by the seconds of the way, more by what the wire rounds up.
    assert handler.seconds == [pytest.approx(wanted - 5, abs=7) for wanted in (90, 300, 30, 10, 60)]
