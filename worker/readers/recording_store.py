"""The folder of recordings: names, the few that are kept, and what each one is.

Owns the files of one worker. Touches the disk only when asked to: who never records, makes no folder. Servers
of one user share the folder, and their workers may have one id: each takes a name that no live one has, so
that none lists or removes the files of another.
"""

import fcntl
import glob
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from worker.log import log_event
from worker.readers.recording_file import SUFFIX, DamagedRecording, read_ends

KEPT_RECORDINGS = 4
MAX_NAMES = 64  # live workers of one id that share a folder

logger = logging.getLogger("worker.recorder")


class EndCause(IntEnum):
    """Why a recording ended; numbers are those of RecordingEndCause. 0: it runs."""

    NONE = 0
    STOPPED = 1
    DURATION = 2
    SIZE = 3
    SHUTDOWN = 4
    DISK = 5
    AUDIT = 6
    LOST = 7


@dataclass(frozen=True, slots=True)
class RecordingSummary:
    """What is known of a recording."""

    recording_id: str
    start_ns: int  # Unix, of its first event
    seconds: float
    num_bytes: int
    num_events: int
    num_requests: int
    dropped_events: int
    cause: EndCause
    note: str = ""
    message: str = ""  # of the system, where the disk failed


class NoSuchRecording(Exception):
    """No recording of that id is held."""


class RecordingStore:
    """The newest recordings of one worker."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        self.folder = folder
        self._worker_id = worker_id
        self._prefix = worker_id
        self._lock: int | None = None  # file descriptor: the lock on our name dies with this process
        self._known: dict[str, RecordingSummary] = {}  # of those that ended in this life

    def close(self) -> None:
        """Lets go of the name; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_name(self) -> None:
        """The worker's id, or with a number behind it where another live worker has that. Raises OSError."""
        if self._lock is not None:
            return
        for number in range(1, MAX_NAMES + 1):
            name = self._worker_id if number == 1 else f"{self._worker_id}.{number}"
            lock = os.open(self.folder / f".{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
            else:
                self._lock, self._prefix = lock, name
                return
        raise BlockingIOError(f"{MAX_NAMES} workers of the id {self._worker_id} share {self.folder}")

    def new_path(self) -> Path:
        """Where the next recording goes; the oldest one makes room. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._take_name()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(time.time_ns() // 1_000_000_000))
        number = 0
        while (path := self._path(f"{self._prefix}-{stamp}-{number}")).exists():
            number += 1
        for old in self._paths()[KEPT_RECORDINGS - 1 :]:
            old.unlink(missing_ok=True)
            self._known.pop(old.stem, None)
        return path

    def _path(self, recording_id: str) -> Path:
        return self.folder / f"{recording_id}{SUFFIX}"

    def _paths(self) -> list[Path]:
        """Files of this worker, the newest first."""
        found = [
            path for path in self.folder.glob(f"{glob.escape(self._prefix)}-*{SUFFIX}") if self._is_ours(path)
        ]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

    def _is_ours(self, path: Path) -> bool:
        """Not of a worker whose id begins with ours."""
        return path.stem[len(self._prefix) + 1 :].count("-") == 1

    def remember(self, summary: RecordingSummary) -> None:
        """One that ended."""
        self._known[summary.recording_id] = summary

    def summaries(self) -> list[RecordingSummary]:
        """Those that ended, the newest first; files that cannot be read are left out, and logged."""
        found: list[RecordingSummary] = []
        if not self.folder.is_dir():
            return found
        with suppress(OSError):  # a folder that can only be read has nobody who writes
            self._take_name()
        for path in self._paths():
            summary = self._known.get(path.stem) or self._read(path)
            if summary is not None:
                found.append(summary)
        return found

    def _read(self, path: Path) -> RecordingSummary | None:
        try:
            header, end = read_ends(path)
        except (OSError, DamagedRecording) as error:
            log_event(logger, logging.WARNING, "recording_unreadable", file=path.name, why=error)
            return None
        summary = RecordingSummary(
            recording_id=path.stem,
            start_ns=header.start_time.ToNanoseconds(),
            seconds=0.0,
            num_bytes=path.stat().st_size,
            num_events=end.event_count if end is not None else 0,
            num_requests=end.request_count if end is not None else 0,
            dropped_events=end.dropped_events if end is not None else 0,
            cause=EndCause(end.cause) if end is not None else EndCause.LOST,
            note=header.note,
        )
        if end is not None:
            self._known[path.stem] = summary
        return summary

    def find(self, recording_id: str) -> RecordingSummary:
        """One that ended; without an id the newest. Raises NoSuchRecording."""
        for summary in self.summaries():
            if recording_id in ("", summary.recording_id):
                return summary
        raise NoSuchRecording(recording_id)

    def open(self, recording_id: str) -> BinaryIO:
        """The bytes of one that ended. Raises NoSuchRecording."""
        try:
            return self._path(self.find(recording_id).recording_id).open("rb")
        except FileNotFoundError:
            raise NoSuchRecording(recording_id) from None
