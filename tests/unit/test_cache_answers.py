"""Promises of CacheService, call by call: windows, pages, lists, rows, checks, and what is refused."""

import asyncio
import base64
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import cache_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service.fleet.mirror_metrics import MirrorCollector
from service.fleet.shown import shown
from service.handlers import cache_messages as messages
from service.handlers.cache_messages import Viewer
from service.request import LostReason
from service.testing_cache import (
    ACTIVE,
    FREE,
    PAGES,
    CacheStage,
    ScriptedContext,
    ScriptedLink,
    paths,
    refused,
    until,
)


def test_windows_show_the_planes_that_are_asked_for() -> None:
    async def work() -> None:
        link = ScriptedLink()
        link.touch(65_540, ACTIVE, owner=3)
        stage = CacheStage(link)
        await stage.welcome()
        answer = await stage.servicer.GetPageMap(
            pb.GetPageMapRequest(planes=["states", "owners"], first_page_id=65_536, page_limit=10), None
        )
        assert np.frombuffer(answer.pages.states, "u1").tolist() == [FREE] * 4 + [ACTIVE] + [FREE] * 5
        assert np.frombuffer(answer.pages.owners, "<u2")[4] == 3
        assert answer.pages.flags == b""
        assert (answer.first_page_id, answer.page_count, answer.revision.number) == (65_536, 10, 1)
        whole = await stage.servicer.GetPageMap(pb.GetPageMapRequest(), None)
        assert (whole.page_count, len(whole.pages.fingerprints)) == (65_536, 8 * 65_536)
        pool = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(worker_id="w0"), None)
        assert pool.geometry.page_count == PAGES
        assert (pool.stats.free_pages, pool.stats.active_pages) == (PAGES - 1, 1)

    asyncio.run(work())


def test_what_cannot_be_shown_is_refused_with_every_violation() -> None:
    async def work() -> None:
        empty = CacheStage()
        assert (
            await refused(empty.servicer.GetPagePool(pb.GetPagePoolRequest(), None))
        ).reason == "NOT_READY"
        stage = CacheStage(ScriptedLink(page_count=100))
        stage.mirrors.link_welcomed(cast(Any, stage.links[0]))
        early = await refused(stage.servicer.GetPageMap(pb.GetPageMapRequest(), None))
        assert (early.reason, early.retry_ms) == ("NOT_READY", 1000)
        await stage.welcome()
        bad = pb.GetPageMapRequest(planes=["states", "nonsense"], page_limit=65_537)
        assert paths(await refused(stage.servicer.GetPageMap(bad, None))) == ["planes[1]", "page_limit"]
        for request in (pb.GetPageMapRequest(first_page_id=100), pb.GetPageMapRequest(worker_id="who")):
            failure = await refused(stage.servicer.GetPageMap(request, None))
            assert (failure.status, failure.reason) == (grpc.StatusCode.NOT_FOUND, "WORKER_NOT_FOUND")
        wrong = pb.EstimateCacheRequest(
            pool_slots=range(1, 34), page_sizes=range(1, 10), eviction_policies=["lru"]
        )
        wrong.window.FromSeconds(0)
        estimate = await refused(stage.servicer.EstimateCache(wrong, None))
        assert paths(estimate) == ["pool_slots", "page_sizes", "pool_slots", "window"]
        contradicts_itself = pb.EstimateCacheRequest(window=Duration(seconds=1, nanos=-1))
        assert paths(await refused(stage.servicer.EstimateCache(contradicts_itself, None))) == ["window"]
        no = "rows: 9 is no row, the last is 8"
        stage.links[0].fails_with = worker_pb2.CommandReply(code=3, error_reason=1, message=no)
        asked = pb.GetPageTableRequest(rows=[9])
        only_the_worker_knows = await refused(stage.servicer.GetPageTable(asked, ScriptedContext()))
        assert paths(only_the_worker_knows) == ["rows"]

    asyncio.run(work())


