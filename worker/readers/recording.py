"""One recording while it is written: frames out, counts kept, and an end with its cause.

Owns the file until it is closed. A write that fails is remembered in `failure` and ends the writing: the
recorder looks there once a turn, nobody else ever hears of it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvatlas.v1 import cache_pb2
from worker.pages.events import EventColumns
from worker.readers.ledger import Ledger
from worker.readers.recording_file import FrameWriter
from worker.readers.recording_frames import FrameMaker, state_digest
from worker.readers.recording_store import EndCause, RecordingSummary
from worker.readers.samples import LoggedEnd, LoggedRequest
from worker.traffic import StepCount

STEPS_PER_FRAME = 4096


class Recording:
    """A file that grows. Made with the state at its beginning. Raises OSError if it cannot even begin."""

    def __init__(
        self,
        path: Path,
        frames: FrameMaker,
        ledger: Ledger,
        *,
        start_us: int,
        with_token_ids: bool,
        note: str,
    ) -> None:
        self.recording_id = path.stem
        self.with_token_ids = with_token_ids
        self.failure = ""  # what the system said when a write failed
        self.num_events = self.num_requests = self.num_sequences = self.dropped_events = 0
        self._frames = frames
        self._note = note
        self._start_us = start_us
        self._writer = FrameWriter(path)
        self._write_all([frames.header(self.recording_id, ledger, start_us, with_token_ids, note)])
        self._write_all(frames.snapshot(ledger))
        self.map_bytes = self.num_bytes  # what any recording of this pool begins with
        if self.failure:
            self._writer.close()
            path.unlink(missing_ok=True)
            raise OSError(self.failure)

    @property
    def num_bytes(self) -> int:
        """Size so far."""
        return self._writer.num_bytes

    def _write_all(self, frames: Iterable[cache_pb2.RecordingFrame]) -> None:
        if self.failure:
            return
        try:
            for frame in frames:
                self._writer.write(frame)
        except OSError as error:
            self.failure = error.strerror or str(error)

    def events(self, events: EventColumns) -> None:
        """Consecutive page events."""
        self._write_all([self._frames.events(events)])
        self.num_events += len(events)

    def request(self, request: LoggedRequest, token_ids: Sequence[int] = ()) -> None:
        """A request that was accepted."""
        self._write_all([self._frames.request(request, token_ids if self.with_token_ids else ())])
        self.num_requests += 1

    def request_so_far(self, request: LoggedRequest) -> None:
        """A request of before the recording, with those of its samples that have ended."""
        self.request(request)
        for end in request.ends:
            self.sequence(end)

    def sequence(self, end: LoggedEnd, token_ids: Sequence[int] = ()) -> None:
        """A sequence that ended."""
        self._write_all([self._frames.sequence(end, token_ids if self.with_token_ids else ())])
        self.num_sequences += 1

    def steps(self, steps: Sequence[StepCount]) -> None:
        """Consecutive steps."""
        for first in range(0, len(steps), STEPS_PER_FRAME):
            self._write_all([self._frames.steps(steps[first : first + STEPS_PER_FRAME])])

    def violation(self, violation: cache_pb2.IntegrityViolation) -> None:
        """The audit found something."""
        self._write_all([cache_pb2.RecordingFrame(violation=violation)])

    def lose_records(self, count: int) -> None:
        """Requests, ends or steps never came here."""
        self._write_all([self._frames.gap(0, 0, count)])

    def lose_events(self, after_number: int, count: int, ledger: Ledger) -> None:
        """Events are missing; the map as it is after them."""
        self.dropped_events += count
        self._write_all([self._frames.gap(after_number, count, 0)])
        self._write_all(self._frames.snapshot(ledger))

    def end(self, cause: EndCause, ledger: Ledger, time_us: int) -> RecordingSummary:
        """Writes the end, as far as it can be, and closes the file, which it does whatever breaks."""
        try:
            self._write_all([self._end_frame(cause, ledger)])
        finally:
            self._close()
        return self.summary(time_us, cause)

    def _end_frame(self, cause: EndCause, ledger: Ledger) -> cache_pb2.RecordingFrame:
        end = cache_pb2.RecordingEnd(
            revision=self._frames.revision(ledger),
            event_count=self.num_events,
            request_count=self.num_requests,
            cause=int(cause),  # type: ignore[arg-type]  # the numbers are the enum's
            sequence_count=self.num_sequences,
            dropped_events=self.dropped_events,
            state_digest=state_digest(ledger.states.tobytes(), ledger.flags.tobytes(), ledger.refs.tobytes()),
        )
        return cache_pb2.RecordingFrame(end=end)

    def _close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:  # a network's disk may say only here that it is full
            self.failure = self.failure or error.strerror or str(error)

    def summary(self, time_us: int, cause: EndCause = EndCause.NONE) -> RecordingSummary:
        """What it is so far."""
        return RecordingSummary(
            recording_id=self.recording_id,
            start_ns=self._frames.wall_ns(self._start_us),
            seconds=max(0, time_us - self._start_us) / 1e6,
            num_bytes=self._writer.num_bytes,
            num_events=self.num_events,
            num_requests=self.num_requests,
            dropped_events=self.dropped_events,
            cause=cause,
            note=self._note,
            message=self.failure,
        )
