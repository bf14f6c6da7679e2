"""CacheService, answered from the page mirrors; rows of the page table come from the worker.

Owns nothing.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np

from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import cache_pb2_grpc
from kvatlas.worker.v1 import worker_pb2
from service import errors
from service.errors import Failure, Violation
from service.fleet import page_codec
from service.fleet.feed import NO_PAGE, PLANES, SequenceRecord
from service.fleet.mirrors import KeptMirror, PageMirrors
from service.fleet.page_mirror import PageMirror, Standing
from service.fleet.sequence_mirror import holders
from service.handlers import cache_messages as messages
from service.handlers import cursors
from service.handlers.asking import ask, asked, named_worker
from service.handlers.backstage import Backstage
from service.handlers.cache_messages import Viewer
from service.handlers.convert import to_duration, to_timestamp
from service.handlers.validate import Violations, seconds
from service.handlers.watch import PAGES_PER_PART, MapWatcher, WatchOptions
from service.request import Call, current_call
from service.writing import begin, write

MAX_EVENTS = 100
MAX_ROWS = 64
MAX_RESULTS, DEFAULT_RESULTS = 1_000, 100
MAX_ESTIMATES = 256
MAX_STATES = MAX_PLANES = 64  # that a request names; each is looked at
MAX_ESTIMATE_SECONDS = 60.0
COMMAND_SECONDS = 10.0
CHECK_SECONDS = 60.0
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.05, 10.0
MIN_HEARTBEAT_SECONDS, MAX_HEARTBEAT_SECONDS = 1.0, 60.0
"""Of WatchPageMap."""


def viewer_of_call(call: Call) -> Viewer:
    """Who looks; where no credentials are asked for, whoever reaches the port sees everything."""
    return Viewer(call.tenant, is_admin=call.may("admin"))


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Handlers of CacheService."""

    def __init__(
        self,
        backstage: Backstage,
        mirrors: PageMirrors,
        viewer_of: Callable[[Call], Viewer] = viewer_of_call,
    ) -> None:
        self._backstage = backstage
        self._mirrors = mirrors
        self._viewer_of = viewer_of
        self._loop = asyncio.get_running_loop()

    # -- the pool ------------------------------------------------------------------------------------

    async def GetPagePool(self, request: pb.GetPagePoolRequest, context: Any) -> pb.GetPagePoolResponse:
        """Geometry and totals."""
        kept = self._whole(request.worker_id)
        return pb.GetPagePoolResponse(
            geometry=_geometry(kept),
            stats=messages.stats(kept.mirror.totals),
            revision=messages.revision(kept.mirror.revision),
            observe_time=to_timestamp(kept.mirror.observe_time_ns),
        )

    async def GetPageMap(self, request: pb.GetPageMapRequest, context: Any) -> pb.GetPageMapResponse:
        """A window of the planes."""
        found = Violations()
        _check_planes(found, request.planes)
        if request.page_limit > PAGES_PER_PART:
            found.add("page_limit", f"{request.page_limit} is more than {PAGES_PER_PART}")
        _refuse(found)
        mirror = self._whole(request.worker_id).mirror
        first = request.first_page_id
        _check_page(mirror, first)
        end = min(first + (request.page_limit or PAGES_PER_PART), mirror.page_count)
        names = messages.wanted_planes(request.planes)
        return pb.GetPageMapResponse(
            pages=messages.page_map({name: mirror.planes[name][first:end] for name in names}),
            first_page_id=first,
            page_count=end - first,
            stats=messages.stats(mirror.totals),
            revision=messages.revision(mirror.revision),
        )

    async def WatchPageMap(self, request: pb.WatchPageMapRequest, context: Any) -> None:
        """Snapshot and changes, until the drain begins."""
        self._backstage.refuse_if_draining()
        options = self._watch_options(request)
        permit = self._backstage.watches.enter()
        if permit is None:
            raise errors.watch_limit(self._backstage.config.max_watches)
        try:
            kept = self._kept(request.worker_id)
            await begin(context)
            await self._follow(kept, options, context)
        finally:
            permit.release()

    async def _follow(self, kept: KeptMirror, options: WatchOptions, context: Any) -> None:
        metrics = self._backstage.metrics
        watcher = MapWatcher(
            kept, options, self._backstage.board, context, on_lag=metrics.page_watch_lagged.inc
        )
        with metrics.page_watchers["events" if options.wants_events else "state"].track_inprogress():
            await watcher.run()

    # -- pages ---------------------------------------------------------------------------------------

    async def GetPage(self, request: pb.GetPageRequest, context: Any) -> pb.GetPageResponse:
        """One page in words."""
        if request.event_limit > MAX_EVENTS:
            raise errors.invalid_fields(
                [Violation("event_limit", f"{request.event_limit} is more than {MAX_EVENTS}")]
            )
        kept, page, viewer = self._whole(request.worker_id), request.page_id, self._viewer()
        if request.event_limit:
            await kept.events()
        _check_page(kept.mirror, page)  # not before: meanwhile a worker may come back with fewer pages
        response = _page(kept.mirror, page, self._uptime_ms(kept))
        if request.event_limit:
            response.events.extend(self._events_of(kept, page, request.event_limit, viewer))
        for record in await self._holders(kept.mirror, page, response.ref_count):
            count = kept.mirror.sequences.token_count(record)
            response.sequences.append(messages.sequence(record, viewer, count, pages=False))
        return response

    async def GetPageTable(self, request: pb.GetPageTableRequest, context: Any) -> None:
        """Rows as the worker has them."""
        if len(request.rows) > MAX_ROWS:
            raise errors.invalid_fields([Violation("rows", f"{len(request.rows)} are more than {MAX_ROWS}")])
        viewer = self._viewer()
        if request.from_device and not viewer.is_admin:
            raise _missing_scope("admin")
        kept = self._kept(request.worker_id)
        async with asked(kept, worker_pb2.Command(page_table=request), COMMAND_SECONDS) as replies:
            async for reply in replies:
                row = reply.page_table
                if not viewer.is_admin and not _is_ones_own(kept.mirror, row, viewer):
                    row.request_id = ""
                await write(context, row)

    # -- sequences -----------------------------------------------------------------------------------

    async def ListSequences(self, request: pb.ListSequencesRequest, context: Any) -> pb.ListSequencesResponse:
        """Live sequences, oldest first."""
        found = Violations()
        if request.max_results > MAX_RESULTS:
            found.add("max_results", f"{request.max_results} is more than {MAX_RESULTS}")
        if len(request.states) > MAX_STATES:
            found.add("states", f"{len(request.states)} are more than {MAX_STATES}")
        for number, state in enumerate(request.states[:MAX_STATES]):
            found.known(f"states[{number}]", state, pb.SequenceState, may_be_unset=False)
        kept = self._whole(request.worker_id)
        worker_id, now = kept.mirror.worker_id, self._loop.time()
        place = cursors.read(request.cursor, worker_id, now)
        if place is None:
            place = cursors.START
            found.add("cursor", f"is of another list or older than {cursors.VALID_SECONDS:g} s")
        _refuse(found)
        book, viewer = kept.mirror.sequences, self._viewer()
        wanted = [
            each for each in book.records.values() if not request.states or each.state in request.states
        ]
        start = cursors.sort(wanted, place)
        page = wanted[start : start + (request.max_results or DEFAULT_RESULTS)]
        counts = [book.token_count(each) for each in page]
        at, total = messages.revision(kept.mirror.revision), len(book)
        infos = []
        for number, (record, count) in enumerate(zip(page, counts, strict=True), start=1):
            infos.append(messages.sequence(record, viewer, count, pages=not request.omit_page_ids))
            if number % 64 == 0:
                await asyncio.sleep(0)  # 5 us each: let others have their turn
        sent = list(messages.within_bytes(infos, messages.MAX_PART_BYTES))
        is_last = start + len(sent) == len(wanted)
        cursor = "" if is_last else cursors.write(worker_id, now, wanted[: start + len(sent)])
        return pb.ListSequencesResponse(sequences=sent, next_cursor=cursor, total_count=total, revision=at)

    async def GetSequence(self, request: pb.GetSequenceRequest, context: Any) -> pb.GetSequenceResponse:
        """One sequence, wherever it is."""
        viewer = self._viewer()
        for kept in self._mirrors.kept:
            for record in kept.mirror.sequences.records.values():
                if record.request_id != request.request_id or record.choice_index != request.choice_index:
                    continue
                if viewer.may_name(record):
                    count = kept.mirror.sequences.token_count(record)
                    return pb.GetSequenceResponse(
                        sequence=messages.sequence(record, viewer, count),
                        worker_id=kept.mirror.worker_id,
                        revision=messages.revision(kept.mirror.revision),
                    )
        raise errors.sequence_not_found(request.request_id)

    async def EstimateCache(self, request: pb.EstimateCacheRequest, context: Any) -> pb.EstimateCacheResponse:
        """What other settings would have given; the worker works on it beside its engine."""
        _check_estimate(request)
        left = context.time_remaining()
        timeout = MAX_ESTIMATE_SECONDS if left is None else min(left, MAX_ESTIMATE_SECONDS)
        # It works until the caller's own deadline, so a late answer is that deadline, not a lost worker.
        command = worker_pb2.Command(estimate=request)
        reply = await ask(self._kept(request.worker_id), command, timeout, errors.deadline_passed)
        return reply.estimate

    async def GetIntegrity(self, request: pb.GetIntegrityRequest, context: Any) -> pb.GetIntegrityResponse:
        """What the worker's live audit has found."""
        command = worker_pb2.Command(integrity=request)
        reply = await self._ask(request.worker_id, command, COMMAND_SECONDS)
        return reply.integrity

    async def RunIntegrityCheck(
        self, request: pb.RunIntegrityCheckRequest, context: Any
    ) -> pb.RunIntegrityCheckResponse:
        """A check of everything."""
        if not self._viewer().is_admin:
            raise _missing_scope("admin")
        command = worker_pb2.Command(check_integrity=request)
        reply = await self._ask(request.worker_id, command, CHECK_SECONDS)
        return reply.check_integrity

    # -- inside --------------------------------------------------------------------------------------

    async def _ask(
        self, worker_id: str, command: worker_pb2.Command, timeout: float
    ) -> worker_pb2.CommandReply:
        """The one reply of a worker to a command. Raises Failure."""
        return await ask(self._kept(worker_id), command, timeout)

    def _viewer(self) -> Viewer:
        return self._viewer_of(current_call.get())

    def _kept(self, worker_id: str) -> KeptMirror:
        """The mirror of the worker that is named, or of the only one. Raises Failure."""
        return named_worker(self._mirrors, worker_id)

    def _whole(self, worker_id: str) -> KeptMirror:
        """The same with a map in it."""
        kept = self._kept(worker_id)
        if kept.mirror.standing is Standing.EMPTY:
            raise errors.not_ready()
        return kept

    def _watch_options(self, request: pb.WatchPageMapRequest) -> WatchOptions:
        found = Violations()
        _check_planes(found, request.planes)
        found.known("mode", request.mode, pb.WatchMode)
        interval = _duration(found, request, "min_interval", MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS, 0.1)
        heartbeat = _duration(
            found, request, "heartbeat_interval", MIN_HEARTBEAT_SECONDS, MAX_HEARTBEAT_SECONDS, 1.0
        )
        _refuse(found)
        if request.include_token_ids:
            raise errors.feature_disabled("watch_token_ids")
        after = page_codec.decode_revision(request.resume_after) if request.HasField("resume_after") else None
        return WatchOptions(
            viewer=self._viewer(),
            planes=messages.wanted_planes(request.planes),
            min_interval=interval,
            heartbeat_interval=heartbeat,
            with_sequences=not request.HasField("include_sequences") or request.include_sequences,
            wants_events=request.mode == pb.WATCH_MODE_EVENTS,
            resume_after=after,
        )

    def _uptime_ms(self, kept: KeptMirror) -> int:
        """The worker's clock at the last word of its feed, in ms since its start."""
        start = page_codec.to_ns(_geometry(kept).start_time)
        return max(0, kept.mirror.observe_time_ns - start) // 1_000_000

    async def _holders(self, mirror: PageMirror, page: int, ref_count: int) -> Sequence[SequenceRecord]:
        if not ref_count:
            return ()
        oldest = mirror.sequences.by_owner(int(mirror.planes["owners"][page]))
        if ref_count == 1 and oldest is not None:
            return (oldest,)
        records = list(mirror.sequences.records.values())  # page lists are never written to
        if len(records) <= 64:
            return holders(records, page, ref_count)
        return await asyncio.to_thread(holders, records, page, ref_count)

    def _events_of(self, kept: KeptMirror, page: int, limit: int, viewer: Viewer) -> list[pb.PageEvent]:
        ring, found = kept.ring, []
        for number, columns in ring.of_page(page, limit, kept.mirror.revision.number):  # not ahead of the map
            owner = columns["owners"]
            record = ring.owner_at(number, owner)
            if record is None and number >= ring.named_from:
                record = kept.mirror.sequences.by_owner(owner)  # had it before, and nobody took it since
            is_named = record is not None and viewer.may_name(record)
            request_id = record.request_id if record is not None and is_named else ""
            found.append(messages.page_event(number, columns, request_id))
        return found


