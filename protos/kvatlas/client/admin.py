"""Operations of a service and its workers, through AdminService.

    with Admin("127.0.0.1:50052") as admin:
        admin.flush_prefix_cache()
        admin.pin_prefix("system", "You are a helpful assistant.")

For people with the `admin` scope. Recordings have a class of their own (recordings.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from kvatlas.client.admin_channel import AdminChannel, Progress
from kvatlas.client.channel import LONG_TIMEOUT_SECONDS
from kvatlas.client.request import Message, build_chat, duration
from kvatlas.v1 import server_pb2

LogLevel = Literal["debug", "info", "warning", "error"]
DOWNLOAD_TIMEOUT_SECONDS = 600.0


class Admin(AdminChannel):
    """One service process and the workers behind it. Thread-safe."""

    def start_drain(self, grace_seconds: float | None = None) -> int:
        """No new requests; the process exits when the running ones have ended, or after the grace.

        Requests that still run.
        """
        request = server_pb2.StartDrainRequest()
        if grace_seconds is not None:
            request.grace.CopyFrom(duration(grace_seconds))
        answer: server_pb2.StartDrainResponse = self._unary(self._stub.StartDrain, request)
        return answer.running_requests

    def stop_drain(self) -> None:
        """Takes a drain back while requests still run."""
        self._unary(self._stub.StopDrain, server_pb2.StopDrainRequest())

    def flush_prefix_cache(
        self,
        worker_id: str = "",
        *,
        tenant: str = "",
        salt: str | None = None,
        include_active: bool = False,
        include_pinned: bool = False,
    ) -> server_pb2.FlushPrefixCacheResponse:
        """Drops what the cache holds: of all workers and tenants, or of those that are named."""
        request = server_pb2.FlushPrefixCacheRequest(
            worker_id=worker_id,
            tenant=tenant,
            salt=salt,
            include_active=include_active,
            include_pinned=include_pinned,
        )
        answer: server_pb2.FlushPrefixCacheResponse = self._unary(
            self._stub.FlushPrefixCache, request, LONG_TIMEOUT_SECONDS
        )
        return answer

    def pin_prefix(
        self,
        name: str,
        prefix: str | Sequence[int] | Sequence[Message],
        *,
        worker_id: str = "",
        model: str = "",
        tenant: str = "",
        salt: str = "",
        ttl_seconds: float | None = None,
    ) -> Sequence[server_pb2.PinnedPrefix]:
        """Keeps the whole pages of a prefix, computed if the cache has none; the pin on each worker."""
        request = server_pb2.SetPinnedPrefixRequest(
            worker_id=worker_id, name=name, model=model, tenant=tenant, salt=salt
        )
        if isinstance(prefix, str):
            request.text = prefix
        elif prefix and isinstance(prefix[0], Message):
            request.chat.CopyFrom(build_chat(prefix))  # type: ignore[arg-type]  # all are messages
        else:
            request.token_ids.ids.extend(prefix)  # type: ignore[arg-type]  # all are ids
        if ttl_seconds is not None:
            request.ttl.CopyFrom(duration(ttl_seconds))
        return self._set_pin(request)

    def unpin_prefix(self, name: str, *, worker_id: str = "") -> None:
        """Lets go of a pin; harmless where there is none."""
        self._set_pin(server_pb2.SetPinnedPrefixRequest(worker_id=worker_id, name=name, remove=True))

    def pinned_prefixes(self, worker_id: str = "") -> Sequence[server_pb2.PinnedPrefix]:
        """All pins, by name and worker."""
        request = server_pb2.ListPinnedPrefixesRequest(worker_id=worker_id)
        pins: list[server_pb2.PinnedPrefix] = []
        while True:
            answer: server_pb2.ListPinnedPrefixesResponse = self._unary(
                self._stub.ListPinnedPrefixes, request
            )
            pins += answer.pins
            if not answer.next_cursor:
                return pins
            request.cursor = answer.next_cursor

    def cancel_requests(
        self,
        request_ids: Sequence[str] = (),
        *,
        principal: str = "",
        labels: Mapping[str, str] | None = None,
        reason: str = "",
    ) -> Sequence[str]:
        """Ends requests of anyone with status CANCELLED: those that fit all that is given; their ids."""
        request = server_pb2.CancelRequestsRequest(
            request_ids=request_ids, principal=principal, labels=labels, reason=reason
        )
        answer: server_pb2.CancelRequestsResponse = self._unary(self._stub.CancelRequests, request)
        return answer.cancelled_ids

    def set_log_level(
        self, level: LogLevel, *, logger: str = "", worker_id: str = "", seconds: float | None = None
    ) -> None:
        """Of the service, or of a worker; goes back after `seconds`."""
        request = server_pb2.SetLogLevelRequest(
            worker_id=worker_id, logger=logger, level=f"LOG_LEVEL_{level.upper()}"
        )
        if seconds is not None:
            request.duration.CopyFrom(duration(seconds))
        self._unary(self._stub.SetLogLevel, request)

    def capture_profile(
        self, steps: int = 100, *, worker_id: str = "", timeout_seconds: float = LONG_TIMEOUT_SECONDS
    ) -> server_pb2.CaptureProfileResponse:
        """Profiles the next steps of a worker; waits for them. `download_profile` fetches the file."""
        request = server_pb2.CaptureProfileRequest(worker_id=worker_id, steps=steps)
        answer: server_pb2.CaptureProfileResponse = self._unary(
            self._stub.CaptureProfile, request, timeout_seconds
        )
        return answer

    def download_profile(
        self,
        file_name: str,
        path: Path,
        *,
        worker_id: str = "",
        on_progress: Progress = lambda done, total: None,
    ) -> None:
        """Writes a profile to a file; a download that breaks off goes on where it stood."""
        request = server_pb2.GetProfileRequest(worker_id=worker_id, file_name=file_name)

        def size_of(piece: server_pb2.GetProfileResponse) -> int:
            request.file_name = piece.file_name
            return piece.byte_count

        self._download(
            self._stub.GetProfile,
            request,
            path,
            size_of,
            timeout_seconds=DOWNLOAD_TIMEOUT_SECONDS,
            on_progress=on_progress,
        )

    def _set_pin(self, request: server_pb2.SetPinnedPrefixRequest) -> Sequence[server_pb2.PinnedPrefix]:
        answer: server_pb2.SetPinnedPrefixResponse = self._unary(
            self._stub.SetPinnedPrefix, request, LONG_TIMEOUT_SECONDS
        )
        return answer.pins
