"""What looking costs: `python -m benchmarks.observation`.

The engine's real loop with a runner that answers at once or after a fixed time (a device on which the
host waits without holding the interpreter), 256 sequences, pool churning. Everything that observes on
(event fold, metrics, load, 10 Hz page feed with a subscriber, a scrape a second, the live audit) against
all of it off, in turns, in one run. Then what it adds to a step of the control plane alone (budget: 15 us
at 256 sequences), and the parts: a step's message, a fold, a delta, a snapshot, a round of the audit.
"""

import argparse
import gc
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import zmq
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.control_plane import Case, Load
from benchmarks.record import percentile, write_result
from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.engine import Engine, EngineSettings
from worker.execution.fake_runner import CopiedRows
from worker.execution.runner import Runner
from worker.ids import SequenceId
from worker.link import codec, page_codec
from worker.link.publisher import DELTAS, PageFeed
from worker.live_audit import ROUND_PAGES
from worker.messages import AddRequest, EngineCommand, LinkMessage, ObserverCall, StepOutputs
from worker.pages.events import EventColumns, EventRing, PageEventKind
from worker.pages.page_cache import CacheConfig
from worker.readers.delta import snapshot_parts, take_delta, totals
from worker.readers.ledger import Ledger
from worker.readers.metrics import WorkerCollector
from worker.readers.observation import Observation
from worker.readers.observer import Observer
from worker.readers.sequences import SequenceBook
from worker.scheduling.audit import RowSpan
from worker.scheduling.output import OutputColumns
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult
from worker.stats import EngineCounts
from worker.status import first_board
from worker.watch import Watch

PAGE_SIZE = 16
CONTEXT = 4096
PROMPT = 512
MAX_TOKENS = 96


class Done:
    """A step whose result is there after a time."""

    is_replayed = False

    def __init__(self, step: Step, ready: float) -> None:
        self._step = step
        self._ready = ready

    def result(self) -> StepResult:
        """Waits as for a device: without the interpreter."""
        if (left := self._ready - time.perf_counter()) > 0:
            time.sleep(left)
        return StepResult([7] * len(self._step.sampled))


