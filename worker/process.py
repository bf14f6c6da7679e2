"""The worker, put together: config → objects → threads, and their orderly end.

Owns the ZeroMQ context, every thread and the order in which they begin and end. Services are answered
from the first moment on; requests are taken once a real step has warmed the runner up.
"""

import gc
import logging
import os
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import cast

import zmq
from prometheus_client import CollectorRegistry

from kvatlas.models.resolve import resolve_model
from kvatlas.models.text_vocabulary import read_text_vocabulary
from kvatlas.seam_keys import SeamKeyError
from worker.channels import CommandQueue, Handover, OutputQueue
from worker.config import ConfigError, WorkerConfig
from worker.description import VERSION, PoolDescription, WorkerDescription
from worker.devices import Device, DeviceFacts, row_width
from worker.engine import EXIT_BUG, EXIT_OK, Engine, EngineSettings
from worker.execution.runner import Runner
from worker.faults import plant
from worker.ids import Row, SequenceId
from worker.link import status_codec
from worker.link.addresses import IpcGuard
from worker.link.commands import Desks
from worker.link.constraint_desk import ConstraintDesk
from worker.link.doorkeeper import Doorkeeper
from worker.link.estimates import EstimateDesk
from worker.link.http import StatusServer
from worker.link.operators import OperatorDesk
from worker.link.publisher import PageFeed
from worker.link.recorder_tap import RecorderTap
from worker.link.recordings import RecordingDesk
from worker.link.server import EngineLink
from worker.log import log_event, log_phase
from worker.messages import EngineCommand, LinkMessage, ObserverCall
from worker.pages.page_cache import CacheConfig
from worker.parent_watch import ParentWatch
from worker.readers.metrics import WorkerCollector
from worker.readers.observation import Observation
from worker.readers.observer import Observer
from worker.readers.prefix_keys import PrefixKeys
from worker.readers.recorder import Recorder
from worker.readers.recording_frames import FrameMaker
from worker.readers.recording_store import RecordingStore
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import RowStart, Step
from worker.stats import LoadView
from worker.status import first_board
from worker.trace.estimator import Estimator
from worker.trace.loading import limits_message
from worker.traffic import TRAFFIC_LIMIT, TrafficQueue

COMMAND_LIMIT = 4096
OUTPUT_LIMIT = 1024
OBSERVATION_LIMIT = 64  # about three seconds of a late observer
CALL_LIMIT = 256

logger = logging.getLogger("worker")


