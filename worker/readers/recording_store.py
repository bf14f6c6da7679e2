"""The folder of recordings: names, the few that are kept, and what each one is.

Owns the files of one worker, under a name of its own. Touches the disk only when asked to: who never records,
makes no folder.
"""

import glob
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from worker.folder_name import FolderName
from worker.log import log_event
from worker.readers.recording_file import SUFFIX, DamagedRecording, read_ends

KEPT_RECORDINGS = 4

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
        self._name = FolderName(worker_id)
        self._known: dict[str, RecordingSummary] = {}  # of those that ended in this life

    def close(self) -> None:
        """Lets go of the name; idempotent."""
        self._name.close()

    def new_path(self) -> Path:
        """Where the next recording goes; the oldest one makes room. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._name.take(self.folder)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(time.time_ns() // 1_000_000_000))
        number = 0
        while (path := self._path(f"{self._name.name}-{stamp}-{number}")).exists():
            number += 1
        for old in self._paths()[KEPT_RECORDINGS - 1 :]:
            old.unlink(missing_ok=True)
            self._known.pop(old.stem, None)
        return path

    def _path(self, recording_id: str) -> Path:
        return self.folder / f"{recording_id}{SUFFIX}"

    def _paths(self) -> list[Path]:
        """Files of this worker, the newest first."""
        name = glob.escape(self._name.name)
        found = [path for path in self.folder.glob(f"{name}-*{SUFFIX}") if self._is_ours(path)]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

    def _is_ours(self, path: Path) -> bool:
        """Not of a worker whose id begins with ours."""
        return path.stem[len(self._name.name) + 1 :].count("-") == 1

    def remember(self, summary: RecordingSummary) -> None:
        """One that ended."""
        self._known[summary.recording_id] = summary

    def summaries(self) -> list[RecordingSummary]:
        """Those that ended, the newest first; files that cannot be read are left out, and logged."""
        found: list[RecordingSummary] = []
        if not self.folder.is_dir():
            return found
        with suppress(OSError):  # a folder that can only be read has nobody who writes
            self._name.take(self.folder)
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