class InstantRunner:
    """No model: every token is 7. Keeps the page table, by page, for the audit."""

    def __init__(self, step_seconds: float, max_running: int) -> None:
        self._step_seconds = step_seconds
        self._pages = np.zeros((max_running + 1, CONTEXT // PAGE_SIZE), dtype=np.int32)

    def launch(self, step: Step) -> Done:
        """Ready after the fixed time."""
        if step.new_page_ids:
            rows, indexes, ids = step.new_page_rows, step.new_page_indexes, step.new_page_ids
            self._pages[np.asarray(rows), np.asarray(indexes)] = np.asarray(ids)
        return Done(step, time.perf_counter() + self._step_seconds)

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """Slots of rows."""
        offsets = np.arange(PAGE_SIZE, dtype=np.int32)
        slots = (self._pages[rows][:, :, None] * PAGE_SIZE + offsets).reshape(len(rows), -1)
        return [row[:count].tolist() for row, count in zip(slots, num_slots, strict=True)]

    def begin_read(self, spans: Sequence[RowSpan]) -> CopiedRows:
        """Parts of rows, copied at once."""
        lengths = [span.first + len(span.slots) for span in spans]
        whole = self.read_rows([span.row for span in spans], lengths)
        return CopiedRows([row[span.first :] for row, span in zip(whole, spans, strict=True)])

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True)
class Setting:
    """One kind of run."""

    sequences: int
    pages: int
    step_ms: float
    seconds: float
    prompt: int = PROMPT  # tokens


@dataclass(frozen=True)
class Run:
    """What one run gave."""

    tokens_per_second: float
    engine_seconds_per_step: float  # processor time
    look_share: float  # of the engine's processor time
    observer_share: float  # of one core


def describe(pages: int, sequences: int) -> WorkerDescription:
    """A worker of these sizes."""
    pool = PoolDescription(pages, PAGE_SIZE, sequences, CONTEXT, "lru")
    model = ModelDescription("bench", 1000, CONTEXT)
    return WorkerDescription("bench", 1, model, pool, 4096, CONTEXT, 0, (), "", b"")


class Loop:
    """An engine under constant load: what ends is replaced."""

    def __init__(
        self, setting: Setting, folder: Path, *, observed: bool, runner: Runner | None = None
    ) -> None:
        self.setting = setting
        cache = CacheConfig(setting.pages, PAGE_SIZE)
        config = SchedulerConfig(
            cache, max_running=setting.sequences, max_step_tokens=8192, max_context_tokens=CONTEXT
        )
        self.scheduler = Scheduler(config)
        description = describe(setting.pages, setting.sequences)
        self.board = first_board(description, time.monotonic())
        self.commands: CommandQueue[EngineCommand] = CommandQueue(4096)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(1024)
        self.observations: Handover[Observation] = Handover(64)
        settings = EngineSettings(overlap=setting.step_ms > 0, audit_interval=1.0 if observed else 1e9)
        instant = InstantRunner(setting.step_ms / 1000, setting.sequences)
        self.engine = Engine(
            self.scheduler,
            runner or cast(Runner, instant),
            settings,
            commands=self.commands,
            outputs=self.outputs,
            observations=self.observations,
            board=self.board,
            on_state=lambda: None,
            wake_observer=self._wake,
        )
        self.look_seconds = 0.0  # of the engine's processor time, spent on showing itself
        self._look = self.engine._watch.look
        self.engine._watch.look = self._timed_look if observed else _no_look  # type: ignore[method-assign]
        self.num_tokens = 0
        self._next_id = 1
        self._is_over = False
        self.registry = CollectorRegistry()
        self.observer = self._observer(folder, description) if observed else None

    def _timed_look(self, now: float) -> None:
        began = time.thread_time()
        self._look(now)
        self.look_seconds += time.thread_time() - began

    def _wake(self) -> None:
        if self.observer is not None:
            self.observer.wake()

    def _observer(self, folder: Path, description: WorkerDescription) -> Observer:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ring = self.scheduler.cache.events
        calls: Handover[ObserverCall] = Handover(8)
        feed = PageFeed(
            self.context,
            f"ipc://{folder}/pages",
            description=description,
            ring=ring,
            calls=calls,
            answers=self.outputs,
        )
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.connect(f"ipc://{folder}/pages")
        self.subscriber.subscribe(DELTAS)
        observer = Observer(
            ring,
            self.observations,
            num_pages=self.setting.pages,
            page_size=PAGE_SIZE,
            ask_for_snapshot=self.engine.ask_for_snapshot,
            on_load=lambda load: None,
            on_failure=self.engine.fail,
            sink=feed,
        )
        WorkerCollector(
            self.registry,
            description,
            view=lambda: observer.metrics,
            mismatches=lambda: 0,
            watermark_pages=0,
        )
        observer.start()
        return observer

    def _add(self) -> None:
        prompt = array("I", [self._next_id % 997 + 100]) * self.setting.prompt
        spec = RequestSpec(
            SequenceId(self._next_id), prompt, SamplingParams(max_tokens=MAX_TOKENS), source="s"
        )
        self._next_id += 1
        self.commands.put(AddRequest(spec))

    def _serve(self) -> None:
        """The I/O thread: encodes and keeps the number of sequences."""
        scrape = time.monotonic() + 1.0
        while not self._is_over:
            self.outputs.wakeup.clear()
            for message in self.outputs.take(64):
                if isinstance(message, StepOutputs):
                    for columns in message.by_source.values():
                        codec.step_output(message.step, 0.0, columns).SerializeToString()
                        self.num_tokens += len(columns.token_ids)
                        for _ in columns.ends:
                            self._add()
            if self.observer is not None and time.monotonic() > scrape:
                scrape += 1.0
                generate_latest(self.registry)
            if not len(self.outputs):
                time.sleep(0.0005)

    def run(self) -> Run:
        """Figures of the window after a warm-up."""
        io = threading.Thread(target=self._serve)
        engine = threading.Thread(target=self.engine.run)
        for _ in range(self.setting.sequences):
            self._add()
        engine.start()
        io.start()
        time.sleep(1.0)
        threads = [engine] if self.observer is None else [engine, self.observer.thread]
        before, began = self._marks(threads), time.perf_counter()
        time.sleep(self.setting.seconds)
        after, seconds = self._marks(threads), time.perf_counter() - began
        tokens, steps, look, engine_cpu, *observer_cpu = [b - a for a, b in zip(before, after, strict=True)]
        run = Run(
            tokens / seconds,
            engine_cpu / max(steps, 1),
            look / engine_cpu,
            sum(observer_cpu) / seconds,
        )
        self.engine.stop()
        self.engine.stop()
        engine.join()
        self._is_over = True
        io.join()
        if self.observer is not None:
            self.observer.close()
            self.subscriber.close()
            self.context.term()
        self.outputs.close()
        return run

    def _marks(self, threads: list[threading.Thread]) -> list[float]:
        """Tokens, steps, and the processor time of each thread: steadier than wall time on a busy machine."""
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
        times = [time.clock_gettime(clock) for clock in clocks]
        return [float(self.num_tokens), float(self.scheduler.step_number), self.look_seconds, *times]


def cpu_runner(model: str, setting: Setting) -> Runner:
    """The CPU engine's device, with real weights."""
    # Here and not above: the rest of this benchmark needs no torch.
    from worker.config import WorkerConfig
    from worker.torch_device import TorchDevice

    config = WorkerConfig(
        model=model,
        page_size=PAGE_SIZE,
        num_pages=setting.pages,
        max_running=setting.sequences,
        max_context=CONTEXT,
        max_batch_tokens=512,
    )
    return TorchDevice().build(config)


def compare(setting: Setting, rounds: int, runner: Runner | None = None) -> dict[str, float]:
    """Off and on, in turns."""
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for _ in range(rounds):
        for observed in (False, True):
            with TemporaryDirectory() as folder:
                loop = Loop(setting, Path(folder), observed=observed, runner=runner)
                runs[observed].append(loop.run())
    off, on = (_median(runs[observed]) for observed in (False, True))
    return {
        "tokens_per_second_off": round(off.tokens_per_second),
        "tokens_per_second_on": round(on.tokens_per_second),
        "engine_cpu_us_per_step_off": round(off.engine_seconds_per_step * 1e6, 1),
        "engine_cpu_us_per_step_on": round(on.engine_seconds_per_step * 1e6, 1),
        "engine_look_share": round(on.look_share, 4),
        "observer_cpu_share": round(on.observer_share, 4),
    }


def _no_look(now: float) -> None:
    """All of it off."""


def _median(runs: list[Run]) -> Run:
    return Run(
        statistics.median(run.tokens_per_second for run in runs),
        statistics.median(run.engine_seconds_per_step for run in runs),
        statistics.median(run.look_share for run in runs),
        statistics.median(run.observer_share for run in runs),
    )


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
    plain, seen, looks, now = 0.0, 0.0, [], on.now
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
        looks.append((time.thread_time() - began) * 1e6)
        if number % 100 == 0:
            handover.take_all()
    gc.unfreeze()
    return {
        "look_us_per_step": round(statistics.mean(looks), 1),
        "look_us_p50": round(percentile(looks, 0.5), 1),
        "look_us_p99": round(percentile(looks, 0.99), 1),
        "look_us_max": round(max(looks), 1),
        "marks_us_per_step": round((seen - plain) / num_steps * 1e6, 1),
        "step_us_unseen": round(plain / num_steps * 1e6, 1),
    }


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
    description = describe(num_pages, 256)

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
                1, part, description=description, pool=totals(ledger), counts=EngineCounts(), is_first=False
            ).SerializeToString()

    return {
        "fold_1000_events": timed(fold),
        "delta_250_pages": timed(delta),
        "snapshot": timed(snapshot, 20),
    }


