"""The flight recorder: page events and the shapes of requests, on demand into a file, from before the demand.

A thread of its own, beside the observer, and like it in short pieces. It always keeps the log of requests
(samples.py) and a ledger that trails the newest page events by most of the ring, so that a recording can
begin in the past. While nothing is recorded it writes nothing. Whatever goes wrong with a file ends that
recording and nothing else.
"""

import copy
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.v1 import cache_pb2
from worker.channels import Handover
from worker.log import log_event
from worker.pages.events import EventRing
from worker.readers.ledger import Ledger
from worker.readers.pace import Pace
from worker.readers.prefix_keys import PrefixKeys
from worker.readers.recording import Recording
from worker.readers.recording_frames import FrameMaker
from worker.readers.recording_store import EndCause, RecordingStore, RecordingSummary
from worker.readers.samples import RequestLog
from worker.traffic import Arrival, Departure, StepCount, TimedStep, TrafficQueue

TURN_SECONDS = 0.25
MAX_EVENTS_PER_FRAME = 4096
MAX_WAITING_CALLS = 64
MAX_NOTE = 256
ALL_SECONDS = 1e9  # as far back as there is anything
DUMP_INTERVAL_SECONDS = 600.0  # between two recordings after failed audits
MAX_DUMP_BYTES = 1 << 30  # of one of them: the maps of large pools are more than 64 MiB

logger = logging.getLogger("worker.recorder")

Work = Callable[["Recorder"], None]
AskForLedger = Callable[[Callable[[Ledger], None]], None]


