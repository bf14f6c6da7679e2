"""AdminService, on its own listener: what operators do to this process and to its workers.

Owns nothing. Recordings and profiles lie at the worker; a download is asked for piece by piece, so that
neither process ever holds a file.
"""

import asyncio
import logging
from typing import Any

from kvatlas.log_levels import LogLevels, UnknownLogger
from kvatlas.v1 import server_pb2 as pb
from kvatlas.v1 import server_pb2_grpc
from kvatlas.worker.v1 import worker_pb2
from service import errors
from service.errors import Violation
from service.fleet.mirrors import PageMirrors
from service.handlers import admin_checks as checks
from service.handlers.asking import ask, asked, named_worker, reachable_workers
from service.handlers.backstage import Backstage
from service.handlers.pins import Pinner
from service.handlers.validate import seconds
from service.request import AbortReason
from service.writing import write

COMMAND_SECONDS = 10.0
MAX_COMMAND_SECONDS = 60.0  # of those that compute; the worker keeps no call longer
DEFAULT_PINS = 100
LEVELS = {
    pb.LOG_LEVEL_DEBUG: logging.DEBUG,
    pb.LOG_LEVEL_INFO: logging.INFO,
    pb.LOG_LEVEL_WARNING: logging.WARNING,
    pb.LOG_LEVEL_ERROR: logging.ERROR,
}

log = logging.getLogger("service.admin")


