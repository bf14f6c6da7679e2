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
from types import TracebackType
from typing import Any, Self

import grpc

from kvatlas.client.channel import SHORT_TIMEOUT_SECONDS, channel_options
from kvatlas.client.errors import KvatlasError, from_rpc_error
from kvatlas.v1 import server_pb2, server_pb2_grpc

DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"
MAX_RETRIES = 5  # of a download that broke off, each from where it stood


class Recorder:
    """The flight recorders behind one admin listener. Thread-safe."""

    def __init__(self, address: str = DEFAULT_ADMIN_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, channel_options({}))
        self._stub: Any = server_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

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
        """Begins a recording, `lookback_seconds` ago as far as the worker still knows."""
        request = server_pb2.StartRecordingRequest(
            worker_id=worker_id,
            max_bytes=max_bytes,
            include_token_ids=include_token_ids,
            note=note,
            rotate=rotate,
        )
        request.lookback.FromMicroseconds(round(lookback_seconds * 1e6))
        request.max_duration.FromMicroseconds(round(max_seconds * 1e6))
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
        """Writes an ended recording to a file; one that breaks off goes on where it stood."""
        request = server_pb2.GetRecordingRequest(worker_id=worker_id, recording_id=recording_id)
        info: server_pb2.RecordingInfo | None = None
        failures = 0
        with path.open("wb") as file:
            while info is None or request.first_byte < info.byte_count:
                before = request.first_byte
                call = self._stub.GetRecording(request, timeout=timeout_seconds)
                try:
                    for piece in call:
                        if piece.HasField("recording"):
                            info = piece.recording
                            request.recording_id = info.recording_id
                        file.write(piece.data)
                        request.first_byte = piece.first_byte + len(piece.data)
                        on_progress(request.first_byte, info.byte_count if info is not None else 0)
                except grpc.RpcError as error:
                    failure = from_rpc_error(error, self.address)
                    failures = 0 if request.first_byte > before else failures + 1
                    if info is None or not _may_go_on(failure) or failures > MAX_RETRIES:
                        raise failure from None
                finally:
                    call.cancel()
        return info

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=SHORT_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None


def _may_go_on(failure: KvatlasError) -> bool:
    return failure.code in ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN") and not failure.reason