class WorkerProcess:
    """One worker: `with WorkerProcess(...) as worker: status = worker.run()`, `stop` to end it."""

    def __init__(
        self,
        config: WorkerConfig,
        device: Device,
        *,
        clock: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._began = clock()
        self._clock = clock
        self._device = device
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self._is_stopping = False
        self._has_failed = False
        self._is_loading = False
        try:
            with log_phase(logger, "facts"):
                facts = device.facts(config)
            self.config = config.resolved(
                model_context=facts.model.max_context_tokens, automatic_pages=facts.automatic_pages
            )
            self._set_up(facts, registry or CollectorRegistry())
        except BaseException:
            self._stack.close()
            raise

    def _set_up(self, facts: DeviceFacts, registry: CollectorRegistry) -> None:
        """Everything but the runner. What is made last ends first."""
        config = self.config
        epoch, start = time.time_ns(), self._clock()
        key = bytes.fromhex(config.fingerprint_key) or os.urandom(16)
        self._scheduler = Scheduler(_scheduler_config(config, facts, key, start))
        self.ring = self._scheduler.cache.events
        self.commands: CommandQueue[EngineCommand] = CommandQueue(COMMAND_LIMIT)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(OUTPUT_LIMIT)
        self._stack.callback(self.outputs.close)
        self.observations: Handover[Observation] = Handover(OBSERVATION_LIMIT)
        self._calls: Handover[ObserverCall] = Handover(CALL_LIMIT)
        guard = IpcGuard()
        self._stack.callback(guard.release)
        for address in (config.engine_address, config.pages_address):
            guard.take(address)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._stack.callback(context.term)
        self.doorkeeper = self._make_doorkeeper(context)
        self._make_observer(context, _description(config, facts, epoch, key), start)
        self._make_recorder(key, start)
        self._make_link(context)
        self._make_http(registry)
        self.observer.start()
        self.recorder.start()
        if self.doorkeeper is not None:
            self.doorkeeper.start()
        self.link.start()
        if config.parent_watch:
            self._stack.callback(ParentWatch(config.parent_watch, end_this_process).close)
        self._log_listening()

    def _make_doorkeeper(self, context: "zmq.Context[zmq.Socket[bytes]]") -> Doorkeeper | None:
        files = self.config.seam_files
        if files is None:
            return None
        try:
            doorkeeper = Doorkeeper(context, files, on_failure=self._fail, clock=self._clock)
        except SeamKeyError as error:
            raise ConfigError(f"seam_key, seam_peers: {error}") from None
        self._stack.callback(doorkeeper.close)  # after the sockets that it guards
        return doorkeeper

    def _make_observer(
        self, context: "zmq.Context[zmq.Socket[bytes]]", description: WorkerDescription, start: float
    ) -> None:
        self.feed = PageFeed(
            context,
            self.config.pages_address,
            description=description,
            ring=self.ring,
            calls=self._calls,
            answers=self.outputs,
            start_time=start,
            doorkeeper=self.doorkeeper,
        )
        self._stack.callback(self.feed.close)
        self.description = self.feed.description  # with the real port
        self.tap = RecorderTap(self.feed, description.epoch)
        self.board = board = first_board(self.description, start)

        def keep_load(load: LoadView) -> None:
            board.load = load

        self.observer = Observer(
            self.ring,
            self.observations,
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            watermark_pages=self._scheduler.config.num_watermark_pages,
            ask_for_snapshot=self._ask_for_snapshot,
            on_load=keep_load,
            on_failure=self._fail,
            sink=self.tap,
            recorder_dropped=self.tap.recorder_dropped,
            clock=self._clock,
        )
        self._stack.callback(self.observer.close)

    def _make_recorder(self, key: bytes, start: float) -> None:
        config, observer = self.config, self.observer
        limits = limits_message(self._scheduler.config, overlap=bool(config.overlap))
        keys = PrefixKeys(key, config.page_size)
        self.traffic = TrafficQueue(TRAFFIC_LIMIT)
        self.recorder = Recorder(
            self.ring,
            self.traffic,
            keys,
            RecordingStore(Path(config.recordings), config.worker_id),
            FrameMaker(
                geometry=status_codec.geometry(self.description),
                limits=limits,
                granularity=keys.granularity,
                model=self.description.model.model_id,
                version=VERSION,
            ),
            num_pages=config.num_pages,
            page_size=config.page_size,
            start_time=start,
            ask_for_ledger=self.tap.ask_for_ledger,
            look=observer.look,
            records_audits=config.record_audits,
            clock=self._clock,
        )
        self._stack.callback(self.recorder.close)
        self.tap.recorder = self.recorder
        estimator = Estimator(self._clock)
        self._stack.callback(estimator.close)
        estimates = EstimateDesk(estimator, self.outputs, self.description, limits, self._clock)
        self._recordings = RecordingDesk(self.recorder, estimates, self.outputs, config.worker_id)

    def _wake_readers(self) -> None:
        self.observer.wake()
        self.recorder.wake()

    def _make_link(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._operators = OperatorDesk(
            Path(self.config.profiles),
            self.config.worker_id,
            uses_torch=self.config.runner == "torch" and self.config.device == "cuda",
            to_engine=self.commands.put,
            answers=self.outputs,
            clock=self._clock,
        )
        self._stack.callback(self._operators.close)

        def ask_observer(call: ObserverCall) -> bool:
            is_taken = self._calls.put(call)
            self.observer.wake()
            return is_taken

        self._constraints = self._make_constraints()
        self.link = EngineLink(
            context,
            self.config.engine_address,
            commands=self.commands,
            outputs=self.outputs,
            status=self.board,
            constraints=self._constraints,
            to_observer=ask_observer,
            other_desk=Desks(self._recordings, self._operators),
            doorkeeper=self.doorkeeper,
            on_failure=self._fail,
            clock=self._clock,
        )
        self._stack.callback(self.link.close)  # before the observer, whose answers it sends

    def _make_constraints(self) -> ConstraintDesk | None:
        """What compiles the constraints of requests; None: the library is missing."""
        model = self.description.model
        if "constraints" not in self.config.features:
            return None
        from kvatlas.constraints.compiler import Compiler, TokenTable  # needs the library

        def read_table() -> TokenTable:
            return TokenTable.of(read_text_vocabulary(resolve_model(self.config.model)), model.eos_token_ids)

        meter = self.observer.constraints
        compiler = Compiler(read_table, model.vocab_size, on_compiled=meter.compiled, on_hit=meter.found)
        desk = ConstraintDesk(compiler, to_engine=self.commands.put, answer=self.outputs.put)
        self._stack.callback(desk.close)
        return desk

    def _make_http(self, registry: CollectorRegistry) -> None:
        observer, link, config = self.observer, self.link, self.config
        WorkerCollector(
            registry,
            self.description,
            view=lambda: observer.metrics,
            mismatches=lambda: link.sequence_mismatches,
            seam_refusals=self.doorkeeper.refusals if self.doorkeeper is not None else None,
            watermark_pages=self._scheduler.config.num_watermark_pages,
        )
        self.http: StatusServer | None = None
        if config.metrics_port >= 0:
            self.http = StatusServer(
                config.metrics_host,
                config.metrics_port,
                registry=registry,
                board=self.board,
                clock=self._clock,
            )
            self._stack.callback(self.http.close)

    def _log_listening(self) -> None:
        log_event(
            logger,
            logging.INFO,
            "listening",
            worker=self.config.worker_id,
            engine=self.link.address,
            pages=self.description.pages_address,
            metrics_port=self.http.port if self.http else "off",
        )

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every thread, socket and file of this worker; idempotent."""
        self._stack.close()

    def stop(self) -> None:
        """Drain, then end; the second call does not wait for what runs. From any thread or signal handler."""
        self._is_stopping = True
        if self._engine is not None:
            self._engine.stop()

    @property
    def is_loading(self) -> bool:
        """Whether the model is being loaded, which may take long and may be broken off by an exception."""
        return self._is_loading

    def _fail(self) -> None:
        self._has_failed = True
        if self._engine is not None:
            self._engine.fail()
        self._is_stopping = True

    def _ask_for_snapshot(self) -> None:
        if self._engine is not None:
            self._engine.ask_for_snapshot()

    def run(self) -> int:
        """Loads, warms up and serves until a drain is over; returns the exit status."""
        self._is_loading = True
        try:
            runner = None if self._is_stopping else self._device.build(self.config)
        finally:
            self._is_loading = False
        if runner is None:
            return EXIT_BUG if self._has_failed else EXIT_OK
        try:
            with log_phase(logger, "first_steps"):
                warm_up(runner, self.config.page_size)
            if self.config.debug_faults:
                runner = plant(self.config.debug_faults, self._scheduler, runner)
            with log_phase(logger, "settle"):
                settle_interpreter()
            if (watch_compilers := getattr(runner, "watch_compilers", None)) is not None:
                watch_compilers()
            if (masks := getattr(runner, "constraint_masks", None)) is not None:
                masks.on_masks = self.observer.constraints.masks
            engine = Engine(
                self._scheduler,
                runner,
                EngineSettings(
                    overlap=bool(self.config.overlap),
                    drain_grace=self.config.drain_grace,
                    audit_interval=self.config.audit_interval,
                    debug=self.config.debug,
                ),
                commands=self.commands,
                outputs=self.outputs,
                observations=self.observations,
                board=self.board,
                on_state=self.link.announce,
                link=self.link,
                wake_observer=self._wake_readers,
                traffic=self.traffic,
                clock=self._clock,
            )
            if self.config.debug_poison:
                engine.set_poison(_poison_of(runner))
            if (read_memory := getattr(runner, "memory_bytes", None)) is not None:
                self.observer.memory.read_from(read_memory)
            self._engine = engine
            if self._has_failed:  # a thread died while there was no engine to be told
                engine.fail()
            elif self._is_stopping:  # a signal came while the engine was made
                engine.stop()
            log_event(
                logger,
                logging.INFO,
                "ready",
                worker=self.config.worker_id,
                pages=self.config.num_pages,
                page_size=self.config.page_size,
                max_running=self.config.max_running,
                seconds=self._clock() - self._began,
            )
            if self._constraints is not None:  # not beside the start, which needs the interpreter as much
                self._constraints.begin_preparing()
            status = engine.run()
            if self._constraints is not None:
                self._constraints.refuse_waiting()
            return status
        finally:
            runner.close()


def end_this_process() -> None:
    """As an operator would: the main thread decides what that means at this moment."""
    os.kill(os.getpid(), signal.SIGTERM)


def settle_interpreter() -> None:
    """Keeps the collector's pauses out of steps: what was loaded lives as long as the process, so it need not
    be walked again.
    """
    gc.collect()
    gc.freeze()


def _poison_of(runner: Runner) -> Callable[[Sequence[int]], None]:
    """How this runner fills pages with what must never be read."""
    poison = getattr(runner, "poison_pages", None) or getattr(runner, "poison", None)
    if poison is None:
        raise ConfigError(f"debug_poison: {type(runner).__name__} cannot")
    return cast(Callable[[Sequence[int]], None], poison)


def warm_up(runner: Runner, page_size: int) -> None:
    """Two real steps, a prompt and a token, in row 0 and the first pages, which nobody has yet."""
    start = RowStart(Row(0), SequenceId(0), 0, (0,), 1, SamplingParams(max_tokens=2), frozenset())
    pages = array("i", range(-(-2 // page_size)))
    prompt = Step(
        number=0,
        sequence_ids=(start.sequence_id,),
        rows=array("i", (0,)),
        starts=array("i", (0,)),
        ends=array("i", (1,)),
        sampled=(0,),
        num_decode=0,
        row_starts=(start,),
        new_page_rows=array("i", (0,)) * len(pages),
        new_page_indexes=pages,
        new_page_ids=pages,
    )
    token = Step(
        number=0,
        sequence_ids=(start.sequence_id,),
        rows=array("i", (0,)),
        starts=array("i", (1,)),
        ends=array("i", (2,)),
        sampled=(0,),
        num_decode=1,
    )
    for step in (prompt, token):
        runner.launch(step).result()


def _scheduler_config(config: WorkerConfig, facts: DeviceFacts, key: bytes, start: float) -> SchedulerConfig:
    cache = CacheConfig(
        num_pages=config.num_pages,
        page_size=config.page_size,
        eviction_policy=config.eviction_policy,
        sharing=config.prefix_cache,
        fingerprint_key=key,
    )
    return SchedulerConfig(
        cache=cache,
        max_running=config.max_running,
        max_step_tokens=config.max_batch_tokens,
        max_chunk_tokens=config.max_chunk_tokens,
        doubling_context=facts.doubling_context,
        max_context_tokens=config.max_context,
        max_queued_requests=config.max_queued,
        watermark_pages=int(config.watermark * config.num_pages),
        eos_token_ids=frozenset(facts.model.eos_token_ids),
        start_time=start,
    )


def _description(config: WorkerConfig, facts: DeviceFacts, epoch: int, key: bytes) -> WorkerDescription:
    pool = PoolDescription(
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_running=config.max_running,
        row_width=row_width(config),
        eviction_policy=config.eviction_policy,
        page_bytes=facts.page_bytes,
        layer_count=facts.layer_count,
        kv_head_count=facts.kv_head_count,
        head_dim=facts.head_dim,
        dtype=facts.dtype,
        device=facts.device,
    )
    return WorkerDescription(
        worker_id=config.worker_id,
        epoch=epoch,
        model=facts.model,
        pool=pool,
        max_queued=config.max_queued,
        max_context=config.max_context,
        max_pinned_pages=config.num_pages // 4,
        features=config.features,
        pages_address="",
        fingerprint_key=key,
        attention_backend=facts.attention_backend,
        attention_backend_reason=facts.attention_backend_reason,
        device_name=facts.device_name,
        device_memory_bytes=facts.device_memory_bytes,
        compute_capability=facts.compute_capability,
        versions=facts.versions,
    )