def test_of_several_workers_one_must_be_named() -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink("a", 10), ScriptedLink("b", 20))
        await stage.welcome()
        failure = await refused(stage.servicer.GetPagePool(pb.GetPagePoolRequest(), None))
        assert (failure.reason, failure.metadata) == ("WORKER_ID_REQUIRED", {"worker_ids": "a,b"})
        answer = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(worker_id="b"), None)
        assert answer.geometry.page_count == 20

    asyncio.run(work())


def test_a_page_is_told_with_its_sequences_children_and_last_events() -> None:
    async def work() -> None:
        link = ScriptedLink(page_count=50)
        link.touch(7, ACTIVE, owner=1)
        link.touch(7, ACTIVE, owner=1, refs=2, kind=2)
        link.touch(8, ACTIVE, owner=3)
        link.planes["parent_page_ids"][8] = 7
        link.planes["flags"][7] = pb.PAGE_FLAG_SEALED
        link.planes["hit_counts"][7], link.planes["filled_slots"][7] = 3, 16
        link.planes["born_ms"][7], link.planes["used_ms"][7] = 4_000, 9_000
        for owner, pages in ((1, [7]), (2, [7, 9]), (3, [8])):
            link.sequence(owner, pages)
        stage = CacheStage(link)
        await stage.welcome()
        stage.feed(link)
        page = await stage.servicer.GetPage(pb.GetPageRequest(page_id=7, event_limit=100), None)
        assert (page.state, page.sealed, page.pinned, page.ref_count) == (
            pb.PAGE_STATE_ACTIVE,
            True,
            False,
            2,
        )
        assert (page.hit_count, page.filled_slots) == (3, 16)
        assert [each.request_id for each in page.sequences] == ["r1", "r2"]
        assert all(not each.page_ids for each in page.sequences)
        assert (page.HasField("parent_page_id"), list(page.child_page_ids)) == (False, [8])
        # Born 4 s and used 9 s after the start; the feed's clock stands at 10 s.
        assert (page.age.ToMilliseconds(), page.idle.ToMilliseconds()) == (6_000, 1_000)
        assert [(event.number, event.type) for event in page.events] == [(1, 1), (2, 2)]
        child = await stage.servicer.GetPage(pb.GetPageRequest(page_id=8), None)
        assert (child.parent_page_id, len(child.events)) == (7, 0)
        assert link.commands.count("replay") == 1
        await stage.servicer.GetPage(pb.GetPageRequest(page_id=8, event_limit=1), None)
        assert link.commands.count("replay") == 1
        bad = await refused(stage.servicer.GetPage(pb.GetPageRequest(page_id=8, event_limit=101), None))
        assert paths(bad) == ["event_limit"]
        assert (await refused(stage.servicer.GetPage(pb.GetPageRequest(page_id=50), None))).reason == (
            "WORKER_NOT_FOUND"
        )

    asyncio.run(work())


def test_a_page_is_as_old_as_it_is_before_the_feed_has_said_a_word() -> None:
    """By a clock that nobody has told yet every page would be 49 days old: 2^32 ms, less its birth."""

    async def work() -> None:
        link = ScriptedLink(page_count=50)
        link.touch(7, ACTIVE, owner=1)
        link.planes["born_ms"][7], link.planes["used_ms"][7] = 4_000, 9_000
        stage = CacheStage(link)
        await stage.welcome()
        page = await stage.servicer.GetPage(pb.GetPageRequest(page_id=7), None)
        assert (page.age.ToMilliseconds(), page.idle.ToMilliseconds()) == (6_000, 1_000)
        pool = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(), None)
        assert pool.observe_time.seconds == 1010

    asyncio.run(work())


def test_the_feed_of_a_worker_that_has_just_come_is_not_as_old_as_the_host() -> None:
    async def work() -> None:
        stage = CacheStage(ScriptedLink())
        stage.mirrors.link_welcomed(cast(Any, stage.links[0]))
        (age, _) = MirrorCollector(stage.mirrors).collect()
        assert [sample.value < 5.0 for sample in age.samples] == [True]
        await stage.welcome()

    asyncio.run(work())


