"""The subscriber: follows every worker of one service, however many people look.

One thread per worker and one for the list of workers; each ends with `stop`. They write to a LiveMap and to
a Status, scripts and sockets read those. Never calls Streamlit.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dashboard.client import HEARTBEAT_SECONDS, Source, Watch
from dashboard.facts import ServerFacts, WorkerFacts, WorkerLoad
from dashboard.live_map import LiveMap
from kvatlas.client.errors import (
    DeadlineExceeded,
    Incomplete,
    InvalidRequest,
    KvatlasError,
    NotFound,
    PermissionDenied,
    Refused,
)

STALE_SECONDS = 2.25 * HEARTBEAT_SECONDS  # of silence: painted well before the third second is over
ROSTER_SECONDS = 0.5  # between two looks at who is there: a worker that the service has lost is told by it
LOAD_SECONDS = 2.0
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.2, 5.0
QUICK_BACKOFF_SECONDS = 1.0  # while a map is shown: who watches wants it back
MAX_WORKERS = 64

log = logging.getLogger("dashboard.live_pages")


@dataclass(frozen=True, slots=True)
class Status:
    """How a worker's map stands."""

    kind: str = "connecting"  # live, stale, resync, no_service, denied, limit, gone, bug
    reason: str = ""  # in words, for people
    age_seconds: float = 0.0  # since the last message


class Follower:
    """One worker: its map, kept current by a thread."""

    def __init__(
        self, source: Source, worker_id: str, history_seconds: int, clock: Callable[[], float]
    ) -> None:
        self.worker_id = worker_id
        self.live_map = LiveMap(worker_id, history_seconds)
        self.facts: WorkerFacts | None = None
        self.load: WorkerLoad | None = None
        self.gone_at: float | None = None  # since when the service no longer knows it
        self.lost_at: float | None = None  # when the service last said that it has lost it
        self.faults = 0  # messages that did not fit: bugs
        self._source = source
        self._clock = clock
        self._heard_at = self._fresh_at = clock()  # any message; one with news of the worker
        self._status = Status()
        self._watch: Watch | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pages-{worker_id}", daemon=True)

    def start(self) -> None:
        """Begins to follow."""
        self._thread.start()

    def end(self) -> None:
        """Asks the thread to end; `join` waits for it."""
        self._ended.set()
        watch = self._watch
        if watch is not None:
            watch.cancel()

    def join(self) -> None:
        """Waits until the thread has ended; the watch is cancelled again in case it was just opened."""
        while self._thread.is_alive():
            self.end()
            self._thread.join(0.05)

    @property
    def status(self) -> Status:
        """As of now; silence makes it stale."""
        now = self._clock()
        age = now - self._fresh_at
        status = replace(self._status, age_seconds=age)
        if status.kind in ("live", "resync") and age > STALE_SECONDS:
            silent = "service" if now - self._heard_at > STALE_SECONDS else "worker"
            return replace(status, kind="stale", reason=f"nothing is heard of the {silent}")
        if status.kind in ("live", "resync") and self._is_lost:
            return replace(status, kind="stale", reason="the service has lost the worker")
        if self.gone_at is not None and status.kind != "live":
            return replace(status, kind="gone", reason="the service no longer knows this worker")
        return status

    @property
    def _is_lost(self) -> bool:
        """Said by the service, and nothing newer was heard: no need to wait for silence."""
        return self.lost_at is not None and self._fresh_at < self.lost_at

    def _run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            try:
                self._follow()  # ended without a failure: the server may close a watch in order
                failures, wait = 0, FIRST_BACKOFF_SECONDS
            except KvatlasError as failure:
                failures = 0 if isinstance(failure, DeadlineExceeded) else failures + 1
                wait = self._pause_after(failure, failures)
            except Exception:  # whatever a message breaks: the thread goes on, the page and the log say so
                log.exception("event=follower_failed worker=%s", self.worker_id)
                self._status = Status("bug", "the dashboard failed on a message; its log says how")
                self.live_map.page_map.is_stale = True  # asks for a snapshot
                wait = LAST_BACKOFF_SECONDS
            self._ended.wait(wait)

    def _follow(self) -> None:
        """One connection, until it ends."""
        with self.live_map.locked() as page_map:
            resume_after = page_map.begin()
        watch = self._source.watch(self.worker_id, resume_after)
        self._watch = watch
        try:
            for message in watch:
                before = self.live_map.clock_ms
                is_whole = self.live_map.apply(message)
                self._heard_at = self._clock()
                is_sign_of_life = message.WhichOneof("event") == "heartbeat"
                # A service that has not heard of its worker still sends heartbeats, for seconds.
                if (
                    not is_sign_of_life
                    or not message.HasField("observe_time")
                    or self.live_map.clock_ms > before
                ):
                    self._fresh_at = self._heard_at
                self._status = Status("live" if is_whole else "resync")
                if self._ended.is_set():
                    return
        finally:
            watch.cancel()

    def _pause_after(self, failure: KvatlasError, failures: int) -> float:
        """Notes why the connection ended; seconds until the next attempt."""
        if isinstance(failure, Incomplete):
            self.faults += 1
            log.error('event=feed_broken worker=%s why="%s"', self.worker_id, failure.message)
            with self.live_map.locked() as page_map:
                page_map.is_stale = True  # begin() then asks for a snapshot
            self._status = Status("bug", failure.message)
            return 0.0 if self.faults < 3 else QUICK_BACKOFF_SECONDS
        self._status = _status_of(failure)
        if isinstance(failure, PermissionDenied):
            return LAST_BACKOFF_SECONDS  # a token may be replaced; nothing else helps
        if failure.retry_seconds:
            return min(failure.retry_seconds, LAST_BACKOFF_SECONDS)
        last = QUICK_BACKOFF_SECONDS if self.live_map.is_whole else LAST_BACKOFF_SECONDS
        return min(FIRST_BACKOFF_SECONDS * 2.0 ** max(0, min(failures, 10) - 1), last)


