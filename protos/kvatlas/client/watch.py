"""What blocking and asyncio watches (page map, load) share: requests, messages, when to connect again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvatlas.client.connection import CACHE, SERVER, Service
from kvatlas.client.errors import DeadlineExceeded, KvatlasError, ServerFailure, Unavailable
from kvatlas.client.request import duration
from kvatlas.v1 import cache_pb2, server_pb2

if TYPE_CHECKING:
    from kvatlas.client.page_map import PageMap

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
WATCH_TIMEOUT_SECONDS = 1800.0
"""Deadline of one connection: the watch goes on after it."""

LOOK_INTERVAL_SECONDS = 0.1

State = TypeVar("State")


class Reconnect:
    """How long a watch tries to come back; None: it is one look. `clock` counts seconds."""

    def __init__(self, limit_seconds: float | None, clock: Callable[[], float]) -> None:
        self._limit = limit_seconds
        self._clock = clock
        self._lost_at: float | None = None
        self._attempt = 0

    def succeeded(self) -> None:
        """A message came."""
        self._lost_at, self._attempt = None, 0

    def wait_seconds(self, failure: KvatlasError) -> float:
        """Time to wait before the next attempt; raises `failure` where there is to be none."""
        if self._limit is None:
            raise failure
        self._attempt += 1
        if isinstance(failure, DeadlineExceeded):
            # Of one connection, see WATCH_TIMEOUT_SECONDS; again without a message: not ours, a proxy's.
            return self._backoff_seconds() if self._attempt > 1 else 0.0
        is_transport = isinstance(failure, Unavailable) or (
            isinstance(failure, ServerFailure) and not failure.reason
        )
        self._lost_at = self._clock() if self._lost_at is None else self._lost_at
        if not is_transport or self._clock() - self._lost_at >= self._limit:
            raise failure
        return self._backoff_seconds()

    def _backoff_seconds(self) -> float:
        return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(self._attempt - 1, 10), LAST_BACKOFF_SECONDS)


@dataclass(frozen=True, slots=True)
class Watch(Generic[State]):
    """One watch over all its connections."""

    service: Service
    method: str
    request: Callable[[], Any]  # of the next connection
    read: Callable[[Any], State | None]  # what a message shows; None: nothing yet
    reconnect: Reconnect
    timeout_seconds: float = WATCH_TIMEOUT_SECONDS  # of one connection

    def take(self, message: Any) -> State | None:
        """What there is to see after a message."""
        self.reconnect.succeeded()
        return self.read(message)


def watch_load(interval_seconds: float, reconnect_seconds: float) -> Watch[server_pb2.Load]:
    """The load as the server pushes it."""
    request = server_pb2.WatchLoadRequest(interval=duration(interval_seconds))
    reconnect = Reconnect(reconnect_seconds, time.monotonic)
    return Watch(SERVER, "WatchLoad", lambda: request, lambda message: message.load, reconnect)


def watch_pages(
    worker_id: str, interval_seconds: float, planes: Sequence[str], reconnect_seconds: float
) -> "Watch[PageMap]":
    """A worker's page map: always the same object; a new connection goes on after the revision it holds."""
    from kvatlas.client.page_map import PageMap

    page_map = PageMap()

    def request() -> cache_pb2.WatchPageMapRequest:
        return cache_pb2.WatchPageMapRequest(
            worker_id=worker_id,
            mode=cache_pb2.WATCH_MODE_STATE,
            min_interval=duration(interval_seconds),
            planes=planes,
            resume_after=page_map.begin(),
        )

    def read(message: cache_pb2.WatchPageMapResponse) -> PageMap | None:
        return page_map if page_map.apply(message) else None

    return Watch(CACHE, "WatchPageMap", request, read, Reconnect(reconnect_seconds, time.monotonic))


def look_at_pages(worker_id: str, timeout_seconds: float) -> "Watch[PageMap]":
    """The same for its first map, which may never come: a worker may be lost before it has told its pages."""
    watch = watch_pages(worker_id, LOOK_INTERVAL_SECONDS, (), 0.0)
    return replace(watch, reconnect=Reconnect(None, time.monotonic), timeout_seconds=timeout_seconds)


def ended() -> KvatlasError:
    """What it is where a server ends a watch without a word."""
    return Unavailable("the server ended the watch", code="UNAVAILABLE")
