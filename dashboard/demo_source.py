"""A source without a server: a demo pool behind the same calls that a service has.

Plays in real time, or stands still for pictures and tests (`is_frozen`). The figures of its what-if view are
real: the same arrivals are played through pools of the other sizes.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Unpack

import numpy as np

from dashboard import demo_messages, readings
from dashboard.client import AnswerStream, Prompt, Watch
from dashboard.demo_checks import check_pool
from dashboard.demo_pool import NO_PAGE, TICK_MS, DemoPool
from dashboard.demo_stream import DemoStream, pieces_of
from dashboard.facts import (
    CheckRun,
    Estimate,
    EstimateReport,
    IntegrityFacts,
    PageEventFacts,
    PageFacts,
    PageHolder,
    ServerFacts,
    TableRow,
    TokenizedPrompt,
    WorkerFacts,
    WorkerLoad,
)
from kvatlas.client.errors import InvalidRequest, NotFound
from kvatlas.client.request import Options
from kvatlas.v1 import cache_pb2 as pb

WARM_UP_SECONDS = 60.0  # played before anybody looks
ESTIMATE_SECONDS = 20.0
POOL_SHARES = (0.5, 0.75, 1.0, 1.5, 2.0)
FEATURES = frozenset({"prefix_cache", "pinning", "estimate_cache"})


class DemoSource:
    """One simulated worker."""

    def __init__(self, page_count: int = 4096, seed: int = 20, *, is_frozen: bool = False) -> None:
        self.pool = DemoPool(page_count, seed=seed).run(WARM_UP_SECONDS)
        self.is_frozen = is_frozen
        self.lock = threading.RLock()  # of the pool
        self._ended = threading.Event()
        self._last_tick = time.monotonic()

    @property
    def address(self) -> str:
        """For people."""
        return "a simulated pool"

    def play(self) -> None:
        """Moves the pool's clock to now."""
        with self.lock:
            if self.is_frozen:
                return
            while (now := time.monotonic()) - self._last_tick >= TICK_MS / 1000:
                self._last_tick = max(self._last_tick + TICK_MS / 1000, now - 1.0)
                self.pool.tick()

    def watch(self, worker_id: str, resume_after: pb.Revision | None) -> Watch:
        """Snapshot and changes. One watch at a time."""
        return _DemoWatch(self)

    def server(self) -> ServerFacts:
        """One service with one worker."""
        worker = WorkerFacts(
            demo_messages.WORKER_ID, self.pool.epoch, "serving", "simulated", "no device", "none"
        )
        return ServerFacts("simulated", "demo", "serving", FEATURES, (worker,))

    def load(self) -> Sequence[WorkerLoad]:
        """Running and waiting."""
        with self.lock:
            pool = self.pool
            totals = pool.totals
            asked = sum(totals[f"{name}_tokens_total"] for name in ("hit", "miss_cold", "miss_evicted"))
            return [
                WorkerLoad(
                    worker_id=demo_messages.WORKER_ID,
                    running_sequences=len(pool.running),
                    waiting_requests=len(pool.waiting),
                    available_pages=len(pool.free) + len(pool.cached),
                    total_pages=pool.page_count - 1,
                    output_tokens_per_second=40.0 * sum(not each.is_prefill for each in pool.running),
                    prompt_tokens_per_second=0.0,
                    prefix_hit_rate=totals["hit_tokens_total"] / max(1, asked),
                )
            ]

    def page(self, worker_id: str, page_id: int) -> PageFacts:
        """One page with its last events."""
        with self.lock:
            pool = self.pool
            if page_id >= pool.page_count:
                raise NotFound(f"page {page_id} of {pool.page_count}", code="NOT_FOUND")
            value = {name: int(plane[page_id]) for name, plane in pool.planes.items()}
            uptime = pool.now_ms - pool.epoch // 1_000_000
            return PageFacts(
                page_id=page_id,
                state=readings.name_of(pb.PageState, value["states"], "PAGE_STATE_"),
                is_sealed=bool(value["flags"] & pb.PAGE_FLAG_SEALED),
                is_pinned=bool(value["flags"] & pb.PAGE_FLAG_PINNED),
                ref_count=value["ref_counts"],
                filled_slots=value["filled_slots"],
                holders=tuple(
                    PageHolder(each.owner, each.request_id, 0, "decode", each.token_count)
                    for each in pool.running
                    if page_id in each.pages
                ),
                parent_page_id=None if value["parent_page_ids"] == NO_PAGE else value["parent_page_ids"],
                child_page_ids=tuple(np.flatnonzero(pool.planes["parent_page_ids"] == page_id).tolist()),
                hit_count=value["hit_counts"],
                age_seconds=(uptime - value["born_ms"]) / 1000,
                idle_seconds=(uptime - value["used_ms"]) / 1000,
                events=tuple(self._events(page_id)),
            )

    def table_rows(self, worker_id: str, rows: Sequence[int], *, from_device: bool) -> Sequence[TableRow]:
        """Rows by the books; a simulated pool has no device."""
        if from_device:
            raise InvalidRequest("a simulated pool has no device", reason="FEATURE_DISABLED")
        with self.lock:
            size = self.pool.page_size
            return [
                TableRow(
                    row=each.owner % 64,
                    owner=each.owner,
                    request_id=each.request_id,
                    token_count=each.token_count,
                    slots=tuple(page * size + offset for page in each.pages for offset in range(size)),
                )
                for each in self.pool.running
                if not rows or each.owner % 64 in rows
            ]

    def estimate(
        self, worker_id: str, page_sizes: Sequence[int], policies: Sequence[str], window_seconds: float
    ) -> EstimateReport:
        """The same arrivals through pools of other sizes; today's setting twice."""
        pool = self.pool
        counts = [round(share * (pool.page_count - 1)) + 1 for share in POOL_SHARES]
        estimates = [self._played(count) for count in counts]
        observed = estimates[POOL_SHARES.index(1.0)]
        tokens = sum(observed.tokens.values())
        requests = round(ESTIMATE_SECONDS * pool.rate)
        return EstimateReport(
            tuple(estimates), observed, 1.0, requests, tokens, ESTIMATE_SECONDS, pool.page_size
        )

    def integrity(self, worker_id: str) -> IntegrityFacts:
        """Checks of the books, done now."""
        with self.lock:
            return check_pool(self.pool)

    def run_integrity_check(self, worker_id: str) -> CheckRun:
        """The same: a simulated pool has no device to compare with."""
        facts = self.integrity(worker_id)
        return CheckRun(facts.violations, facts.violations_total, self.pool.page_count, 0, 0.0)

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A word is a token."""
        text = prompt if isinstance(prompt, str) else "\n".join(turn.content for turn in prompt)
        pieces = pieces_of(text)
        return TokenizedPrompt(text, pieces, 0, -(-len(pieces) // self.pool.page_size))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AnswerStream:
        """An answer about nothing; its pages are those of the pool."""
        text = prompt if isinstance(prompt, str) else "\n".join(turn.content for turn in prompt)
        return DemoStream(self.pool, self.lock, pieces_of(text), options)

    def close(self) -> None:
        """Ends the watch."""
        self._ended.set()

    def _events(self, page_id: int) -> Iterator[PageEventFacts]:
        for event in self.pool.events.get(page_id, ()):
            yield PageEventFacts(
                number=event.number,
                kind=readings.name_of(pb.PageEventType, event.kind, "PAGE_EVENT_TYPE_"),
                step=event.step,
                time_ms=event.time_ms,
                owner=event.owner,
                request_id=event.request_id,
                ref_count=event.ref_count,
                other_page_id=None if event.other_page == NO_PAGE else event.other_page,
            )

    def _played(self, page_count: int) -> Estimate:
        pool = DemoPool(
            page_count, self.pool.page_size, self.pool.seed, load_of=self.pool.load_of, keeps_events=False
        )
        pool.run(ESTIMATE_SECONDS)
        names = ("hit", "miss_cold", "miss_evicted", "unaligned")
        tokens = {name: pool.totals[f"{name}_tokens_total"] for name in names}
        return Estimate(
            pool_slots=(page_count - 1) * pool.page_size,
            page_size=pool.page_size,
            policy="lru",
            tokens=tokens,
            hit_ratio=tokens["hit"] / max(1, sum(tokens.values())),
            hit_ratio_error=0.0,
            evictions=pool.totals["evictions_total"],
            mean_wasted_slots=float(demo_messages.stats(pool).wasted_slots),
        )


class _DemoWatch:
    """Messages as a service sends them, ten a second."""

    def __init__(self, source: DemoSource) -> None:
        self._source = source
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[pb.WatchPageMapResponse]:
        source, pool = self._source, self._source.pool
        with source.lock:
            yield from demo_messages.snapshot(pool)
            number = demo_messages.forget_changes(pool)
        while not (self._ended.is_set() or source._ended.is_set()):
            source.play()
            with source.lock:
                if pool.dirty or pool.ended or pool.left_queue:
                    message = demo_messages.delta(pool, number)
                    number = pool.number
                else:
                    message = demo_messages.heartbeat(pool)
                    if source.is_frozen:
                        message.ClearField("observe_time")  # a clock that stands still is no fault here
            yield message
            self._ended.wait(TICK_MS / 1000)

    def cancel(self) -> None:
        self._ended.set()
