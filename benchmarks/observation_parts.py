"""The parts of being seen, each alone: a message, a fold, a delta, a snapshot, rounds of the audit, rows.

And what all of it adds to a step of the control plane: two schedulers under the same load, one of them seen.
"""

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from benchmarks.control_plane import Case, Load
from benchmarks.observed_loop import describe
from benchmarks.record import percentile
from worker.channels import Handover, OutputQueue
from worker.execution.fake_runner import CopiedRows
from worker.execution.runner import Runner
from worker.link import codec, page_codec
from worker.live_audit import ROUND_PAGES
from worker.messages import LinkMessage, ReadRows, Ticket
from worker.pages.events import EventColumns, EventRing, PageEventKind
from worker.readers.delta import snapshot_parts, take_delta, totals
from worker.readers.ledger import Ledger
from worker.readers.observation import Observation
from worker.readers.sequences import SequenceBook
from worker.row_desk import RowDesk
from worker.scheduling.audit import RowSpan
from worker.scheduling.output import OutputColumns
from worker.scheduling.step import Step
from worker.stats import EngineCounts
from worker.watch import Watch

PAGE_SIZE = 16


def timed(work: Callable[[], object], repeats: int = 200) -> dict[str, float]:
    """Microseconds: median, p10, p90."""
    for _ in range(10):
        work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e6)
    return {
        "median_us": round(statistics.median(times), 1),
        "p10_us": round(percentile(times, 0.1), 1),
        "p90_us": round(percentile(times, 0.9), 1),
    }


class NoDevice:
    """Answers the audit at once, with what the books say."""

    def begin_read(self, spans: Sequence[RowSpan]) -> CopiedRows:
        """The rows are always right."""
        return CopiedRows([span.slots.tolist() for span in spans])


def control_plane(case: Case, step_ms: float, num_steps: int) -> dict[str, float]:
    """Processor time that being seen adds to a step: two schedulers under the same load, one of them seen."""
    off, on = Load(case, seed=7), Load(case, seed=7)
    for load in (off, on):
        load.warm_up()
    handover: Handover[Observation] = Handover(1 << 20)
    watch = Watch(
        on.scheduler,
        cast(Runner, NoDevice()),
        handover,
        audit_interval=1.0,
        debug=False,
        wake_observer=lambda: None,
        clock=time.perf_counter,
    )
    watch.observe(on.now)  # the first one has everything in it
    plain, seen, looks, now = 0.0, 0.0, list[float](), on.now
    clock_us = _clock_us()
    gc.collect()
    gc.freeze()
    for number in range(num_steps):
        if number % 2:  # in turns, since the second finds warmer caches
            plain += _step_seconds(off)[0]
        seconds, step = _step_seconds(on)
        seen += seconds
        if not number % 2:
            plain += _step_seconds(off)[0]
        now += step_ms / 1000
        began = time.thread_time()
        watch.stepped(step, step_ms / 1000)
        watch.look(now)
        looks.append((time.thread_time() - began) * 1e6 - clock_us)
        if number % 100 == 0:
            handover.take_all()
    gc.unfreeze()
    return {
        "clock_us": round(clock_us, 2),  # taken off each look
        "look_us_per_step": round(statistics.mean(looks), 1),
        "look_us_p50": round(percentile(looks, 0.5), 1),
        "look_us_p99": round(percentile(looks, 0.99), 1),
        "look_us_max": round(max(looks), 1),
        "marks_us_per_step": round((seen - plain) / num_steps * 1e6, 1),
        "step_us_unseen": round(plain / num_steps * 1e6, 1),
    }


def _clock_us() -> float:
    """What asking for the processor time takes by itself: a system call."""
    times = []
    for _ in range(2000):
        began = time.thread_time()
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


def _step_seconds(load: Load) -> tuple[float, Step]:
    began = time.thread_time()
    _, _, step = load.step()
    return time.thread_time() - began, step


