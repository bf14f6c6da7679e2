"""Calls of GenerationService from their opening to what they leave, before a worker that a test plays."""

import asyncio
from typing import Any

import pytest

from kvatlas.v1 import generation_pb2 as pb
from service import errors
from service.errors import Failure
from service.request import AbortReason, FinishCode
from service.testing_cache import refused
from tests.generation_bench import Context, Desk, turns

LONG = "a" * 50_000  # made to ids beside the loop


def test_a_stream_tells_its_messages_in_order_and_gives_everything_back() -> None:
    async def work() -> None:
        desk, context = Desk(), Context()
        task = desk.stream(context)
        await turns()
        first = desk.admit()
        await turns()
        desk.link.step((first, 65))
        await turns()
        desk.link.step((first, 66), ends=[(first, FinishCode.MAX_TOKENS)])
        await asyncio.wait_for(task, 60)
        assert context.events() == ["started", "delta", "delta", "choice_finished", "summary"]
        assert context.heads == [{"x-request-id": "r"}]
        assert context.written[-1].summary.usage.completion_tokens == 2
        assert (desk.ended(), desk.is_idle) == ({"completed": 1}, True)

    asyncio.run(work())


def test_who_does_not_read_the_end_of_a_call_that_no_worker_had_loses_it_too() -> None:
    """All had ended before anybody listened: it kept its place for ever."""

    async def work() -> None:
        desk, context = Desk(slow_reader_seconds=0.0), Context(gate=asyncio.Event())
        async with desk.held_prompts():
            task = desk.stream(context, text=LONG)
            await turns()
            (live,) = desk.live.everything()
            live.cancel()
        failure = await refused(asyncio.wait_for(task, 60))
        assert failure.reason == "SLOW_READER"
        assert desk.is_idle

    asyncio.run(work())
