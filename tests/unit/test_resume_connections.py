"""A stream survives its server over real connections: it comes back, or another is there."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import ServerFailure
from kvatlas.client.events import Event
from kvatlas.client.stream import gather
from kvatlas.client.sync import Client
from tests.losing_server import NUM_TOKENS, LosingServer, served, text_of, token_of


def read_blocking(address: str, **options: Any) -> tuple[list[Event], int]:
    with Client(address) as client, client.stream("x", **options) as stream:
        return list(stream), stream.resumes


def read_async(address: str, **options: Any) -> tuple[list[Event], int]:
    async def main() -> tuple[list[Event], int]:
        async with AsyncClient(address) as client, client.stream("x", **options) as stream:
            return [event async for event in stream], stream.resumes

    return asyncio.run(main())


@pytest.mark.parametrize("read", [read_blocking, read_async])
@pytest.mark.parametrize("output", ["text", "both"])
@pytest.mark.parametrize("knows_resume", [True, False])
def test_a_stream_goes_on_after_its_server_was_lost_twice(
    read: Callable[..., tuple[list[Event], int]], output: str, knows_resume: bool
) -> None:
    server = LosingServer()
    server.knows_resume = knows_resume
    server.lose_after = [4, 7]
    with served(server) as (_, port):
        events, resumes = read(f"127.0.0.1:{port}", output=output)
    whole = gather(events)
    assert whole.text == text_of(40, 0, NUM_TOKENS)
    ids = tuple(token_of(40, 0, number) for number in range(NUM_TOKENS))
    assert whole.choices[0].token_ids == (ids if output == "both" else ())
    assert resumes == 2
    assert [request.spec.sampling.seed for request in server.requests] == [0, 40, 40]
    assert [tuple(request.resume_after.ids) for request in server.requests] == [(), ids[:3], ids[:6]]


@pytest.mark.parametrize("read", [read_blocking, read_async])
def test_an_answer_of_the_server_is_not_a_loss(read: Callable[..., tuple[list[Event], int]]) -> None:
    server = LosingServer()
    server.lose_after = [4, 4]
    server.failure = (grpc.StatusCode.ABORTED, "WORKER_LOST")
    with served(server) as (_, port), pytest.raises(ServerFailure) as caught:
        read(f"127.0.0.1:{port}")
    assert caught.value.reason == "WORKER_LOST"
    assert len(server.requests) == 1


def test_a_stream_goes_on_at_the_other_address() -> None:
    dying, other = LosingServer(), LosingServer()
    for each in (dying, other):
        each.lose_after = [5]
        each.proceed.clear()
    with served(dying) as (first, first_port), served(other) as (second, second_port):
        address = f"127.0.0.1:{first_port},127.0.0.1:{second_port}"
        with Client(address) as client, client.stream("x") as stream:
            events: list[Event] = [next(stream) for _ in range(6)]
            is_first = bool(dying.requests)
            survivor = other if is_first else dying
            survivor.lose_after = []
            survivor.proceed.set()
            (first if is_first else second).stop(0)  # its calls end, its port is closed
            (dying if is_first else other).proceed.set()
            events += list(stream)
            assert stream.resumes == 1
    assert gather(events).text == text_of(40, 0, NUM_TOKENS)
    assert len(survivor.requests) == 1


def test_a_stream_waits_for_its_only_server_to_come_back() -> None:
    server = LosingServer()
    server.lose_after = [5]
    server.proceed.clear()
    with (
        served(server) as (running, port),
        Client(f"127.0.0.1:{port}") as client,
        client.stream("x") as stream,
    ):
        events: list[Event] = [next(stream) for _ in range(6)]
        server.proceed.set()
        running.stop(0).wait()
        with served(server, port):
            events += list(stream)
    assert gather(events).text == text_of(40, 0, NUM_TOKENS)