def main() -> None:
    """Measures, prints and writes a result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", default="", help="also with the CPU engine on this model, threads as cores"
    )
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    for size in (32, 256, 1024):
        figures[f"step_message_{size}"] = step_message(size)
    for pages in (10_000, 100_000, 1_000_000):
        figures[f"pool_{pages}"] = parts(pages)
    for mode, context, shared in (("steady", 4000, 3880), ("churn", 1000, 500)):
        for step_ms in (4.0, 20.0):
            case = Case(mode, 256, context, shared, 100_000)
            figures[f"control_plane_{mode}_256_x_{context}_{step_ms:g}_ms"] = control_plane(
                case, step_ms, 1000
            )
    for pages in (10_000, 100_000, 1_000_000):
        figures[f"audit_256_x_4000_{pages}"] = audit_round(256, 4000, pages)
    for pages in (12_000, 100_000):
        for step_ms in (0.0, 5.0):
            setting = Setting(256, pages, step_ms, options.seconds)
            figures[f"loop_{pages}_pages_{step_ms:g}_ms"] = compare(setting, options.rounds)
    if options.model:
        setting = Setting(8, 2_000, 0.0, max(10.0, options.seconds), prompt=64)
        figures["cpu_engine_8"] = compare(setting, options.rounds, cpu_runner(options.model, setting))
    for name, figure in figures.items():
        print(name, figure)
    if options.write:
        print(write_result("observation", figures, ["numpy", "protobuf", "pyzmq"]))


if __name__ == "__main__":
    main()
