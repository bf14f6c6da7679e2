"""What the sync and the async watches (page map, load) share: the request, and when to connect again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.client.errors import DeadlineExceeded, KvatlasError, ServerFailure, Unavailable
from kvatlas.client.request import duration
from kvatlas.v1 import cache_pb2

if TYPE_CHECKING:
    from kvatlas.client.page_map import PageMap

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
WATCH_TIMEOUT_SECONDS = 1800.0
"""Deadline of one connection: the watch goes on after it."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What to watch."""

    worker_id: str
    interval_seconds: float
    planes: Sequence[str]
    timeout_seconds: float = WATCH_TIMEOUT_SECONDS


def watch_request(options: WatchOptions, page_map: "PageMap") -> cache_pb2.WatchPageMapRequest:
    """STATE mode on a new connection, going on after the revision that is held."""
    return cache_pb2.WatchPageMapRequest(
        worker_id=options.worker_id,
        mode=cache_pb2.WATCH_MODE_STATE,
        min_interval=duration(options.interval_seconds),
        planes=options.planes,
        resume_after=page_map.begin(),
    )


class Reconnect:
    """How long a watch tries to come back. `clock` counts seconds."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float]) -> None:
        self._limit = limit_seconds
        self._clock = clock
        self._lost_at: float | None = None
        self._attempt = 0

    def succeeded(self) -> None:
        """A message came."""
        self._lost_at, self._attempt = None, 0

    def wait_seconds(self, failure: KvatlasError) -> float:
        """Time to wait before the next attempt; raises `failure` where there is to be none."""
        if isinstance(failure, DeadlineExceeded):
            return 0.0  # the deadline of one connection, see WATCH_TIMEOUT_SECONDS
        is_transport = isinstance(failure, Unavailable) or (
            isinstance(failure, ServerFailure) and not failure.reason
        )
        self._lost_at = self._clock() if self._lost_at is None else self._lost_at
        if not is_transport or self._clock() - self._lost_at >= self._limit:
            raise failure
        self._attempt += 1
        return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(self._attempt - 1, 10), LAST_BACKOFF_SECONDS)
