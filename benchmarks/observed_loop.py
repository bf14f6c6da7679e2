"""The engine's real loop in a process of a benchmark, with everything that observes it on, or all of it off.

Owns the threads: engine, I/O, observer. What the engine is asked is the caller's.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch_marks import StepTimes
from benchmarks.observed_readers import Readers, processor_seconds
from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.engine import Engine, EngineSettings
from worker.execution.runner import Runner
from worker.link import codec
from worker.messages import AddRequest, EngineCommand, LinkMessage, StepOutputs
from worker.scheduling.request import RequestSpec
from worker.scheduling.scheduler import Scheduler
from worker.status import first_board

OFF = 1e9  # seconds between two audits


def describe(num_pages: int, page_size: int, max_running: int, context: int) -> WorkerDescription:
    """A worker of these sizes."""
    pool = PoolDescription(num_pages, page_size, max_running, context, "lru")
    model = ModelDescription("bench", 1000, context)
    return WorkerDescription("bench", 1, model, pool, 4096, context, 0, (), "", b"")


@dataclass(frozen=True)
class Marks:
    """Totals at one moment; processor time rather than wall time, which is steadier on a busy machine."""

    at: float  # wall clock
    tokens: int
    steps: int
    look_seconds: float  # of the engine's processor time, spent on showing itself
    engine_seconds: float
    observer_seconds: float  # and the recorder's


@dataclass(frozen=True)
class Run:
    """What lies between two marks."""

    tokens_per_second: float
    engine_seconds_per_step: float  # processor time
    look_share: float  # of the engine's processor time
    observer_share: float  # of one core
    seconds: float
    times: StepTimes  # of the device's steps, where they were marked
    unrecorded: int = 0  # page events that the recording lacks: its reader fell behind the ring

    @classmethod
    def between(cls, first: Marks, last: Marks) -> "Run":
        """Rates and shares."""
        seconds, engine = last.at - first.at, last.engine_seconds - first.engine_seconds
        return cls(
            (last.tokens - first.tokens) / seconds,
            engine / max(last.steps - first.steps, 1),
            (last.look_seconds - first.look_seconds) / engine,
            (last.observer_seconds - first.observer_seconds) / seconds,
            seconds,
            StepTimes.of((), ()),
        )


class Loop:
    """An engine that runs; `on_end` is called on the I/O thread for each sequence that ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        folder: Path,
        *,
        observed: bool,
        overlap: bool,
        on_end: Callable[[], None] = lambda: None,
        read_memory: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self._on_end = on_end
        description = describe(
            config.cache.num_pages, config.page_size, config.max_running, config.max_context_tokens
        )
        self.commands: CommandQueue[EngineCommand] = CommandQueue(4096)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(1024)
        self._readers = Readers(folder, self.outputs) if observed else None
        self.engine = Engine(
            scheduler,
            runner,
            EngineSettings(overlap=overlap, audit_interval=1.0 if observed else OFF),
            commands=self.commands,
            outputs=self.outputs,
            observations=self._readers.observations if self._readers is not None else Handover(64),
            board=first_board(description, time.monotonic()),
            on_state=lambda: None,
            wake_observer=self._wake,
            traffic=self._readers.traffic if self._readers is not None else None,
        )
        self._look_seconds = 0.0
        self._look = self.engine._watch.look
        self.engine._watch.look = self._timed_look if observed else self._no_look  # type: ignore[method-assign]
        self.num_tokens = 0
        self._is_over = False
        if self._readers is not None:
            self._readers.start(self.engine, scheduler, description, read_memory)
        self._io = threading.Thread(target=self._serve)
        self._thread = threading.Thread(target=self.engine.run)

    def add(self, spec: RequestSpec) -> None:
        """A request, from any thread."""
        self.commands.put(AddRequest(spec))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Threads start, and end whatever happens."""
        self._thread.start()
        self._io.start()
        try:
            yield
        finally:
            self.engine.stop()
            self.engine.stop()
            self._thread.join()
            self._is_over = True
            self._io.join()
            if self._readers is not None:
                self._readers.close()
            self.outputs.close()

    @property
    def unrecorded(self) -> int:
        """Page events that the recording lacks, after the end."""
        return self._readers.unrecorded if self._readers is not None else 0

    def marks(self) -> Marks:
        """As of now."""
        observer = 0.0 if self._readers is None else self._readers.processor_seconds
        engine = processor_seconds(self._thread)
        steps = self.scheduler.step_number
        return Marks(time.perf_counter(), self.num_tokens, steps, self._look_seconds, engine, observer)

    def _timed_look(self, now: float) -> None:
        began = time.thread_time()
        self._look(now)
        self._look_seconds += time.thread_time() - began

    def _no_look(self, now: float) -> None:
        """All of it off: an engine that has nothing to run sleeps, since there is nothing to be told."""
        self.engine._watch.has_news = False

    def _wake(self) -> None:
        if self._readers is not None:
            self._readers.wake()

    def _serve(self) -> None:
        """The I/O thread: encodes, counts, scrapes once a second."""
        scrape = time.monotonic() + 1.0
        while not self._is_over:
            self.outputs.wakeup.clear()
            for message in self.outputs.take(64):
                if isinstance(message, StepOutputs):
                    for columns in message.by_source.values():
                        codec.step_output(message.step, 0.0, columns).SerializeToString()
                        self.num_tokens += len(columns.token_ids)
                        for _ in columns.ends:
                            self._on_end()
            if self._readers is not None and time.monotonic() > scrape:
                scrape += 1.0
                self._readers.scrape()
            if not len(self.outputs):
                time.sleep(0.0005)
