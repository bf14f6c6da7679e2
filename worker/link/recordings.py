"""Calls about recordings: messages in, work on the recorder's thread, encoded replies out.

Protobuf stops here. A call becomes a piece of work for the recorder; whatever it raises there is the answer.
"""

import logging
from collections.abc import Iterable, Sequence

from google.protobuf import duration_pb2

from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.channels import OutputQueue
from worker.link.commands import CallRefused
from worker.link.estimates import EstimateDesk
from worker.messages import CallError, CallFailure, CallReason, EncodedReply, LinkMessage, Ticket
from worker.readers.recorder import Recorder, RecorderBusy, RecordingOptions
from worker.readers.recording_store import NoSuchRecording, RecordingSummary

KINDS = frozenset(("start_recording", "stop_recording", "get_recording", "list_recordings", "estimate"))
DEFAULT_SECONDS, MAX_SECONDS = 600.0, 3600.0
DEFAULT_BYTES, MIN_BYTES, MAX_BYTES = 64 << 20, 64 << 10, 1 << 30
PIECE_BYTES = 1 << 20
PIECES_PER_CALL = 8  # a file is asked for in several calls, so that it never lies in memory whole

logger = logging.getLogger("worker.link")


class RecordingDesk:
    """Hands calls to the recorder, and those about estimates on to their desk."""

    kinds = KINDS

    def __init__(
        self, recorder: Recorder, estimates: EstimateDesk, answers: OutputQueue[LinkMessage], worker_id: str
    ) -> None:
        self._recorder = recorder
        self._estimates = estimates
        self._answers = answers
        self._worker_id = worker_id
        self._wanted: set[Ticket] = set()  # calls for whose answers somebody waits

    def take(self, ticket: Ticket, command: worker_pb2.Command, seconds: float) -> None:
        """Passes a call on. Raises CallRefused."""
        self._wanted.add(ticket)
        if not self._recorder.submit(lambda recorder: self._work(recorder, ticket, command, seconds)):
            self._wanted.discard(ticket)
            text = "too many calls wait for the recorder"
            raise CallRefused(CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more: what has not begun is not done."""
        self._wanted.discard(ticket)
        self._estimates.cancel(ticket)

    def tick(self) -> None:
        """Nothing of it is due by itself."""

    # On the recorder's thread.

    def _work(self, recorder: Recorder, ticket: Ticket, command: worker_pb2.Command, seconds: float) -> None:
        if ticket not in self._wanted:
            return
        try:
            match command.WhichOneof("command"):
                case "start_recording":
                    self._reply(ticket, self._start(recorder, command.start_recording))
                case "stop_recording":
                    info = self._info(recorder.stop_recording(command.stop_recording.recording_id))
                    answer = server_pb2.StopRecordingResponse(recording=info)
                    self._reply(ticket, worker_pb2.CommandReply(stop_recording=answer))
                case "list_recordings":
                    self._reply(ticket, self._list(recorder))
                case "get_recording":
                    self._send_pieces(recorder, ticket, command.get_recording)
                case "estimate":
                    self._estimates.ask(recorder, ticket, command.estimate, seconds)
                    if ticket not in self._wanted:  # since the look before
                        self._estimates.cancel(ticket)
        except CallRefused as refused:
            self._fail(ticket, refused.error, refused.reason, refused.message)
        except RecorderBusy as busy:
            text, about = f"recording {busy.recording_id} is running", {"recording_id": busy.recording_id}
            reason = CallReason.RECORDING_RUNNING
            self._answers.put(CallFailure(ticket, CallError.FAILED_PRECONDITION, reason, text, about))
        except NoSuchRecording as missing:
            text = f"no recording {str(missing)[:128]!r} is held" if str(missing) else "no recording is held"
            self._fail(ticket, CallError.NOT_FOUND, CallReason.RECORDING_NOT_FOUND, text)
        except OSError as error:
            text = f"recordings cannot be written to {recorder.store.folder}: {error.strerror or error}"
            self._fail(ticket, CallError.FAILED_PRECONDITION, CallReason.RECORDING_FAILED, text)
        except Exception:  # every command is answered, and a bug of the recorder ends no worker
            logger.exception("event=command_failed")
            self._fail(ticket, CallError.INTERNAL, CallReason.INTERNAL, "the recorder failed")

    def _start(self, recorder: Recorder, asked: server_pb2.StartRecordingRequest) -> worker_pb2.CommandReply:
        seconds = asked.max_duration.ToNanoseconds() / 1e9  # any number at all, unlike ToTimedelta
        lookback = asked.lookback.ToNanoseconds() / 1e9
        options = RecordingOptions(
            lookback_seconds=_within("lookback", lookback, 0.0, MAX_SECONDS),
            max_seconds=_within("max_duration", seconds or DEFAULT_SECONDS, 0.1, MAX_SECONDS),
            max_bytes=int(_within("max_bytes", asked.max_bytes or DEFAULT_BYTES, MIN_BYTES, MAX_BYTES)),
            with_token_ids=asked.include_token_ids,
            note=asked.note[:256],
            rotate=asked.rotate,
        )
        info = self._info(recorder.start_recording(options))
        return worker_pb2.CommandReply(start_recording=server_pb2.StartRecordingResponse(recording=info))

    def _list(self, recorder: Recorder) -> worker_pb2.CommandReply:
        running = recorder.running
        known = [running] if running is not None else []
        known += [each for each in recorder.store.summaries() if each.recording_id not in _ids(known)]
        answer = server_pb2.ListRecordingsResponse(recordings=[self._info(each) for each in known])
        return worker_pb2.CommandReply(list_recordings=answer)

    def _send_pieces(self, recorder: Recorder, ticket: Ticket, asked: server_pb2.GetRecordingRequest) -> None:
        running = recorder.running
        if running is not None and asked.recording_id == running.recording_id:
            raise RecorderBusy(running.recording_id)
        summary = _but(recorder.store.summaries(), running, asked.recording_id)
        first, end = (
            asked.first_byte,
            min(summary.num_bytes, asked.first_byte + PIECES_PER_CALL * PIECE_BYTES),
        )
        if first > summary.num_bytes:
            text = f"first_byte: {first}, the recording has {summary.num_bytes} bytes"
            raise CallRefused(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
        with recorder.store.open(summary.recording_id) as file:
            file.seek(first)
            is_first, has_more = True, True
            while has_more:
                data = file.read(min(PIECE_BYTES, end - first))
                piece = server_pb2.GetRecordingResponse(first_byte=first, data=data)
                if is_first:
                    piece.recording.CopyFrom(self._info(summary))
                first, is_first = first + len(data), False
                has_more = bool(data) and first < end
                self._reply(ticket, worker_pb2.CommandReply(get_recording=piece, more=has_more))

    def _info(self, summary: RecordingSummary) -> server_pb2.RecordingInfo:
        info = server_pb2.RecordingInfo(
            recording_id=summary.recording_id,
            worker_id=self._worker_id,
            duration=_duration(summary.seconds),
            byte_count=summary.num_bytes,
            event_count=summary.num_events,
            end_cause=int(summary.cause),  # type: ignore[arg-type]  # the numbers are the enum's
            request_count=summary.num_requests,
            dropped_events=summary.dropped_events,
            note=summary.note,
            message=summary.message,
        )
        info.start_time.FromNanoseconds(summary.start_ns)
        return info

    def _reply(self, ticket: Ticket, reply: worker_pb2.CommandReply) -> None:
        reply.command_id = ticket.command_id
        self._answers.put(EncodedReply(ticket, reply.SerializeToString(), not reply.more))

    def _fail(self, ticket: Ticket, error: CallError, reason: CallReason, message: str) -> None:
        self._answers.put(CallFailure(ticket, error, reason, message))


def _ids(known: Iterable[RecordingSummary]) -> set[str]:
    return {each.recording_id for each in known}


def _but(
    known: Sequence[RecordingSummary], running: RecordingSummary | None, recording_id: str
) -> RecordingSummary:
    """The one of that id, or the newest that ended. Raises NoSuchRecording."""
    for each in known:
        if running is not None and each.recording_id == running.recording_id:
            continue
        if recording_id in ("", each.recording_id):
            return each
    raise NoSuchRecording(recording_id)


def _within(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        text = f"{name}: {value:g} is not in [{low:g}, {high:g}]"
        raise CallRefused(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
    return value


def _duration(seconds: float) -> duration_pb2.Duration:
    found = duration_pb2.Duration()
    found.FromMicroseconds(round(seconds * 1e6))
    return found