def _geometry(kept: KeptMirror) -> pb.PoolGeometry:
    assert kept.facts is not None, "a map that is whole is of a worker that is known"
    return kept.facts.geometry


def _page(mirror: PageMirror, page: int, uptime_ms: int) -> pb.GetPageResponse:
    value = {name: int(plane[page]) for name, plane in mirror.planes.items()}
    response = pb.GetPageResponse(
        state=value["states"],  # type: ignore[arg-type]
        sealed=bool(value["flags"] & pb.PAGE_FLAG_SEALED),
        pinned=bool(value["flags"] & pb.PAGE_FLAG_PINNED),
        ref_count=value["ref_counts"],
        filled_slots=value["filled_slots"],
        parent_page_id=None if value["parent_page_ids"] == NO_PAGE else value["parent_page_ids"],
        child_page_ids=np.flatnonzero(mirror.planes["parent_page_ids"] == page).tolist(),
        hit_count=value["hit_counts"],
        revision=messages.revision(mirror.revision),
    )
    if value["states"] not in (pb.PAGE_STATE_FREE, pb.PAGE_STATE_RESERVED):
        # The planes count modulo 2^32.
        response.age.CopyFrom(to_duration(((uptime_ms - value["born_ms"]) & 0xFFFFFFFF) / 1000))
        response.idle.CopyFrom(to_duration(((uptime_ms - value["used_ms"]) & 0xFFFFFFFF) / 1000))
    return response


