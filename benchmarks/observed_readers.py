"""All that observes an engine, as in a worker: observer, page feed with a subscriber, metrics, a recording.

Owns their threads and sockets. Scrapes are the caller's.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import zmq
from prometheus_client import CollectorRegistry, generate_latest

from worker.channels import Handover, OutputQueue
from worker.description import WorkerDescription
from worker.engine import Engine
from worker.link.publisher import DELTAS, PageFeed
from worker.link.recorder_tap import RecorderTap
from worker.messages import LinkMessage, ObserverCall
from worker.readers.metrics import WorkerCollector
from worker.readers.observation import Observation
from worker.readers.observer import Observer
from worker.readers.prefix_keys import PrefixKeys
from worker.readers.recorder import Recorder, RecordingOptions
from worker.readers.recording_store import RecordingStore, RecordingSummary
from worker.scheduling.scheduler import Scheduler
from worker.trace.testing import frame_maker
from worker.traffic import TRAFFIC_LIMIT, TrafficQueue

ANSWER_SECONDS = 30.0
MAX_BYTES = 1 << 30  # of a recording


class Readers:
    """Made before the engine, which fills ``traffic`` and ``observations``; then `start`, and `close`."""

    def __init__(self, folder: Path, outputs: OutputQueue[LinkMessage]) -> None:
        self.traffic = TrafficQueue(TRAFFIC_LIMIT)
        self.observations: Handover[Observation] = Handover(64)
        self._folder = folder
        self._outputs = outputs
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._registry = CollectorRegistry()
        self._started: Future[RecordingSummary] = Future()
        self.unrecorded = 0  # page events, after the end

    def start(
        self,
        engine: Engine,
        scheduler: Scheduler,
        description: WorkerDescription,
        read_memory: Callable[[], Mapping[str, int]] | None,
    ) -> None:
        """Observes and records from here on; `read_memory`: the device's, where it has its own."""
        feed = self._feed(scheduler, description)
        self._tap = RecorderTap(feed, description.epoch)
        self._observer = self._make_observer(engine, scheduler, description)
        if read_memory is not None:
            self._observer.memory.read_from(read_memory)
        self._recorder = self._make_recorder(scheduler)
        self._tap.recorder = self._recorder
        WorkerCollector(
            self._registry,
            description,
            view=lambda: self._observer.metrics,
            mismatches=lambda: 0,
            watermark_pages=0,
        )
        self._observer.start()
        self._recorder.start()
        self._recorder.submit(self._record)

    def _feed(self, scheduler: Scheduler, description: WorkerDescription) -> PageFeed:
        address = f"ipc://{self._folder}/pages"
        feed = PageFeed(
            self._context,
            address,
            description=description,
            ring=scheduler.cache.events,
            calls=Handover[ObserverCall](8),
            answers=self._outputs,
            start_time=scheduler.config.start_time,
        )
        self._subscriber.connect(address)
        self._subscriber.subscribe(DELTAS)
        return feed

    def _make_observer(
        self, engine: Engine, scheduler: Scheduler, description: WorkerDescription
    ) -> Observer:
        return Observer(
            scheduler.cache.events,
            self.observations,
            num_pages=description.pool.num_pages,
            page_size=description.pool.page_size,
            ask_for_snapshot=engine.ask_for_snapshot,
            on_load=lambda load: None,
            on_failure=engine.fail,
            sink=self._tap,
        )

    def _make_recorder(self, scheduler: Scheduler) -> Recorder:
        config, observer = scheduler.config, self._observer
        return Recorder(
            scheduler.cache.events,
            self.traffic,
            PrefixKeys(config.cache.fingerprint_key, config.page_size),
            RecordingStore(self._folder, "bench"),
            frame_maker(config),
            num_pages=config.cache.num_pages,
            page_size=config.page_size,
            start_time=config.start_time,
            ask_for_ledger=self._tap.ask_for_ledger,
            look=observer.look,
        )

    def _record(self, recorder: Recorder) -> None:
        try:
            self._started.set_result(recorder.start_recording(RecordingOptions(max_bytes=MAX_BYTES)))
        except Exception as error:
            self._started.set_exception(error)

    def wake(self) -> None:
        """Many page events came; from the engine's thread."""
        self._observer.wake()
        self._recorder.wake()

    def scrape(self) -> None:
        """As Prometheus does."""
        generate_latest(self._registry)

    @property
    def processor_seconds(self) -> float:
        """Of the observer's and the recorder's threads."""
        return processor_seconds(self._observer.thread) + processor_seconds(self._recorder.thread)

    def close(self) -> None:
        """Ends everything. Raises AssertionError where nothing was recorded or an audit failed."""
        self._observer.close()
        self._recorder.close()
        self._subscriber.close()
        self._context.term()
        found = self._recorder.stop_recording(self._started.result(ANSWER_SECONDS).recording_id)
        assert found.num_events, "no page event was recorded"
        self.unrecorded = found.dropped_events
        checks = self._observer.metrics.checks
        failed = [check for (check, result), count in checks.items() if result == "fail" and count]
        assert not failed, f"audits failed: {failed}"


def processor_seconds(thread: threading.Thread) -> float:
    """That a running thread has taken."""
    assert thread.ident is not None, f"{thread} has not started"
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