NO_CURSORS = ('["a", 1e12, Infinity, 0, 1]', f'["a", 1{400 * "0"}, 1, 0, 1]', 100_000 * "[", "7", "{}")
"""JSON that a client may have made itself."""


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def test_a_cursor_names_no_request_and_a_list_goes_on_where_many_came_at_once() -> None:
    """The last request of a part may be another tenant's, and a cursor is no secret."""

    async def work() -> None:
        link = ScriptedLink("a", 10)
        for owner in range(1, 8):
            link.sequence(owner, [owner], received=5, tenant="other")
        stage = CacheStage(link, viewer=Viewer("own"))
        await stage.welcome()
        owners: list[int] = []
        cursor = ""
        for _ in range(4):
            request = pb.ListSequencesRequest(max_results=2, cursor=cursor)
            answer = await stage.servicer.ListSequences(request, None)
            owners += [each.owner for each in answer.sequences]
            cursor = answer.next_cursor
            told = base64.urlsafe_b64decode(cursor).decode() + str(answer)
            assert not any(f"r{owner}" in told for owner in range(1, 8))
        assert cursor == ""
        assert owners == list(range(1, 8))
        for told_before, first in (("-9", 1), ("99", None)):
            made = encoded(f'["a", 1e12, 5000000000, 0, {told_before}]')
            rest = (await stage.servicer.ListSequences(pb.ListSequencesRequest(cursor=made), None)).sequences
            assert (rest[0].owner if rest else None) == first

    asyncio.run(work())


def test_lists_are_paged_oldest_first_and_cursors_are_checked() -> None:
    async def work() -> None:
        link, other = ScriptedLink("a", 10), ScriptedLink("b", 10)
        for owner in range(1, 8):
            link.sequence(owner, [owner], received=100 - owner)
        stage = CacheStage(link, other)
        await stage.welcome()
        names: list[str] = []
        cursor = ""
        while True:
            request = pb.ListSequencesRequest(worker_id="a", max_results=3, cursor=cursor)
            answer = await stage.servicer.ListSequences(request, None)
            assert answer.total_count == 7
            names += [each.request_id for each in answer.sequences]
            cursor = answer.next_cursor
            if not cursor:
                break
            last = cursor
        assert names == [f"r{owner}" for owner in range(7, 0, -1)]
        for bad in (
            pb.ListSequencesRequest(worker_id="b", cursor=last),
            pb.ListSequencesRequest(worker_id="a", cursor="?"),
            *(pb.ListSequencesRequest(worker_id="a", cursor=encoded(text)) for text in NO_CURSORS),
        ):
            assert paths(await refused(stage.servicer.ListSequences(bad, None))) == ["cursor"]
        few = pb.ListSequencesRequest(worker_id="a", states=[pb.SEQUENCE_STATE_WAITING])
        assert len((await stage.servicer.ListSequences(few, None)).sequences) == 0
        bare = pb.ListSequencesRequest(worker_id="a", omit_page_ids=True)
        assert not any(each.page_ids for each in (await stage.servicer.ListSequences(bare, None)).sequences)
        wrong = pb.ListSequencesRequest(worker_id="a", max_results=1001, states=[cast(Any, 0)])
        assert paths(await refused(stage.servicer.ListSequences(wrong, None))) == ["max_results", "states[0]"]

    asyncio.run(work())


def test_a_list_that_a_message_does_not_hold_goes_on_where_it_was_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        link = ScriptedLink("a", 2000)
        for owner in range(1, 5):
            link.sequence(owner, list(range(1, 400)))
        stage = CacheStage(link)
        await stage.welcome()
        parts: list[list[str]] = []
        cursor = "first"
        while cursor and len(parts) < 9:
            request = pb.ListSequencesRequest(cursor=cursor if parts else "")
            answer = await stage.servicer.ListSequences(request, None)
            parts.append([each.request_id for each in answer.sequences])
            cursor = answer.next_cursor
        assert parts == [["r1", "r2"], ["r3", "r4"]]
        waiting = pb.ListSequencesRequest(states=[pb.SEQUENCE_STATE_WAITING])
        answer = await stage.servicer.ListSequences(waiting, None)
        assert (len(answer.sequences), answer.total_count) == (0, 4), "all that are live"

    monkeypatch.setattr(messages, "MAX_PART_BYTES", 4000)  # two of 1,600 bytes of pages each
    asyncio.run(work())


