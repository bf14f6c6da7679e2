"""What operators ask of the worker's process: log levels, profiles of its steps and their files.

Owns the folder of profiles and the thread that writes and reads it.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvatlas.log_levels import LogLevels, UnknownLogger
from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.channels import OutputQueue
from worker.folder_name import FolderName
from worker.link.commands import CallRefused
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    EncodedReply,
    EndProfile,
    EngineCommand,
    LinkMessage,
    Profile,
    Recorded,
    Ticket,
)

KEPT_PROFILES = 4
MAX_PROFILE_BYTES = 256 << 20
MAX_STEPS = 1000
MAX_WAITING = 16  # downloads and profiles to be written
PIECE_BYTES = 1 << 20
PIECES_PER_CALL = 8  # a file is asked for in several calls, so that it never lies in memory whole
LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
"""By kvatlas.v1.LogLevel."""

logger = logging.getLogger("worker.link")


class OperatorDesk:
    """Calls come on the I/O thread, ends of profiles on the engine's; files are touched on a third."""

    kinds = frozenset(("log_level", "profile", "get_profile"))

    def __init__(
        self,
        folder: Path,
        worker_id: str,
        *,
        uses_torch: bool,
        to_engine: Callable[[EngineCommand], None],
        answers: OutputQueue[LinkMessage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._name = FolderName(_plain(worker_id))
        self._uses_torch = uses_torch
        self._to_engine = to_engine
        self._answers = answers
        self._clock = clock
        self._levels = LogLevels(clock)
        self._profiling: Ticket | None = None  # whose profile runs on the engine
        self._room = threading.Semaphore(MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvatlas-profiles")

    def take(self, ticket: Ticket, command: worker_pb2.Command, seconds: float) -> None:
        """Does it or passes it on. Raises CallRefused."""
        match command.WhichOneof("command"):
            case "log_level":
                self._set_level(ticket, command.log_level)
            case "profile":
                self._profile(ticket, command.profile.steps, seconds)
            case "get_profile":
                asked = command.get_profile
                self._submit(ticket, lambda: self._send_pieces(ticket, asked))

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more."""
        if ticket == self._profiling:
            self._profiling = None
            self._to_engine(EndProfile(ticket))

    def tick(self) -> None:
        """Now and then: levels that were set for a time go back."""
        self._levels.expire()

    def close(self) -> None:
        """Ends the thread once its piece of work is done; idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._name.close()

    # Log levels

    def _set_level(self, ticket: Ticket, asked: server_pb2.SetLogLevelRequest) -> None:
        if asked.level not in LEVELS:
            _refuse(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, f"level: no level {asked.level}")
        limit = asked.duration.ToMilliseconds() / 1000 if asked.HasField("duration") else None
        try:
            self._levels.set(asked.logger, LEVELS[asked.level], limit)
        except UnknownLogger:
            text = f"logger: this worker has no logger {asked.logger[:128]!r}"
            _refuse(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
        logger.warning("event=log_level logger=%r level=%d seconds=%s", asked.logger, asked.level, limit)
        self._reply(ticket, worker_pb2.CommandReply(log_level=server_pb2.SetLogLevelResponse()))

    # Profiles

    def _profile(self, ticket: Ticket, steps: int, seconds: float) -> None:
        if not 1 <= steps <= MAX_STEPS:
            text = f"steps: {steps} is not in [1, {MAX_STEPS}]"
            _refuse(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
        if self._profiling is not None:
            text = "a profile is being captured already"
            _refuse(CallError.FAILED_PRECONDITION, CallReason.PROFILE_RUNNING, text)
        self._profiling = ticket
        # Less than the caller's patience, so that the file is written while he still waits.
        deadline = self._clock() + seconds - min(seconds / 2, 5.0)

        def on_end(recorded: Recorded | None, num_steps: int, why: str) -> None:
            if self._profiling != ticket:
                return  # nobody waits for it any more
            self._profiling = None
            if recorded is None:
                self._fail(ticket, CallError.INTERNAL, CallReason.INTERNAL, f"the profiler failed: {why}")
            elif not num_steps:
                text = "no step ran in time"
                self._fail(ticket, CallError.DEADLINE_EXCEEDED, CallReason.DEADLINE_PASSED, text)
            else:
                self._put(ticket, lambda: self._save(ticket, recorded, num_steps))

        self._to_engine(Profile(ticket, steps, deadline, self._uses_torch, on_end))

    def _save(self, ticket: Ticket, recorded: Recorded, num_steps: int) -> None:
        try:
            path = self._written(recorded)
            size = path.stat().st_size
        except OSError as error:
            text = f"profiles cannot be written to {self._folder}: {error.strerror or error}"
            self._fail(ticket, CallError.FAILED_PRECONDITION, CallReason.RECORDING_FAILED, text)
            return
        kept = self._files()
        if size > MAX_PROFILE_BYTES:
            kept.remove(path)
            path.unlink()
            text = f"steps: the profile of {num_steps} steps has {size} bytes, at most {MAX_PROFILE_BYTES}"
            self._fail(ticket, CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
        else:
            answer = server_pb2.CaptureProfileResponse(file_name=path.name, byte_count=size, steps=num_steps)
            self._reply(ticket, worker_pb2.CommandReply(profile=answer))
        for old in kept[:-KEPT_PROFILES]:
            with suppress(OSError):
                old.unlink()

    def _written(self, recorded: Recorded) -> Path:
        """Its file; half of one is none, and would be the newest. Raises OSError, or what `save` does."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._name.take(self._folder)
        newest = max((stamp for stamp, _ in self._stamped()), default=0)
        stamp = max(time.time_ns(), newest + 1)  # by a clock that was set back, it would be the first to go
        path = self._folder / f"{self._name.name}-{stamp}{recorded.suffix}"
        try:
            recorded.save(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _send_pieces(self, ticket: Ticket, asked: server_pb2.GetProfileRequest) -> None:
        files = {path.name: path for path in self._files()}  # oldest first
        name = asked.file_name or next(reversed(files), "")
        if name not in files:
            text = f"no profile {name[:128]!r} is held" if name else "no profile is held"
            self._fail(ticket, CallError.NOT_FOUND, CallReason.PROFILE_NOT_FOUND, text)
            return
        size, first = files[name].stat().st_size, asked.first_byte
        if first > size:
            text = f"first_byte: {first}, the profile has {size} bytes"
            self._fail(ticket, CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)
            return
        end = min(size, first + PIECES_PER_CALL * PIECE_BYTES)
        with files[name].open("rb") as file:
            file.seek(first)
            has_more = True
            while has_more:
                data = file.read(min(PIECE_BYTES, end - first))
                piece = server_pb2.GetProfileResponse(
                    first_byte=first, data=data, file_name=name, byte_count=size
                )
                first += len(data)
                has_more = bool(data) and first < end
                self._reply(ticket, worker_pb2.CommandReply(get_profile=piece, more=has_more))

    def _files(self) -> list[Path]:
        """Profiles of this worker, oldest first."""
        if self._folder.is_dir():
            with suppress(OSError):  # a folder that can only be read has nobody who writes
                self._name.take(self._folder)
        return [path for _, path in sorted(self._stamped())]

    def _stamped(self) -> list[tuple[int, Path]]:
        """With the times in their names, in any order."""
        pattern = re.compile(re.escape(self._name.name) + r"-(\d+)\.(json\.gz|pstats)")
        found = ((pattern.fullmatch(path.name), path) for path in self._folder.glob("*"))
        return [(int(match[1]), path) for match, path in found if match]

    # The thread

    def _submit(self, ticket: Ticket, work: Callable[[], None]) -> None:
        if not self._room.acquire(blocking=False):
            text = "too many calls wait for profiles"
            _refuse(CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)

        def in_its_place() -> None:
            try:
                self._answered(ticket, work)
            finally:
                self._room.release()

        with suppress(RuntimeError):  # the worker ends: nobody is answered any more
            self._thread.submit(in_its_place)

    def _put(self, ticket: Ticket, work: Callable[[], None]) -> None:
        """From the engine's thread: one profile at a time, so there is always room for it."""
        with suppress(RuntimeError):
            self._thread.submit(self._answered, ticket, work)

    def _answered(self, ticket: Ticket, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # every command is answered, and a bug here ends no worker
            logger.exception("event=command_failed")
            self._fail(ticket, CallError.INTERNAL, CallReason.INTERNAL, "the profile failed")

    def _reply(self, ticket: Ticket, reply: worker_pb2.CommandReply) -> None:
        reply.command_id = ticket.command_id
        self._answers.put(EncodedReply(ticket, reply.SerializeToString(), not reply.more))

    def _fail(self, ticket: Ticket, error: CallError, reason: CallReason, message: str) -> None:
        self._answers.put(CallFailure(ticket, error, reason, message))


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def _refuse(error: CallError, reason: CallReason, text: str) -> NoReturn:
    raise CallRefused(error, reason, text)
