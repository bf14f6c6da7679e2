"""Recordings of the flight recorder, through AdminService.

    with Recorder("127.0.0.1:50052") as recorder:
        recording = recorder.start(lookback_seconds=60)
        ...
        recorder.stop(recording.recording_id)
        recorder.download(recording.recording_id, Path("last.kvrec"))

The admin listener is another address than that of the other services.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvatlas.client.admin_channel import AdminChannel
from kvatlas.client.request import duration, in_range
from kvatlas.v1 import server_pb2


class Recorder(AdminChannel):
    """The flight recorders behind one admin listener. Thread-safe."""

    def start(
        self,
        worker_id: str = "",
        *,
        lookback_seconds: float = 0.0,
        max_seconds: float = 600.0,
        max_bytes: int = 0,
        include_token_ids: bool = False,
        note: str = "",
        rotate: bool = False,
    ) -> server_pb2.RecordingInfo:
        """Begins a recording, `lookback_seconds` ago as far as the worker knows. Raises RequestError."""
        request = server_pb2.StartRecordingRequest(
            worker_id=worker_id,
            include_token_ids=include_token_ids,
            note=note,
            rotate=rotate,
        )
        with in_range("max_bytes", max_bytes):
            request.max_bytes = max_bytes
        request.lookback.CopyFrom(duration(lookback_seconds))
        request.max_duration.CopyFrom(duration(max_seconds))
        answer: server_pb2.StartRecordingResponse = self._unary(self._stub.StartRecording, request)
        return answer.recording

    def stop(self, recording_id: str = "", *, worker_id: str = "") -> server_pb2.RecordingInfo:
        """Ends one; without an id the one that runs."""
        request = server_pb2.StopRecordingRequest(worker_id=worker_id, recording_id=recording_id)
        answer: server_pb2.StopRecordingResponse = self._unary(self._stub.StopRecording, request)
        return answer.recording

    def list(self, worker_id: str = "") -> Sequence[server_pb2.RecordingInfo]:
        """What is held, the newest first."""
        request = server_pb2.ListRecordingsRequest(worker_id=worker_id)
        answer: server_pb2.ListRecordingsResponse = self._unary(self._stub.ListRecordings, request)
        return answer.recordings

    def download(
        self,
        recording_id: str,
        path: Path,
        *,
        worker_id: str = "",
        timeout_seconds: float = 600.0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> server_pb2.RecordingInfo:
        """Writes an ended recording to a file; one that breaks off goes on where it stood.

        A file of that name stays as it was until the whole recording is there.
        """
        request = server_pb2.GetRecordingRequest(worker_id=worker_id, recording_id=recording_id)
        infos: list[server_pb2.RecordingInfo] = []

        def size_of(piece: server_pb2.GetRecordingResponse) -> int:
            infos.append(piece.recording)
            request.recording_id = piece.recording.recording_id
            return piece.recording.byte_count

        self._download(
            self._stub.GetRecording,
            request,
            path,
            size_of,
            timeout_seconds=timeout_seconds,
            on_progress=on_progress,
        )
        return infos[0]