def test_of_a_list_in_a_request_no_more_is_looked_at_than_it_may_have() -> None:
    """4 MiB of states kept the event loop so long that the worker gave the service up with its streams."""

    async def work() -> None:
        stage = CacheStage(ScriptedLink("a", 10))
        await stage.welcome()
        servicer = stage.servicer
        states = pb.ListSequencesRequest(states=[pb.SEQUENCE_STATE_DECODE] * 64)
        await servicer.ListSequences(states, None)
        window = pb.GetPageMapRequest(planes=["states"] * 64)
        await servicer.GetPageMap(window, None)
        states.states.append(cast(Any, 0))
        assert paths(await refused(servicer.ListSequences(states, None))) == ["states"]
        window.planes.append("none")
        assert paths(await refused(servicer.GetPageMap(window, None))) == ["planes"]
        watch = pb.WatchPageMapRequest(planes=window.planes)
        assert paths(await refused(servicer.WatchPageMap(watch, ScriptedContext()))) == ["planes"]

    asyncio.run(work())


def test_one_sequence_is_found_by_its_request_on_any_worker() -> None:
    async def work() -> None:
        link = ScriptedLink("b", 10)
        link.sequence(5, [1, 2])
        stage = CacheStage(ScriptedLink("a", 10), link)
        await stage.welcome()
        answer = await stage.servicer.GetSequence(pb.GetSequenceRequest(request_id="r5"), None)
        assert (answer.worker_id, answer.sequence.owner) == ("b", 5)
        assert np.frombuffer(answer.sequence.page_ids, "<u4").tolist() == [1, 2]
        failure = await refused(stage.servicer.GetSequence(pb.GetSequenceRequest(request_id="r6"), None))
        assert failure.reason == "SEQUENCE_NOT_FOUND"
        other = pb.GetSequenceRequest(request_id="r5", choice_index=1)
        assert (await refused(stage.servicer.GetSequence(other, None))).reason == "SEQUENCE_NOT_FOUND"

    asyncio.run(work())


