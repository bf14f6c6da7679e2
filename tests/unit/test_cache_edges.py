"""Edges of CacheService: clocks that wrap, pages without an age, ranges of a watch, a worker's no."""

import asyncio
from typing import Any, cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import errors_pb2
from kvatlas.worker.v1 import worker_pb2
from service.fleet.link import CommandFailed
from service.handlers.asking import failure_of
from service.handlers.cache_messages import Viewer
from service.testing_cache import ACTIVE, CacheStage, ScriptedContext, ScriptedLink, paths, refused

RESERVED = int(pb.PAGE_STATE_RESERVED)


def milliseconds(value: int) -> Duration:
    return Duration(seconds=value // 1000, nanos=value % 1000 * 1_000_000)


def test_ages_go_on_where_a_workers_clock_of_32_bits_wraps_and_a_reserved_page_has_none() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=4)  # up for 10 s when it speaks
        link.touch(1, ACTIVE)
        link.touch(2, RESERVED)
        for page in (1, 2):
            link.planes["born_ms"][page] = (1 << 32) - 500
            link.planes["used_ms"][page] = 9_000
        stage = CacheStage(link)
        await stage.welcome()
        active, reserved = [
            await stage.servicer.GetPage(pb.GetPageRequest(page_id=page), None) for page in (1, 2)
        ]
        assert (active.age, active.idle) == (milliseconds(10_500), milliseconds(1_000))
        assert not reserved.HasField("age")
        assert not reserved.HasField("idle")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("interval", "heartbeat", "wrong"),
    [
        (49, 1_000, ["min_interval"]),
        (10_001, 60_000, ["min_interval"]),
        (50, 999, ["heartbeat_interval"]),
        (10_000, 60_001, ["heartbeat_interval"]),
        (0, 0, ["min_interval", "heartbeat_interval"]),
    ],
)
def test_a_watch_outside_its_ranges_is_refused(interval: int, heartbeat: int, wrong: list[str]) -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink(page_count=4))
        await stage.welcome()
        request = pb.WatchPageMapRequest(
            min_interval=milliseconds(interval), heartbeat_interval=milliseconds(heartbeat)
        )
        context = ScriptedContext()
        async with asyncio.timeout(60):  # a watch that is let in does not end
            failure = await refused(stage.servicer.WatchPageMap(request, context))
        assert paths(failure) == wrong
        assert context.written == []
        assert stage.watches.active == 0

    asyncio.run(work())


def test_token_ids_are_not_left_out_of_a_watch_without_a_word() -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink(page_count=4))
        await stage.welcome()
        request = pb.WatchPageMapRequest(include_token_ids=True)
        async with asyncio.timeout(60):  # a watch that is let in does not end
            failure = await refused(stage.servicer.WatchPageMap(request, ScriptedContext()))
        assert (failure.reason, failure.metadata) == ("FEATURE_DISABLED", {"feature": "watch_token_ids"})

    asyncio.run(work())


def test_pool_sizes_that_are_not_named_are_eight() -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink(page_count=4))
        await stage.welcome()
        request = pb.EstimateCacheRequest(page_sizes=[16] * 8, eviction_policies=["lru"] * 5)
        failure = await refused(stage.servicer.EstimateCache(request, None))
        assert paths(failure) == ["pool_slots"]
        assert "320 combinations" in failure.message

    asyncio.run(work())


@pytest.mark.parametrize("is_admin", [True, False])
def test_labels_and_tenants_are_an_administrators_to_see(is_admin: bool) -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=4)
        link.sequence(1, [1])
        stage = CacheStage(link, viewer=Viewer("acme", is_admin=is_admin))
        await stage.welcome()
        (told,) = (await stage.servicer.ListSequences(pb.ListSequencesRequest(), None)).sequences
        assert told.request_id == "r1", "its own"
        assert (told.tenant, dict(told.labels)) == (("acme", {"team": "x"}) if is_admin else ("", {}))

    asyncio.run(work())


@pytest.mark.parametrize(
    ("code", "reason", "retry_ms"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCH_LIMIT", 1000),
        (grpc.StatusCode.FAILED_PRECONDITION, "PIN_LIMIT", None),
    ],
)
def test_a_workers_no_keeps_its_numbers_and_says_whether_to_come_back(
    code: grpc.StatusCode, reason: str, retry_ms: int | None
) -> None:
    reply = worker_pb2.CommandReply(code=code.value[0], message="no", metadata={"needed_pages": "7"})
    reply.error_reason = cast(Any, errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"))
    failure = failure_of(CommandFailed(reply))
    assert (failure.status, failure.reason, failure.message) == (code, reason, "no")
    assert (failure.metadata, failure.retry_ms) == ({"needed_pages": "7"}, retry_ms)
