"""The other end of benchmarks.peers.child: an engine's process, what it says, and its end.

Owns the process, its group and the thread that reads what it prints; all are gone after `close`.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.peers.child import MARK
from benchmarks.peers.engines import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 15  # the last of them are shown when an engine fails
MAX_MESSAGES = 8  # unread; an engine says one thing per order
MAX_LINE = 1 << 20  # bytes; bars are redrawn without an end of line
POLL_SECONDS = 0.2  # after which a process that died without a word is noticed
CLOSE_SECONDS = 10.0

Message = dict[str, Any]


class EngineProcess:
    """One engine that loads as soon as this is made.

    `log`: file for all that the engine prints. `site`: folders of its packages, as in PYTHONPATH.
    """

    def __init__(self, engine: str, model: str, device: str, tokens: int, log: Path, site: str = "") -> None:
        self.ended = ""  # why nothing more comes, once that is so
        self.last_lines: deque[str] = deque(maxlen=LOG_LINES)
        self._broken = ""  # why nothing more is read, once that is so; set by the reader
        self._began = time.monotonic()
        self._closed = False
        self._log = log
        self._scratch = tempfile.TemporaryDirectory(prefix="kvatlas-peers-")
        self._messages: queue.Queue[Message] = queue.Queue(MAX_MESSAGES)
        # With packages of its own an engine does not see those of this program, whose versions may differ.
        paths = [*site.split(":"), str(ROOT), str(ROOT / "protos")] if site else [*filter(None, sys.path)]
        environment = {**ENVIRONMENT.get(engine, {}), "PYTHONPATH": ":".join(paths)}
        arguments = [engine, model, device, str(tokens), self._scratch.name]
        self._process = subprocess.Popen(
            [
                "env",
                *(f"{name}={value}" for name, value in environment.items()),
                *(sys.executable, "-m", "benchmarks.peers.child", *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"{engine}-output", daemon=True)
        self._reader.start()

    @property
    def group(self) -> int:
        """Id of its process group."""
        return self._process.pid

    def ready(self, limit_seconds: float) -> Message | None:
        """What it says when it has loaded; None if it has ended or takes longer, counted from its start."""
        return self._next(self._began + limit_seconds - time.monotonic(), "not ready")

    def run(self, workload: str, number: int, limit_seconds: float) -> Message | None:
        """One pass of a workload; None if the engine ends instead or takes longer, which ends it."""
        if self._closed:
            return None
        assert self._process.stdin is not None
        order = json.dumps({"workload": workload, "pass": number}) + "\n"
        try:
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the reader says so
        answer = self._next(limit_seconds, f"{workload} pass {number} not done")
        if answer is None or (answer.get("workload"), answer.get("pass")) == (workload, number):
            return answer
        self._end(f"the answer to another order: {answer.get('workload')} pass {answer.get('pass')}")
        return None

    def close(self) -> None:
        """Ends the whole group: engines have children that hold the device. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._reader.join(CLOSE_SECONDS)
        self._scratch.cleanup()

    def _next(self, limit_seconds: float, what: str) -> Message | None:
        began = time.monotonic()
        while not self._closed:
            left = began + limit_seconds - time.monotonic()
            try:
                return self._messages.get(timeout=min(max(left, 0.0), POLL_SECONDS))
            except queue.Empty:
                code = self._process.poll()
            if code is not None:
                self._reader.join(POLL_SECONDS)  # its last words may still be in the pipe
            if (self._broken or code is not None) and self._messages.empty():
                self._end(self._broken or f"exit {code}")
            elif left <= 0:
                self._end(f"{what} after {time.monotonic() - began:.0f} s")
        return None

    def _end(self, why: str) -> None:
        self.ended = why
        self.close()

    def _read(self) -> None:
        try:
            self._read_all()
        except Exception as error:  # whatever it is, the pass in progress ends with it
            self._broken = f"{type(error).__name__}: {error}"

    def _read_all(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, self._log.open("wb") as log:
            while not self._broken and (line := output.readline(MAX_LINE)):
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    self._broken = self._hear(text.removeprefix(MARK).rstrip())
                    continue
                log.write(line)
                log.flush()
                if text.strip():
                    self.last_lines.append(text.rstrip()[-300:])

    def _hear(self, text: str) -> str:
        """Keeps what was said for `_next`; why that cannot be done, if it cannot."""
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            return f"not an answer: {text[:200]!r}"
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            return f"more than {MAX_MESSAGES} answers that nobody has taken"
        return ""