def test_rows_come_from_the_worker_and_its_no_is_passed_on() -> None:
    async def work() -> None:
        link, context = ScriptedLink(page_count=10), ScriptedContext()
        link.sequence(1, [2])
        stage = CacheStage(link)
        await stage.welcome()
        await stage.servicer.GetPageTable(pb.GetPageTableRequest(), context)
        assert [(row.row, row.request_id) for row in context.written] == [(1, "r1")]
        many = await refused(stage.servicer.GetPageTable(pb.GetPageTableRequest(rows=range(65)), context))
        assert paths(many) == ["rows"]
        link.fails_with = worker_pb2.CommandReply(code=8, error_reason=cast(Any, 8), message="once a second")
        failure = await refused(
            stage.servicer.GetPageTable(pb.GetPageTableRequest(from_device=True), context)
        )
        assert (failure.status, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")

    asyncio.run(work())


def test_other_tenants_requests_have_no_names_and_their_waiting_ones_are_not_watched() -> None:
    async def work() -> None:
        link, context, rows = ScriptedLink(page_count=10), ScriptedContext(), ScriptedContext()
        link.sequence(1, [1], tenant="acme")
        link.sequence(2, [2], tenant="other")
        link.sequence(3, [], tenant="other")
        link.sequences[3].owner, link.sequences[3].state = 0, pb.SEQUENCE_STATE_WAITING
        stage = CacheStage(link, viewer=Viewer("acme"))
        await stage.welcome()
        listed = (await stage.servicer.ListSequences(pb.ListSequencesRequest(), None)).sequences
        assert [each.request_id for each in listed] == ["r1", "", ""]
        assert not any(each.tenant or each.labels for each in listed)
        await stage.servicer.GetPageTable(pb.GetPageTableRequest(), rows)
        assert [row.request_id for row in rows.written] == ["r1", "", ""]
        assert (
            await refused(stage.servicer.GetSequence(pb.GetSequenceRequest(request_id="r2"), None))
        ).reason == ("SEQUENCE_NOT_FOUND")
        scope = await refused(stage.servicer.GetPageTable(pb.GetPageTableRequest(from_device=True), rows))
        assert (scope.status, scope.metadata) == (grpc.StatusCode.PERMISSION_DENIED, {"scope": "admin"})
        task = await stage.watch(context)
        await until(lambda: len(context.written) == 2)
        assert [each.owner for each in context.written[1].snapshot.sequences] == [1, 2]
        task.cancel()

    asyncio.run(work())


def test_a_row_that_another_tenant_has_since_a_moment_has_no_name() -> None:
    """The worker knows it sooner than the copy of its pages, which names the one that had the row before."""

    async def work() -> None:
        link, rows = ScriptedLink(page_count=10), ScriptedContext()
        link.sequence(1, [1], tenant="acme")
        stage = CacheStage(link, viewer=Viewer("acme"))
        await stage.welcome()
        link.sequence(1, [1], tenant="other")
        link.sequences[1].request_id = "secret"
        await stage.servicer.GetPageTable(pb.GetPageTableRequest(), rows)
        assert [row.request_id for row in rows.written] == [""]

    asyncio.run(work())


def test_a_worker_that_came_back_at_another_address_is_the_one_that_is_shown() -> None:
    """Its old address may stay configured: the map of its last life was shown there for ever."""

    async def work() -> None:
        old, new = ScriptedLink("w", page_count=10), ScriptedLink("w", page_count=20)
        new.address = "elsewhere"
        stage = CacheStage(old, new)
        await stage.welcome()
        old.is_up = False
        stage.mirrors.link_lost(cast(Any, old), LostReason.CRASH)
        for worker_id in ("w", ""):
            answer = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(worker_id=worker_id), None)
            assert answer.geometry.page_count == 20
        ages = next(iter(MirrorCollector(stage.mirrors).collect()))
        assert [sample.labels for sample in ages.samples] == [{"worker": "w"}]

    asyncio.run(work())


def test_of_a_worker_that_is_lost_at_two_addresses_the_last_is_shown() -> None:
    """By the list of workers and by the map alike; it was listed twice, and its older map was shown."""

    async def work() -> None:
        old, new = ScriptedLink("w", page_count=10), ScriptedLink("w", page_count=20)
        new.address = "elsewhere"
        old.beat_time, new.beat_time = 1.0, 2.0
        stage = CacheStage(old, new)
        await stage.welcome()
        for link in (old, new):
            link.is_up = False
            stage.mirrors.link_lost(cast(Any, link), LostReason.CRASH)
        answer = await stage.servicer.GetPagePool(pb.GetPagePoolRequest(), None)
        assert answer.geometry.page_count == 20
        assert shown(cast(Any, [old, new])) == [new]

    asyncio.run(work())


def test_a_full_check_needs_the_admin_scope_and_a_worker_that_is_there() -> None:
    async def work() -> None:
        request = pb.RunIntegrityCheckRequest()
        stage = CacheStage(ScriptedLink(page_count=10), viewer=Viewer("acme", is_admin=False))
        await stage.welcome()
        assert (await refused(stage.servicer.RunIntegrityCheck(request, None))).reason == "MISSING_SCOPE"
        stage = CacheStage(ScriptedLink(page_count=10))
        await stage.welcome()
        assert (await stage.servicer.RunIntegrityCheck(request, None)).checked_pages == 7
        stage.links[0].fails_with = worker_pb2.CommandReply(code=8, error_reason=8, message="one a second")
        failure = await refused(stage.servicer.RunIntegrityCheck(request, None))
        assert (failure.status, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")

    asyncio.run(work())
