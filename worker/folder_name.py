"""The name under which a worker keeps files in a folder that others may share.

Servers of one user share their folders, and their workers may have one id: each takes a name that no live one
has, so that none lists or removes the files of another. The names are free again in its next life.
"""

import fcntl
import os
from pathlib import Path

MAX_NAMES = 64  # live workers of one id that share a folder


class FolderName:
    """Taken when first needed: who keeps nothing touches no disk. `name` is the worker's id until then."""

    def __init__(self, worker_id: str) -> None:
        self.name = worker_id
        self._worker_id = worker_id
        self._lock: int | None = None  # file descriptor: the lock dies with this process

    def take(self, folder: Path) -> None:
        """The worker's id, or with a number behind it where another has that; idempotent. Raises OSError."""
        if self._lock is not None:
            return
        for number in range(1, MAX_NAMES + 1):
            name = self._worker_id if number == 1 else f"{self._worker_id}.{number}"
            lock = os.open(folder / f".{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    why = f"no file can be locked there ({error.strerror})"  # some network file systems
                    raise OSError(error.errno, why) from error
            else:
                self._lock, self.name = lock, name
                return
        raise BlockingIOError(f"{MAX_NAMES} workers of the id {self._worker_id} share {folder}")

    def close(self) -> None:
        """Lets go of it; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