def audit_round(sequences: int, context: int, pages: int) -> dict[str, float]:
    """One round of the live audit under load, and the one at the end of the pool, which counts references."""
    load = Load(Case("steady", sequences, context, context - 120, pages), seed=7)
    load.warm_up()
    scheduler = load.scheduler
    rounds = [timed(lambda: scheduler.check(ROUND_PAGES), 40)["median_us"], 0.0]
    last = scheduler.one_audit()
    last.check(pages - 1)
    began = time.perf_counter()
    last.check(1)
    rounds[1] = round((time.perf_counter() - began) * 1e6, 1)
    return {"round_us": rounds[0], "last_round_of_a_sweep_us": rounds[1]}


def step_message(num_tokens: int) -> dict[str, float]:
    """One StepOutput, built and serialized."""
    ids = [codec.inner_id(3, number) for number in range(num_tokens)]
    columns = OutputColumns(array("Q", ids), array("I", range(num_tokens)), bytearray(num_tokens))
    return timed(lambda: codec.step_output(1, 0.01, columns).SerializeToString())


def events(num_events: int, num_pages: int) -> EventColumns:
    """Allocations and ends of one-page sequences, in order."""
    ring = EventRing(1 << 20)
    draw = np.random.default_rng(1)
    pages = draw.permutation(num_pages)[: num_events // 4]
    for page in pages.tolist():
        ring.append(PageEventKind.ALLOCATED, page, 1, 1)
        ring.append(PageEventKind.SEALED, page, 1, 1, tag=9)
        ring.append(PageEventKind.RELEASED, page, 1, 0)
        ring.append(PageEventKind.CACHED, page, 1, 0)
    found = ring.read(0, num_events)
    assert found is not None
    return found


def parts(num_pages: int) -> dict[str, dict[str, float]]:
    """Fold, delta and snapshot of a pool of this size."""
    ledger, book = Ledger(num_pages, PAGE_SIZE), SequenceBook(PAGE_SIZE)
    batch = events(1000, num_pages)
    description = describe(num_pages, PAGE_SIZE, 256, 4096)

    def fold() -> None:
        ledger.revision = 0
        ledger.fold(batch)

    def delta() -> bytes:
        ledger.dirty[batch.pages] = True
        found = take_delta(ledger, book, 0)
        message = page_codec.delta_feed(
            found,
            description=description,
            pool=totals(ledger),
            counts=EngineCounts(),
            num_events=1,
            time_ns=1,
        )
        return message.SerializeToString()

    def snapshot() -> None:
        for part in snapshot_parts(ledger, book):
            page_codec.snapshot_reply(
                1,
                part,
                description=description,
                pool=totals(ledger),
                counts=EngineCounts(),
                time_ns=1,
                is_first=False,
            ).SerializeToString()

    return {
        "fold_1000_events": timed(fold),
        "delta_250_pages": timed(delta),
        "snapshot": timed(snapshot, 20),
    }


def table_rows(sequences: int, context: int, pages: int) -> dict[str, float]:
    """Processor time of the engine's turns while the whole page table is read; the device is a list."""
    load = Load(Case("steady", sequences, context, context - 120, pages), seed=7)
    load.warm_up()
    outputs: OutputQueue[LinkMessage] = OutputQueue(16)
    pool = describe(pages, PAGE_SIZE, sequences, context + 4096).pool
    desk = RowDesk(load.scheduler, cast(Runner, NoDevice()), outputs, pool, time.perf_counter)
    figures: dict[str, float] = {}
    for name, from_device in (("books", False), ("device", True)):
        desk.obey(ReadRows(Ticket("s", 1), (), from_device))
        turns = []
        while not len(outputs):
            began = time.thread_time()
            desk.look()
            turns.append((time.thread_time() - began) * 1e6)
        outputs.take(16)
        figures |= {
            f"{name}_turns": len(turns),
            f"{name}_turn_us_p50": round(percentile(turns, 0.5), 1),
            f"{name}_turn_us_max": round(max(turns), 1),
        }
    outputs.close()
    return figures
