"""AdminService, on its own listener: the flight recorder of a worker.

Owns nothing. Recordings lie at the worker; a download is asked for piece by piece, so that neither process
ever holds a file.
"""

from typing import Any

from kvatlas.v1 import server_pb2 as pb
from kvatlas.v1 import server_pb2_grpc
from kvatlas.worker.v1 import worker_pb2
from service import errors
from service.fleet.mirrors import PageMirrors
from service.handlers.asking import ask, asked, named_worker
from service.handlers.validate import Violations, seconds

COMMAND_SECONDS = 10.0
MAX_RECORDING_SECONDS = 3600.0
MAX_RECORDING_BYTES = 1 << 30
MIN_RECORDING_BYTES = 64 << 10
MAX_NOTE = 256


class AdminServicer(server_pb2_grpc.AdminServiceServicer):
    """Handlers of AdminService."""

    def __init__(self, mirrors: PageMirrors) -> None:
        self._mirrors = mirrors

    async def StartRecording(
        self, request: pb.StartRecordingRequest, context: Any
    ) -> pb.StartRecordingResponse:
        """Begins a recording."""
        _check_start(request)
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
                        await context.write(piece)
                    elif wanted.first_byte < end:
                        raise errors.recording_not_found(wanted.recording_id)
                    is_first = False

    async def _ask(self, worker_id: str, command: worker_pb2.Command) -> worker_pb2.CommandReply:
        return await ask(named_worker(self._mirrors, worker_id), command, COMMAND_SECONDS)


def _check_start(request: pb.StartRecordingRequest) -> None:
    """Raises Failure with all that is wrong."""
    found = Violations()
    lookback = seconds(request.lookback)
    if not 0 <= lookback <= MAX_RECORDING_SECONDS:
        found.add("lookback", f"{lookback:g} s is not in [0, {MAX_RECORDING_SECONDS:g}] s")
    if request.HasField("max_duration"):
        longest = seconds(request.max_duration)
        if not 0.1 <= longest <= MAX_RECORDING_SECONDS:
            found.add("max_duration", f"{longest:g} s is not in [0.1, {MAX_RECORDING_SECONDS:g}] s")
    if request.max_bytes and not MIN_RECORDING_BYTES <= request.max_bytes <= MAX_RECORDING_BYTES:
        text = f"{request.max_bytes} is not in [{MIN_RECORDING_BYTES}, {MAX_RECORDING_BYTES}]"
        found.add("max_bytes", text)
    if len(request.note) > MAX_NOTE:
        found.add("note", f"{len(request.note)} characters, at most {MAX_NOTE}")
    if found.found:
        raise errors.invalid_fields(found.found)