def _status_of(failure: KvatlasError) -> Status:
    if isinstance(failure, PermissionDenied):
        return Status("denied", str(failure))
    if isinstance(failure, Refused):
        return Status("limit", str(failure))
    if isinstance(failure, NotFound | InvalidRequest):
        return Status("gone", str(failure))
    if isinstance(failure, DeadlineExceeded):
        return Status("resync", "the connection is renewed")
    return Status("no_service", str(failure))


class LivePages:
    """All workers of one service."""

    def __init__(
        self, source: Source, history_seconds: int = 600, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = source
        self._history_seconds = history_seconds
        self._clock = clock
        self._followers: dict[str, Follower] = {}
        self._lock = threading.Lock()  # of the table above
        self._server: ServerFacts | None = None
        self._failure = ""
        self._failure_kind = ""
        self._next_load = -math.inf
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> "LivePages":
        """Begins to follow; calling it again does nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pages-roster", daemon=True)
                self._thread.start()
        return self

    def stop(self) -> None:
        """Ends all threads and calls, and waits for them."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for follower in self.followers():
            follower.end()
        self.source.close()
        for follower in self.followers():
            follower.join()

    @property
    def server(self) -> ServerFacts | None:
        """What the service last said of itself; None: nothing yet."""
        return self._server

    @property
    def failure(self) -> str:
        """Why the service does not answer; "" while it does."""
        return self._failure

    @property
    def failure_kind(self) -> str:
        """The same as a kind of Status."""
        return self._failure_kind

    def followers(self) -> list[Follower]:
        """By worker id."""
        with self._lock:
            return [self._followers[name] for name in sorted(self._followers)]

    def follower(self, worker_id: str) -> Follower | None:
        """Of a worker; "" is the only one. None: there is no such, or there are several."""
        with self._lock:
            if worker_id:
                return self._followers.get(worker_id)
            return next(iter(self._followers.values())) if len(self._followers) == 1 else None

    def _run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            try:
                self._look()
                self._failure, failures = "", 0
                wait = ROSTER_SECONDS
            except KvatlasError as failure:
                self._failure, self._failure_kind = str(failure), _status_of(failure).kind
                failures += 1
                wait = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 10), LAST_BACKOFF_SECONDS)
            except Exception:  # as above: one bad answer must not end the list for ever
                log.exception("event=roster_failed")
                self._failure_kind = "bug"
                self._failure = "the dashboard failed on the list of workers; its log says how"
                wait = LAST_BACKOFF_SECONDS
            self._ended.wait(wait)

    def _look(self) -> None:
        asked_at = self._clock()
        self._server = self.source.server()
        known = {worker.worker_id: worker for worker in self._server.workers if worker.worker_id}
        self._forget_gone()
        for worker_id in known:
            self._add(worker_id)
        for follower in self.followers():
            facts = known.get(follower.worker_id)
            follower.facts = facts or follower.facts
            follower.gone_at = None if facts else follower.gone_at or asked_at
            follower.lost_at = asked_at if facts and facts.state == "lost" else None
        if asked_at >= self._next_load:
            self._next_load = asked_at + LOAD_SECONDS
            self._look_at_load()

    def _look_at_load(self) -> None:
        loads = {load.worker_id: load for load in self.source.load()}
        for follower in self.followers():
            load = loads.get(follower.worker_id)
            if load is not None:
                follower.load = load
                follower.live_map.take_load(load.running_sequences, load.waiting_requests)

    def _forget_gone(self) -> None:
        """Workers that have been gone for as long as we look back; names may change with every start."""
        now = self._clock()
        for follower in self.followers():
            if follower.gone_at is not None and now - follower.gone_at > self._history_seconds:
                follower.end()
                with self._lock:
                    del self._followers[follower.worker_id]

    def _add(self, worker_id: str) -> None:
        with self._lock:
            if worker_id in self._followers or len(self._followers) >= MAX_WORKERS:
                return
            follower = Follower(self.source, worker_id, self._history_seconds, self._clock)
            self._followers[worker_id] = follower
        follower.start()
