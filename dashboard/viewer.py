"""One browser that watches one worker: what it has seen, what it wants, and the frames that follow.

Knows no sockets. Frames are bytes (frames.py) or text (JSON: hello, status, tick).
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from dashboard import frames
from dashboard.live_map import LiveMap
from dashboard.live_pages import Follower, LivePages

MIN_HZ, MAX_HZ, DEFAULT_HZ = 0.2, 30.0, 10.0
TICK_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
STATUS_SECONDS = 0.25  # at most, until a change of status is told
POLL_SECONDS = 0.02  # between two looks for news: a frame goes out as soon as there is something to tell

Frame = bytes | str


class Viewer:
    """State of one open page feed. Used on one event loop."""

    def __init__(self, pages: LivePages, wishes: Mapping[str, str]) -> None:
        self._pages = pages
        self._worker_id = wishes.get("worker", "")
        self._hz = _rate(wishes.get("hz"))
        self._wants_lists = wishes.get("lists") == "1"
        self._past_ms: float | None = None  # wanted
        self._shown_past_ms: float | None = None  # sent
        self._seen = -1  # revision of the live map
        self._seen_lists = -1
        self._epoch = -1
        self._told_status = ""
        self._counters: tuple[int, ...] = ()
        self._next_tick = 0.0
        self._last_frame = 0.0
        self._woken = asyncio.Event()

    def take_wish(self, wish: Mapping[str, Any]) -> None:
        """`hz`, `lists`, `at` (a past moment, ms since 1970) or `live`; others are passed over."""
        if "hz" in wish:
            self._hz = _rate(wish["hz"])
        if "lists" in wish:
            self._wants_lists, self._seen_lists = bool(wish["lists"]), -1
        at = wish.get("at")
        if isinstance(at, int | float) and math.isfinite(at):
            self._past_ms = float(at)
        if wish.get("live"):
            self._past_ms, self._shown_past_ms, self._seen, self._seen_lists = None, None, -1, -1
        self._woken.set()

    async def pause(self) -> None:
        """Until there is news, but no sooner than the rate allows; a wish is news, and so is silence."""
        self._woken.clear()
        now = time.monotonic()
        soonest, latest = self._last_frame + 1.0 / self._hz, now + max(STATUS_SECONDS, 1.0 / self._hz)
        while True:
            wait = min(max(POLL_SECONDS, soonest - now), max(POLL_SECONDS, latest - now))
            try:
                await asyncio.wait_for(self._woken.wait(), wait)
            except TimeoutError:
                now = time.monotonic()
                if now >= latest or (now >= soonest and self._has_news()):
                    return
                continue
            return

    def _has_news(self) -> bool:
        follower = self._pages.follower(self._worker_id)
        return self._past_ms is None and follower is not None and follower.live_map.revision != self._seen

    async def frames(self) -> AsyncIterator[Frame]:
        """What there is to tell now."""
        follower = self._pages.follower(self._worker_id)
        yield_status = self._status(follower)
        if yield_status:
            yield yield_status
        if follower is None or not follower.live_map.is_whole:
            return
        live = follower.live_map
        geometry = live.geometry()
        if geometry.epoch != self._epoch:
            self._epoch, self._seen, self._seen_lists, self._counters = geometry.epoch, -1, -1, ()
            self._shown_past_ms = None  # with hello the browser forgets what it shows
            yield _hello(live)
        if self._past_ms is not None:
            async for frame in self._past(live, self._past_ms):
                yield frame
        else:
            async for frame in self._present(live):
                yield frame
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            yield self._tick(live, follower)

    async def _present(self, live: LiveMap) -> AsyncIterator[Frame]:
        change = live.since(self._seen) if self._seen >= 0 else None
        if change is None:
            whole = live.whole()
            self._seen = whole.revision
            parts = frames.snapshot_parts(
                whole.revision, whole.clock_ms, whole.idle_ms, whole.columns, is_wide=live.is_wide
            )
            async for part in _in_thread(parts):
                yield part
            self._last_frame = time.monotonic()
        else:
            self._seen = change.revision
            if len(change.page_ids) or time.monotonic() - self._last_frame >= HEARTBEAT_SECONDS:
                self._last_frame = time.monotonic()
                yield frames.delta(
                    change.revision, change.clock_ms, change.page_ids, change.columns, is_wide=live.is_wide
                )
        if self._wants_lists:
            with live.lock:
                is_all, owners, page_lists = live.lists_since(self._seen_lists)
                self._seen_lists = live.revision
            if owners or is_all:
                yield frames.lists(self._seen, live.clock_ms, owners, page_lists, is_all=is_all)

    async def _past(self, live: LiveMap, past_ms: float) -> AsyncIterator[Frame]:
        """The map at a moment, once for each moment that is asked for."""
        if self._shown_past_ms == past_ms:
            return
        self._shown_past_ms = past_ms
        past = await asyncio.to_thread(live.past, past_ms)
        if past is None or len(past.columns) != live.geometry().page_count:
            if self._past_ms == past_ms:  # of a pool of another size: what is now stands in for it
                self.take_wish({"live": True})
            return
        idle = np.uint32(past.uptime_ms) - past.used_ms
        parts = frames.snapshot_parts(
            live.revision, past.clock_ms, idle, past.columns, is_wide=live.is_wide, is_past=True
        )
        async for part in _in_thread(parts):
            yield part

    def _status(self, follower: Follower | None) -> str | None:
        """A text frame where the status changed; while it is stale, each second."""
        if follower is None:
            kind, reason, age = "connecting", self._pages.failure or "waiting for the list of workers", 0.0
        else:
            status = follower.status
            kind, reason, age = status.kind, status.reason, status.age_seconds
        key = f"{kind} {reason}" + (f" {age:.0f}" if kind != "live" else "")
        if key == self._told_status:
            return None
        self._told_status = key
        return json.dumps({"type": "status", "status": kind, "reason": reason, "age_ms": round(age * 1000)})

    def _tick(self, live: LiveMap, follower: Follower) -> str:
        totals, counts = live.totals(), live.counts()
        names = ("allocations_total", "evictions_total", "preemptions_total")
        counters = tuple(totals[name] for name in names)
        # A counter that falls means a new life, never a negative number.
        since = [max(0, now - then) for now, then in zip(counters, self._counters or counters, strict=True)]
        self._counters = counters
        load = follower.load
        return json.dumps(
            {
                "type": "tick",
                "counts": counts,
                "allocated": since[0],
                "evicted": since[1],
                "preempted": since[2],
                "running": load.running_sequences if load else 0,
                "waiting": load.waiting_requests if load else 0,
                "clock_ms": live.clock_ms,
                "history_start_ms": live.history.start_ms,
            }
        )


async def _in_thread(parts: Any) -> AsyncIterator[bytes]:
    """Parts of a generator that computes, taken in a thread one by one."""
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part


def _hello(live: LiveMap) -> str:
    shape = live.geometry()
    return json.dumps(
        {
            "type": "hello",
            "version": frames.VERSION,
            "worker": shape.worker_id,
            "epoch": str(shape.epoch),  # u64: more than a number of JavaScript holds
            "page_count": shape.page_count,
            "page_size": shape.page_size,
            "page_bytes": shape.page_bytes,
            "dummy_page": shape.dummy_page,
            "start_ms": shape.start_ms,
            "restarted_ms": live.history.restarts[-1] if live.history.restarts else None,
        }
    )


def _rate(text: Any) -> float:
    """Frames a second from a wish."""
    try:
        rate = float(text)
    except (TypeError, ValueError):
        return DEFAULT_HZ
    return min(max(rate, MIN_HZ), MAX_HZ) if math.isfinite(rate) else DEFAULT_HZ
