"""Runs estimates, one at a time, each in a child process that ends with it.

Owns a thread and at most one child. Every task has a deadline; a child that is late, or that nobody waits for
any more, is killed. `submit` and `cancel` from any thread; answers come on the estimator's own.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from worker.log import log_event
from worker.readers.samples import LoggedRequest
from worker.trace.estimate import EstimateTask, write_task

MAX_WAITING = 4

logger = logging.getLogger("worker.estimator")


class EstimateLate(Exception):
    """There was no answer in time."""


class EstimateBroken(Exception):
    """The child failed: a bug of ours."""


Answer = dict[str, Any] | EstimateLate | EstimateBroken


@dataclass(frozen=True, slots=True)
class Estimate:
    """One question; ``key`` tells it from others for `cancel`."""

    key: object
    task: EstimateTask
    requests: Sequence[LoggedRequest]
    deadline: float  # of the clock
    on_answer: Callable[[Answer], None]


class Estimator:
    """The thread, made with the first question."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[Estimate] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running: Estimate | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, estimate: Estimate) -> bool:
        """Puts a question in the queue; False: too many wait."""
        with self._changed:
            if self._is_stopping or len(self._waiting) >= MAX_WAITING:
                return False
            self._waiting.append(estimate)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvatlas-estimator", daemon=True)
                self._thread.start()
            self._changed.notify()
            return True

    def cancel(self, key: object) -> None:
        """Nobody waits for this one any more: it is not answered."""
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each.key != key)
            if self._running is not None and self._running.key == key:
                self._is_cancelled = True
                self._kill()

    def close(self) -> None:
        """Ends the child and the thread; idempotent."""
        with self._changed:
            self._is_stopping = True
            self._waiting.clear()
            self._is_cancelled = True
            self._kill()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _run(self) -> None:
        while (estimate := self._next()) is not None:
            answer = self._answer_safely(estimate)
            with self._lock:
                self._running = None
                is_wanted = not self._is_cancelled
            if is_wanted:
                self._tell(estimate, answer)

    def _answer_safely(self, estimate: Estimate) -> Answer:
        try:
            return self._answer(estimate)
        except Exception as error:  # whatever it is, the next question is answered
            logger.exception("event=estimate_failed")
            return EstimateBroken(str(error) or type(error).__name__)

    def _tell(self, estimate: Estimate, answer: Answer) -> None:
        try:
            estimate.on_answer(answer)
        except Exception:  # as above
            logger.exception("event=estimate_not_told")

    def _next(self) -> Estimate | None:
        with self._changed:
            while not self._waiting and not self._is_stopping:
                self._changed.wait()
            if self._is_stopping:
                return None
            self._running, self._is_cancelled = self._waiting.popleft(), False
            return self._running

    def _answer(self, estimate: Estimate) -> Answer:
        if self._clock() >= estimate.deadline:
            return EstimateLate()
        began = self._clock()
        output = self._ask_child(estimate)
        if self._clock() >= estimate.deadline:
            return EstimateLate()
        try:
            answer: dict[str, Any] = json.loads(output)
        except ValueError:
            if not self._is_cancelled:
                log_event(logger, logging.ERROR, "estimate_failed", output=output[-200:])
            return EstimateBroken("the estimate failed")
        log_event(
            logger,
            logging.INFO,
            "estimated",
            settings=len(estimate.task.settings),
            requests=len(estimate.requests),
            seconds=self._clock() - began,
        )
        return answer

    def _ask_child(self, estimate: Estimate) -> bytes:
        """What the child writes; less than that where it was killed."""
        code = f"import sys; sys.path[:] = {sys.path!r}; from worker.trace.estimate import main; main()"
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            with self._lock:
                self._child = child
                if self._is_cancelled:
                    child.kill()
            timer = threading.Timer(max(0.0, estimate.deadline - self._clock()), child.kill)
            timer.start()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                write_task(estimate.task, estimate.requests, child.stdin)  # type: ignore[arg-type]
                return child.stdout.read()  # stdin stays open: its end tells the child that we are gone
            except BrokenPipeError:
                return b""
            finally:
                timer.cancel()
                with suppress(OSError):  # what it was not told is for nobody now
                    child.stdin.close()
                with self._lock:
                    self._child = None
