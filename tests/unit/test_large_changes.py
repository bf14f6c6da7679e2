"""WatchPageMap: what has changed may be more than a client's library takes in one message."""

import asyncio
from typing import Any

import pytest

from kvatlas.client.page_map import PageMap
from kvatlas.v1 import cache_pb2 as pb
from service.server_options import MAX_MESSAGE_BYTES
from service.testing_cache import ACTIVE, CacheStage, ScriptedContext, ScriptedLink, until


def change_pages(link: ScriptedLink) -> None:
    for page in range(150_000):
        link.touch(page, ACTIVE, owner=1)


def change_sequences(link: ScriptedLink) -> None:
    for owner in range(1, 9):
        link.touch(owner, ACTIVE, owner=owner)
        link.sequence(owner, list(range(150_000)))


@pytest.mark.parametrize("change", [change_pages, change_sequences])
def test_more_than_a_message_holds_comes_as_a_snapshot_in_parts(change: Any) -> None:
    """A flush of a large pool, or prompts of many pages at once: the delta would end the watch."""

    async def work() -> None:
        link = ScriptedLink(page_count=150_001)
        stage, context = CacheStage(link), ScriptedContext()
        await stage.welcome()
        task = await stage.watch(context)
        await until(lambda: len(context.written) == 3)
        change(link)
        stage.feed(link)
        copy = PageMap()
        await until(lambda: len(context.written) > 3 and context.written[-1].revision.number == link.number)
        last = context.written[-1]
        await until(lambda: not context.written[-1].snapshot.chunks_left)
        for message in context.written:
            copy.apply(message)
        assert max(message.ByteSize() for message in context.written) <= MAX_MESSAGE_BYTES
        assert last.snapshot.cause == pb.SNAPSHOT_CAUSE_LAGGED
        assert all((copy[name] == plane).all() for name, plane in link.planes.items())
        link.touch(7, ACTIVE, owner=2)
        stage.feed(link)
        await until(lambda: context.written[-1].WhichOneof("event") == "delta")
        assert context.written[-1].base_number == copy.revision.number, "it goes on behind the snapshot"
        task.cancel()

    asyncio.run(work())