class AdminServicer(server_pb2_grpc.AdminServiceServicer):
    """Handlers of AdminService."""

    def __init__(self, backstage: Backstage, mirrors: PageMirrors, pinner: Pinner) -> None:
        self._backstage = backstage
        self._mirrors = mirrors
        self._pinner = pinner
        self._levels = LogLevels()
        self._loop = asyncio.get_running_loop()

    # -- this process --------------------------------------------------------------------------------

    async def StartDrain(self, request: pb.StartDrainRequest, context: Any) -> pb.StartDrainResponse:
        """Takes nothing new from here on; the process ends when what runs has ended."""
        checks.check_drain(request)
        running = len(self._backstage.live)
        log.warning("event=drain_asked generations=%d", running)
        self._backstage.drain.start(seconds(request.grace) if request.HasField("grace") else None)
        self._backstage.board.set_draining(True)
        return pb.StartDrainResponse(running_requests=running)

    async def StopDrain(self, request: pb.StopDrainRequest, context: Any) -> pb.StopDrainResponse:
        """Takes requests again; UNAVAILABLE when it is too late."""
        if not self._backstage.drain.take_back():
            raise errors.draining()
        self._backstage.board.set_draining(False)
        return pb.StopDrainResponse()

    async def CancelRequests(
        self, request: pb.CancelRequestsRequest, context: Any
    ) -> pb.CancelRequestsResponse:
        """Ends generations of anyone."""
        checks.check_cancel(request)
        ids, labels = frozenset(request.request_ids), dict(request.labels)
        meant = [
            call for call in self._backstage.live.everything() if call.fits(ids, request.principal, labels)
        ]
        for call in meant:
            call.fail(errors.cancelled_by_operator(request.reason), AbortReason.OPERATOR)
        log.warning("event=requests_cancelled count=%d why=%r", len(meant), request.reason)
        return pb.CancelRequestsResponse(cancelled_ids=[call.request_id for call in meant])

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Any) -> pb.SetLogLevelResponse:
        """For a time, in this process or in a worker's."""
        checks.check_level(request)
        if request.worker_id:
            await self._ask(request.worker_id, worker_pb2.Command(log_level=request))
            return pb.SetLogLevelResponse()
        limit = seconds(request.duration) if request.HasField("duration") else None
        try:
            self._levels.set(request.logger, LEVELS[request.level], limit)
        except UnknownLogger:
            unknown = Violation("logger", f"this process has no logger {request.logger!r}")
            raise errors.invalid_fields([unknown]) from None
        if limit is not None:
            self._loop.call_later(limit + 0.01, self._levels.expire)
        log.warning("event=log_level logger=%r level=%s seconds=%s", request.logger, request.level, limit)
        return pb.SetLogLevelResponse()

    # -- the prefix cache ----------------------------------------------------------------------------

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Any
    ) -> pb.FlushPrefixCacheResponse:
        """Drops cached pages of one worker, or of all that are there."""
        checks.check_flush(request)
        kept = reachable_workers(self._mirrors, request.worker_id)
        command = worker_pb2.Command(flush=request)
        replies = await asyncio.gather(*(ask(each, command, COMMAND_SECONDS) for each in kept))
        return pb.FlushPrefixCacheResponse(
            freed_pages=sum(reply.flush.freed_pages for reply in replies),
            unindexed_pages=sum(reply.flush.unindexed_pages for reply in replies),
        )

    async def SetPinnedPrefix(
        self, request: pb.SetPinnedPrefixRequest, context: Any
    ) -> pb.SetPinnedPrefixResponse:
        """Pins or unpins on one worker, or on all that are there."""
        return pb.SetPinnedPrefixResponse(pins=await self._pinner.set(request, _patience(context)))

    async def ListPinnedPrefixes(
        self, request: pb.ListPinnedPrefixesRequest, context: Any
    ) -> pb.ListPinnedPrefixesResponse:
        """Pins by name and worker; a cursor is the place of the last one in that order."""
        checks.check_list(request)
        pins = await self._pinner.list(request.worker_id, COMMAND_SECONDS)
        if request.cursor:
            name, _, worker_id = request.cursor.partition("/")
            pins = [pin for pin in pins if (pin.name, pin.worker_id) > (name, worker_id)]
        most = request.max_results or DEFAULT_PINS
        page = pins[:most]
        cursor = f"{page[-1].name}/{page[-1].worker_id}" if len(pins) > most else ""
        return pb.ListPinnedPrefixesResponse(pins=page, next_cursor=cursor)

    # -- profiles and recordings ---------------------------------------------------------------------

    async def CaptureProfile(
        self, request: pb.CaptureProfileRequest, context: Any
    ) -> pb.CaptureProfileResponse:
        """Answers when the steps have run, or shortly before the deadline."""
        checks.check_profile(request)
        kept = named_worker(self._mirrors, request.worker_id)
        command = worker_pb2.Command(profile=request)
        reply = await ask(kept, command, _patience(context), errors.deadline_passed)
        return reply.profile

    async def GetProfile(self, request: pb.GetProfileRequest, context: Any) -> None:
        """The bytes of one."""
        kept = named_worker(self._mirrors, request.worker_id)
        wanted = pb.GetProfileRequest()
        wanted.CopyFrom(request)
        end = wanted.first_byte + 1
        is_first = True
        while is_first or wanted.first_byte < end:
            async with asked(kept, worker_pb2.Command(get_profile=wanted), COMMAND_SECONDS) as replies:
                async for reply in replies:
                    piece = reply.get_profile
                    if is_first:
                        end, wanted.file_name = piece.byte_count, piece.file_name  # the same one to the end
                    else:
                        piece.ClearField("byte_count")
                        piece.ClearField("file_name")
                    wanted.first_byte = piece.first_byte + len(piece.data)
                    if not piece.data and not is_first:
                        raise errors.profile_not_found(wanted.file_name)
                    await write(context, piece)
                    is_first = False

    async def StartRecording(
        self, request: pb.StartRecordingRequest, context: Any
    ) -> pb.StartRecordingResponse:
        """Begins a recording."""
        checks.check_recording(request)
        reply = await self._ask(request.worker_id, worker_pb2.Command(start_recording=request))
        return reply.start_recording

    async def StopRecording(self, request: pb.StopRecordingRequest, context: Any) -> pb.StopRecordingResponse:
        """Ends one."""
        reply = await self._ask(request.worker_id, worker_pb2.Command(stop_recording=request))
        return reply.stop_recording

    async def ListRecordings(
        self, request: pb.ListRecordingsRequest, context: Any
    ) -> pb.ListRecordingsResponse:
        """What is held."""
        reply = await self._ask(request.worker_id, worker_pb2.Command(list_recordings=request))
        return reply.list_recordings

    async def GetRecording(self, request: pb.GetRecordingRequest, context: Any) -> None:
        """The bytes of one that ended."""
        kept = named_worker(self._mirrors, request.worker_id)
        wanted = pb.GetRecordingRequest()
        wanted.CopyFrom(request)
        end = wanted.first_byte + 1
        is_first = True
        while is_first or wanted.first_byte < end:
            async with asked(kept, worker_pb2.Command(get_recording=wanted), COMMAND_SECONDS) as replies:
                async for reply in replies:
                    piece = reply.get_recording
                    if piece.HasField("recording"):
                        end = piece.recording.byte_count
                        wanted.recording_id = piece.recording.recording_id  # the same one to the end
                    if not is_first:
                        piece.ClearField("recording")
                    wanted.first_byte = piece.first_byte + len(piece.data)
                    if piece.data or is_first:
                        await write(context, piece)
                    elif wanted.first_byte < end:
                        raise errors.recording_not_found(wanted.recording_id)
                    is_first = False

    async def _ask(self, worker_id: str, command: worker_pb2.Command) -> worker_pb2.CommandReply:
        return await ask(named_worker(self._mirrors, worker_id), command, COMMAND_SECONDS)


def _patience(context: Any) -> float:
    """Seconds that a call which computes may take: the caller's, within what the worker keeps."""
    left = context.time_remaining()
    return MAX_COMMAND_SECONDS if left is None else min(float(left), MAX_COMMAND_SECONDS)
