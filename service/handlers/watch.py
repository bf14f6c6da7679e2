"""WatchPageMap: a snapshot, then every change, merged while the watcher is slow.

Owns one watch: what the next message is and when it goes out. Each message is made when the one before
was written, so a watcher that does not read costs a byte per page and is never behind more than one pool.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvatlas.v1 import cache_pb2 as pb
from service import errors
from service.fleet.feed import EventColumns, Revision
from service.fleet.mirrors import KeptMirror
from service.fleet.page_mirror import FrozenMap
from service.fleet.page_watch import PageWatch
from service.handlers import cache_messages as messages
from service.handlers.cache_messages import Viewer
from service.handlers.convert import to_timestamp
from service.health import HealthBoard
from service.writing import write

PAGES_PER_PART = 65_536  # 1.97 MB with all planes: a client's default limit of 4 MiB is never met
SEQUENCES_PER_TURN = 64  # encoded before other work gets its turn: 5 us each
EVENTS_PER_MESSAGE = 16_384
OVERDUE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a watcher asked for, with defaults filled in."""

    viewer: Viewer
    planes: list[str]
    min_interval: float = 0.1
    heartbeat_interval: float = 1.0
    with_sequences: bool = True
    wants_events: bool = False
    resume_after: Revision | None = None


class MapWatcher:
    """One call of WatchPageMap."""

    def __init__(
        self,
        kept: KeptMirror,
        options: WatchOptions,
        board: HealthBoard,
        context: Any,
        *,
        on_lag: Callable[[], None],
    ) -> None:
        self._kept = kept
        self._on_lag = on_lag  # a reader of events fell behind the ring
        self._mirror = kept.mirror
        self._options = options
        self._board = board
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._wake: Callable[[], None] = self._news.set
        self._watch = PageWatch(self._mirror, options.planes, self._wake)
        self._number = 0  # of the revision that the watcher holds
        self._sent = 0.0  # loop's clock of the last message
        self._had_snapshot = False
        self._told_violations = kept.violations.total

    async def run(self) -> None:
        """Until the call ends or the drain begins, which raises Failure."""
        drain = self._loop.create_task(self._board.drain_started.wait())
        drain.add_done_callback(lambda _: self._news.set())
        if self._options.wants_events:
            self._kept.event_watchers.add(self._wake)
        try:
            await self._start()
            while True:
                await self._tell()
                await self._pause()
        finally:
            self._kept.event_watchers.discard(self._wake)
            drain.cancel()
            self._watch.close()

    async def _start(self) -> None:
        """From the revision that the watcher has, where that can be; else the first turn is a snapshot."""
        while not self._watch.is_current:
            await self._pause()
        if self._options.wants_events:
            await self._kept.events()
        after = self._options.resume_after
        if after is None or not self._resume(after):
            return
        self._number = after.number
        self._had_snapshot = True
        if self._options.wants_events:
            return
        if not await self._tell_change():
            await self._tell_life()

    def _resume(self, after: Revision) -> bool:
        if self._options.wants_events and self._kept.ring.after(after.number, limit=0) is None:
            return False
        return self._watch.resume(after)

    async def _tell(self) -> None:
        """One turn: what there is to say, or a sign of life where one is due."""
        if not self._watch.is_current:
            return  # the watcher's map grows stale, and it sees that by our silence
        if self._watch.needs_snapshot:
            await self._tell_snapshot()
        elif self._options.wants_events:
            if not await self._tell_events():
                await self._tell_life_if_due()
        elif not await self._tell_change():
            await self._tell_life_if_due()

    async def _pause(self) -> None:
        """Until there is news, but no sooner than the interval allows. Failure when the drain begins."""
        due = self._sent + self._options.min_interval
        if (rest := due - self._loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._board.drain_started.wait()
        if not self._news.is_set():
            patience = self._sent + self._options.heartbeat_interval - self._loop.time()
            # Overdue while the feed is silent: look again now and then.
            timer = self._loop.call_later(patience if patience > 0 else OVERDUE_SECONDS, self._wake)
            try:
                await self._news.wait()
            finally:
                timer.cancel()
        self._news.clear()
        if self._board.is_draining:
            raise errors.draining()
        if self._kept.is_gone:
            raise errors.worker_not_found(f"worker {self._mirror.worker_id} is gone for good")

    # -- messages ------------------------------------------------------------------------------------

    async def _write(self, message: pb.WatchPageMapResponse) -> None:
        message.violations.extend(self._kept.violations.after(self._told_violations))
        self._told_violations = self._kept.violations.total
        await write(self._context, message)
        self._sent = self._loop.time()

    async def _tell_change(self) -> bool:
        change = self._watch.take()
        moved = change.revision.number - change.base_number
        with_sequences = self._options.with_sequences
        if messages.delta_bytes(change, with_sequences=with_sequences) > messages.MAX_DELTA_BYTES:
            self._watch.is_lagging = True  # as after a flush of a large pool: a snapshot comes in parts
            await self._tell_snapshot()
            return True
        has_news = not change.is_empty if with_sequences else bool(len(change.page_ids))
        self._number = change.revision.number
        if not has_news and not moved:
            return False
        await self._write(
            pb.WatchPageMapResponse(
                revision=messages.revision(change.revision),
                base_number=change.base_number,
                delta=messages.delta(
                    change,
                    self._options.viewer,
                    with_sequences=with_sequences,
                    merged_events=moved,
                ),
                stats=messages.stats(change.totals),
                observe_time=to_timestamp(change.observe_time_ns),
            )
        )
        return True

    async def _tell_events(self) -> bool:
        """Events after the watcher's revision; what is in the ring but not yet in the map waits for it."""
        ring = await self._kept.events()
        if self._watch.needs_snapshot or not self._watch.is_current:
            return True  # meanwhile: the next turn has to do with it
        wanted = min(self._mirror.revision.number - self._number, EVENTS_PER_MESSAGE)
        self._watch.skip()  # only its snapshots are of use here
        if wanted <= 0 or ring.last_number <= self._number:
            return False
        columns = ring.after(self._number, wanted)
        if columns is None:
            self._on_lag()
            self._watch.is_lagging = True
            await self._tell_snapshot()
            return True
        await self._write_events(columns)
        if self._number < min(self._mirror.revision.number, ring.last_number):
            self._news.set()  # there is more
        return True

    async def _write_events(self, columns: EventColumns) -> None:
        base, self._number = self._number, columns.last_number
        at = Revision(self._mirror.revision.epoch, columns.last_number, int(columns.planes["steps"][-1]))
        await self._write(
            pb.WatchPageMapResponse(
                revision=messages.revision(at),
                base_number=base,
                events=messages.events(columns, self._options.viewer),
                stats=messages.stats(self._mirror.totals),
                observe_time=to_timestamp(self._mirror.observe_time_ns),
            )
        )

    async def _tell_life_if_due(self) -> None:
        # Only while the worker's feed lives: a watcher is not told that all is well when nobody knows.
        is_due = self._loop.time() - self._sent >= self._options.heartbeat_interval - 0.02
        is_due |= self._kept.violations.total > self._told_violations
        if is_due and self._kept.is_live:
            await self._tell_life()

    async def _tell_life(self) -> None:
        mirror = self._mirror
        at = Revision(mirror.revision.epoch, self._number, mirror.revision.step)
        await self._write(
            pb.WatchPageMapResponse(
                revision=messages.revision(at),
                base_number=self._number,
                heartbeat=pb.WatchHeartbeat(),
                stats=messages.stats(mirror.totals),
                observe_time=to_timestamp(mirror.observe_time_ns),
            )
        )

    # -- snapshots -----------------------------------------------------------------------------------

    def _cause(self) -> Any:
        if self._watch.saw_new_epoch:
            return pb.SNAPSHOT_CAUSE_EPOCH_CHANGED
        if self._had_snapshot:
            return pb.SNAPSHOT_CAUSE_LAGGED if self._watch.is_lagging else pb.SNAPSHOT_CAUSE_RESYNCED
        after = self._options.resume_after
        if after is None:
            return pb.SNAPSHOT_CAUSE_INITIAL
        same = after.epoch == self._mirror.revision.epoch
        return pb.SNAPSHOT_CAUSE_LAGGED if same else pb.SNAPSHOT_CAUSE_EPOCH_CHANGED

    async def _tell_snapshot(self) -> None:
        cause = self._cause()
        frozen = self._watch.begin()
        self._number = frozen.revision.number
        try:
            await self._write_snapshot(frozen, cause)
        finally:
            self._mirror.thaw(frozen)
        self._had_snapshot = True

    async def _write_snapshot(self, frozen: FrozenMap, cause: Any) -> None:
        options = self._options
        followed = [each for each in frozen.records if messages.is_followed(each, options.viewer)]
        groups = messages.parts_of_sequences(followed) if options.with_sequences else []
        left = -(-frozen.page_count // PAGES_PER_PART) + len(groups)
        geometry = self._kept.facts.geometry if self._kept.facts is not None else None
        while frozen.pages_left:
            left -= 1
            first = frozen.page_count - frozen.pages_left
            window = frozen.take(PAGES_PER_PART, options.planes)
            part = pb.SnapshotChunk(
                geometry=geometry if not first else None,
                first_page_id=first,
                page_count=frozen.page_count - frozen.pages_left - first,
                pages=messages.page_map(window),
                cause=cause,
                chunks_left=left,
            )
            await self._write_part(frozen, part)
        for group in groups:
            left -= 1
            part = pb.SnapshotChunk(cause=cause, chunks_left=left)
            for number, run in enumerate(group, start=1):
                count = frozen.token_count(run.record)
                part.sequences.append(
                    messages.sequence(run.record, options.viewer, count, first=run.first, end=run.end)
                )
                if number % SEQUENCES_PER_TURN == 0:
                    await asyncio.sleep(0)
            await self._write_part(frozen, part)

    async def _write_part(self, frozen: FrozenMap, part: pb.SnapshotChunk) -> None:
        await self._write(
            pb.WatchPageMapResponse(
                revision=messages.revision(frozen.revision),
                snapshot=part,
                stats=messages.stats(frozen.totals),
                observe_time=to_timestamp(frozen.observe_time_ns),
            )
        )