class RecorderBusy(Exception):
    """A recording runs already; its id is in `recording_id`."""

    def __init__(self, recording_id: str) -> None:
        super().__init__(f"recording {recording_id} runs")
        self.recording_id = recording_id


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What is asked for."""

    lookback_seconds: float = 0.0
    max_seconds: float = 600.0
    max_bytes: int = 64 << 20
    with_token_ids: bool = False
    note: str = ""
    rotate: bool = False


class Recorder:
    """`submit` from any thread; everything else on the recorder's own."""

    def __init__(
        self,
        ring: EventRing,
        traffic: TrafficQueue,
        keys: PrefixKeys,
        store: RecordingStore,
        frames: FrameMaker,
        *,
        num_pages: int,
        page_size: int,
        start_time: float,
        ask_for_ledger: AskForLedger,
        look: Callable[[], tuple[int, int]] | None = None,
        records_audits: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.log = RequestLog(keys)
        self.dropped_events = 0  # of all recordings and of the trailing ledger
        self._ring = ring
        self._traffic = traffic
        self._frames = frames
        self._start_time = start_time
        self._ledger = Ledger(num_pages, page_size)
        self._ask_for_ledger = ask_for_ledger
        self._look = look
        self._records_audits = records_audits
        self._clock = clock
        self._pace = Pace()
        self._recording: Recording | None = None
        self._options = RecordingOptions()
        self._ends = 0.0
        self._next_dump = 0.0
        self._refused_seen = 0
        self._ledgers: Handover[Ledger] = Handover(1)
        self._waits_for_ledger = False
        self._work: Handover[Work] = Handover(MAX_WAITING_CALLS)
        self._wake = threading.Event()
        self._is_stopping = False
        self.thread = threading.Thread(target=self._run, name="kvatlas-recorder", daemon=True)

    # From other threads.

    def start(self) -> None:
        """Begins to keep the log."""
        self.thread.start()

    def submit(self, work: Work) -> bool:
        """Something to be done on the recorder's thread; False: too much waits."""
        is_taken = self._work.put(work)
        self._wake.set()
        return is_taken

    def wake(self) -> None:
        """Many events came."""
        self._wake.set()

    def found(self, violations: Sequence[cache_pb2.IntegrityViolation], why: str) -> None:
        """An audit failed: that is noted, or what the ring still holds goes to a file at once."""
        self.submit(lambda recorder: recorder.note_violations(violations, why))

    def close(self) -> None:
        """Ends a recording that runs, then the thread; idempotent."""
        self._is_stopping = True
        self._wake.set()
        if self.thread.ident is not None:
            self.thread.join()

    # The thread.

    def _run(self) -> None:
        while not self._is_stopping:
            self._pace.begin()
            self._turn_safely()
            self._wake.wait(TURN_SECONDS)
            self._wake.clear()
        self._turn_safely()
        self._end_safely(EndCause.SHUTDOWN)
        self.store.close()

    def _turn_safely(self) -> None:
        """Nothing here may end the worker, and no bug of it may end what it serves."""
        try:
            self.turn()
        except Exception:
            logger.exception("event=recorder_failed")
            self._end_safely(EndCause.DISK, "the recorder failed")
            if not self._waits_for_ledger:  # ours may be what is broken: no call would ever be done again
                self._lose()

    def _end_safely(self, cause: EndCause, why: str = "") -> None:
        """Ends the recording that runs; where even that breaks, its file has no end and is told as lost."""
        try:
            if self._recording is not None:
                self._end(cause, why)
        except Exception:  # any bug of the end: this thread has other calls about recordings to answer
            logger.exception("event=recorder_failed")

    def turn(self) -> None:
        """Reads what came, writes what is recorded, does what was asked."""
        if self._look is not None:
            self.log.look(self.now_us(), *self._look())
        self._take_ledger()
        self._take_traffic()
        self._follow()
        for work in self._work.take_all():
            self._do_safely(work)
        if self._recording is not None and self._clock() >= self._ends:
            self._end_and_go_on(EndCause.DURATION)

    def _do_safely(self, work: Work) -> None:
        """What one asked for may break; the others that wait are done all the same."""
        try:
            work(self)
        except Exception:
            logger.exception("event=recorder_failed")

    def _take_traffic(self) -> None:
        steps: list[StepCount] = []
        recording = self._recording
        for record in self._traffic.take_all():
            match record:
                case Arrival():
                    request = self.log.arrive(record)
                    if recording is not None:
                        recording.request(request, record.token_ids)
                case Departure():
                    known = self.log.depart(record)
                    if known is not None and recording is not None:
                        recording.sequence(known[1], record.token_ids[known[0].num_prompt :])
                case TimedStep():
                    steps.append(record.counted())
            self._rest()
        self.log.steps.extend(steps)
        if recording is not None and steps:
            recording.steps(steps)
        lost = self._traffic.refused - self._refused_seen
        if lost:
            self._refused_seen += lost
            self.log.lose()
            if recording is not None:
                recording.lose_records(lost)

    def _rest(self) -> None:
        """Not while the ring is about to run over the ledger, which trails by up to five eighths of it."""
        is_late = self._ring.number - self._ledger.revision > self._ring.capacity // 4 * 3
        if not is_late and not self._is_stopping:
            self._pace.rest()

    # Events.

    def _follow(self) -> None:
        """Writes the newest events, or keeps the trailing ledger within the ring."""
        if self._waits_for_ledger:
            return
        newest = self._ring.number
        if self._recording is None:
            # Half the ring is kept to look back on; the engine wakes us each time it has filled a quarter.
            kept = self._ring.capacity // 2
            if newest - self._ledger.revision > kept + kept // 4:
                self._fold_to(newest - kept)
            return
        self._fold_to(newest)
        recording = self._recording
        if recording is not None and recording.failure:
            self._end(EndCause.DISK, recording.failure)
        elif recording is not None and recording.num_bytes >= self._options.max_bytes:
            self._end_and_go_on(EndCause.SIZE)

    def _fold_to(self, number: int) -> None:
        ledger, recording = self._ledger, self._recording
        with_tokens = recording is not None and self._options.with_token_ids
        while ledger.revision < number:
            wanted = min(number - ledger.revision, MAX_EVENTS_PER_FRAME)
            events = self._ring.read(ledger.revision, wanted, with_tokens)
            if events is None:
                self._lose()
                return
            ledger.fold(events)
            self._rest()
            if recording is not None:
                recording.events(events)

    def _lose(self) -> None:
        """The ring ran over what was not read yet: start again from the observer's ledger."""
        self._waits_for_ledger = True
        log_event(logger, logging.WARNING, "recorder_lagged", after=self._ledger.revision)
        self._ask()

    def _ask(self) -> None:
        self._ask_for_ledger(lambda ledger: self._give_ledger(copy.deepcopy(ledger)))

    def _give_ledger(self, ledger: Ledger) -> None:
        self._ledgers.put(ledger)
        self._wake.set()

    def _take_ledger(self) -> None:
        for ledger in self._ledgers.take_all():
            lost = ledger.revision - self._ledger.revision
            if lost <= 0:  # the observer lags even more; once it has started over, its ledger serves
                self._ask()
                continue
            self.dropped_events += lost
            self._waits_for_ledger = False
            if self._recording is not None:
                self._recording.lose_events(self._ledger.revision, lost, ledger)
            self._ledger = ledger

    # Recordings.

    @property
    def running(self) -> RecordingSummary | None:
        """The recording that runs."""
        return None if self._recording is None else self._recording.summary(self.now_us())

    def start_recording(self, options: RecordingOptions) -> RecordingSummary:
        """Begins one. Raises RecorderBusy, OSError."""
        if self._recording is not None:
            raise RecorderBusy(self._recording.recording_id)
        since_us = self.now_us() - int(options.lookback_seconds * 1e6)
        self._wind_to(max(0, since_us) if options.lookback_seconds else None)
        # Not before its map: what ran earlier would be run again on pages that it had left itself.
        since_us = max(since_us, self._ledger.time_us)
        self._begin(options, since_us)
        recording = self._recording
        assert recording is not None
        self._write_past(recording, self._ledger.revision, since_us)
        self._follow()
        log_event(logger, logging.INFO, "recording_started", recording=recording.recording_id)
        return recording.summary(self.now_us())

    def _begin(self, options: RecordingOptions, start_us: int) -> None:
        self._recording = Recording(
            self.store.new_path(),
            self._frames,
            self._ledger,
            start_us=start_us,
            with_token_ids=options.with_token_ids,
            note=options.note,
        )
        self._options = options
        self._ends = self._clock() + options.max_seconds

    def now_us(self) -> int:
        """Time since the start of the epoch."""
        return int((self._clock() - self._start_time) * 1e6)

    def _wind_to(self, since_us: int | None) -> None:
        """Moves the ledger to the last event before a time, if it is not past it; None: to the newest."""
        newest = self._ring.number
        while self._ledger.revision < newest and not self._waits_for_ledger:
            first = self._ledger.revision
            events = self._ring.read(first, MAX_EVENTS_PER_FRAME)
            before = 0 if events is None or since_us is None else bisect_left(events.times_us, since_us)
            if events is None or since_us is None:
                self._fold_to(newest)
                return
            self._fold_to(first + before)
            if before < len(events):
                return

    def _write_past(self, recording: Recording, number: int, since_us: int) -> None:
        """Requests that came since or were live at the beginning, with their ends so far, and steps since."""
        live = {request.sequence_id: request for request in self.log.live}
        known = live | {request.sequence_id: request for request in self.log.requests}
        for request in sorted(known.values(), key=lambda request: request.time_us):
            is_later = request.time_us >= since_us or request.sequence_id in live
            if is_later or any(end.number > number for end in request.ends):
                recording.request_so_far(request)
        steps = [step for step in self.log.steps if step.time_us > since_us]
        if steps:
            recording.steps(steps)

    def stop_recording(self, recording_id: str) -> RecordingSummary:
        """Ends the one that runs, or tells of one that ended. Raises NoSuchRecording."""
        recording = self._recording
        if recording is not None and recording_id in ("", recording.recording_id):
            return self._end(EndCause.STOPPED)
        return self.store.find(recording_id)

    def note_violations(self, violations: Sequence[cache_pb2.IntegrityViolation], why: str) -> None:
        """Into the recording that runs, or into one of what just was, at most every ten minutes."""
        recording, now = self._recording, self._clock()
        if recording is not None:
            for violation in violations:
                recording.violation(violation)
            return
        if not self._records_audits or now < self._next_dump:
            return
        self._next_dump = now + DUMP_INTERVAL_SECONDS
        try:
            self.start_recording(
                RecordingOptions(lookback_seconds=ALL_SECONDS, max_bytes=MAX_DUMP_BYTES, note=why[:MAX_NOTE])
            )
        except OSError as error:
            log_event(logger, logging.ERROR, "recording_failed", why=error)
            return
        if self._recording is not None:  # else it has ended by itself: the disk is full
            self.note_violations(violations, why)
            self._end(EndCause.AUDIT)

    def _end(self, cause: EndCause, why: str = "") -> RecordingSummary:
        recording, self._recording = self._recording, None
        assert recording is not None, "nothing is recorded"
        if why:
            recording.failure = recording.failure or why
        summary = recording.end(cause, self._ledger, self.now_us())
        self.store.remember(summary)
        level = logging.ERROR if cause is EndCause.DISK else logging.INFO
        log_event(
            logger,
            level,
            "recording_ended",
            recording=summary.recording_id,
            cause=cause.name,
            bytes=summary.num_bytes,
            events=summary.num_events,
            why=summary.message or None,
        )
        return summary

    def _end_and_go_on(self, cause: EndCause) -> None:
        """At its bound; with rotation the next one begins where this one ends.

        Where the map alone is as large as the bound there is no next one: it would end as soon as it began.
        """
        recording, options = self._recording, self._options
        self._end(cause)
        if not options.rotate or recording is None or recording.map_bytes >= options.max_bytes:
            return
        try:
            self._begin(self._options, self.now_us())
        except OSError as error:
            log_event(logger, logging.ERROR, "recording_failed", why=error)
            return
        assert self._recording is not None
        for request in self.log.live:
            self._recording.request_so_far(request)