def _is_ones_own(mirror: PageMirror, row: pb.GetPageTableResponse, viewer: Viewer) -> bool:
    """Whether the viewer may name who has a row, which the mirror may still believe to be another's."""
    record = mirror.sequences.by_owner(row.owner)
    return record is not None and record.request_id == row.request_id and viewer.may_name(record)


def _check_page(mirror: PageMirror, page: int) -> None:
    if page >= mirror.page_count:
        raise errors.worker_not_found(
            f"worker {mirror.worker_id} has no page {page}, only {mirror.page_count}"
        )


def _check_planes(found: Violations, names: Sequence[str]) -> None:
    if len(names) > MAX_PLANES:
        found.add("planes", f"{len(names)} are more than {MAX_PLANES}")
    for number, name in enumerate(names[:MAX_PLANES]):
        if name not in PLANES:
            found.add(f"planes[{number}]", f"{name[:64]!r} is no plane of PageMap")


def _duration(found: Violations, request: Any, name: str, low: float, high: float, default: float) -> float:
    if not request.HasField(name):
        return default
    value = seconds(getattr(request, name))
    if not low <= value <= high:
        found.add(name, f"{value:g} s is not in [{low:g}, {high:g}] s")
    return value


def _check_estimate(request: pb.EstimateCacheRequest) -> None:
    """Raises Failure with all that is wrong, but for what only the worker knows."""
    found = Violations()
    for name, most in (("pool_slots", 32), ("page_sizes", 8), ("eviction_policies", 8)):
        if len(getattr(request, name)) > most:
            found.add(name, f"{len(getattr(request, name))} are more than {most}")
    lengths = (
        len(request.pool_slots) or 8,
        len(request.page_sizes) or 1,
        len(request.eviction_policies) or 1,
    )
    if math.prod(lengths) > MAX_ESTIMATES:
        found.add("pool_slots", f"{math.prod(lengths)} combinations are more than {MAX_ESTIMATES}")
    if request.HasField("window") and not seconds(request.window) > 0:  # also NaN
        found.add("window", f"{seconds(request.window):g} s is not above 0 s")
    _refuse(found)


def _refuse(found: Violations) -> None:
    if found.found:
        raise errors.invalid_fields(found.found)


def _missing_scope(scope: str) -> Failure:
    return Failure(
        grpc.StatusCode.PERMISSION_DENIED, "MISSING_SCOPE", f"needs the scope {scope}", {"scope": scope}
    )
