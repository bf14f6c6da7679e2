"""Profiles of engine steps: torch's profiler on a GPU, Python's own elsewhere.

Runs on the engine's thread between steps; what was recorded is written on another. Owns the one profile that
runs. Knows no files and no wire.
"""

import gzip
import json
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.log import log_event
from worker.messages import EndProfile, Profile, Recorded

MAX_PAUSE_SECONDS = 0.2  # of all threads, when a part ends

logger = logging.getLogger("worker.profile")


class PythonProfile:
    """Calls of the engine's thread, for the module pstats."""

    suffix = ".pstats"

    def __init__(self) -> None:
        import cProfile  # slow to import, seldom asked for

        self._profile = cProfile.Profile()
        self._profile.enable()

    def step(self) -> None:
        """Python's profile knows no steps."""

    def stop(self) -> None:
        """Ends it."""
        self._profile.disable()

    def save(self, path: Path) -> None:
        """As pstats reads it."""
        self._profile.dump_stats(path)


class TorchProfile:
    """Operators and kernels as a Chrome trace with a mark at each step.

    Torch puts a recording's events in order while no other thread of the process runs, and a worker that is
    silent for two seconds is lost. So it is recorded in parts, as long as can be ended in time, and joined.
    """

    suffix = ".json.gz"

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._num_steps = 0
        self._part_steps = self._steps_left = 1
        self._begin_part()

    def step(self) -> None:
        """Begins the next mark, in the next part where this one is long enough."""
        self._num_steps += 1
        self._steps_left -= 1
        if self._steps_left:
            self._parts[-1].step()
        else:
            self._end_part()
            self._begin_part()

    def stop(self) -> None:
        """Ends it."""
        self._end_part()

    def save(self, path: Path) -> None:
        """A gzipped JSON file for chrome://tracing or Perfetto."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, gzip.open(path, "wt") as file:
            for number, part in enumerate(self._parts):
                part_path = Path(folder) / "part.json"
                part.export_chrome_trace(str(part_path))
                trace = json.loads(part_path.read_text())
                events = ",\n".join(map(json.dumps, trace.pop("traceEvents")))
                # Times are relative to a base that is the same for all parts of a process.
                file.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n' if not number else ",\n")
                file.write(events)
            file.write("\n]}\n")

    def _begin_part(self) -> None:
        import torch
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        part: Any = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
        part.step_num = self._num_steps  # marks are counted over all parts
        part.start()
        self._parts.append(part)
        self._steps_left = self._part_steps

    def _end_part(self) -> None:
        began = time.monotonic()
        self._parts[-1].stop()
        seconds = time.monotonic() - began
        if seconds < MAX_PAUSE_SECONDS / 4:
            self._part_steps *= 2
        elif seconds > MAX_PAUSE_SECONDS:
            self._part_steps = max(1, self._part_steps // 2)


@dataclass(slots=True)
class _Running:
    command: Profile
    recorded: Recorded
    first_step: int
    seen_step: int


class StepProfiler:
    """The profile that runs. Nothing that fails here reaches the engine."""

    def __init__(self) -> None:
        self._running: _Running | None = None

    @property
    def next_time(self) -> float | None:
        """When it ends if no more steps come."""
        return self._running.command.deadline if self._running is not None else None

    def begin(self, command: Profile, step_number: int) -> None:
        """Profiles what follows; tells who asked if one runs already or none can be had."""
        if self._running is not None:
            command.on_end(None, 0, "a profile is being captured already")
            return
        try:
            recorded: Recorded = TorchProfile() if command.uses_torch else PythonProfile()
        except Exception as error:
            logger.exception("event=profile_failed")
            command.on_end(None, 0, type(error).__name__)
            return
        log_event(logger, logging.WARNING, "profile_began", steps=command.steps)
        self._running = _Running(command, recorded, step_number, step_number)

    def end(self, command: EndProfile) -> None:
        """Nobody waits for it any more."""
        if self._running is not None and self._running.command.ticket == command.ticket:
            self._finish(self._running)

    def close(self) -> Profile | None:
        """The engine ends: nothing more is recorded. Whose profile ran is returned, and not told here."""
        running, self._running = self._running, None
        if running is None:
            return None
        self._guarded(running.recorded.stop)
        return running.command

    def look(self, step_number: int, now: float) -> None:
        """After each turn of the engine."""
        running = self._running
        if running is None:
            return
        has_stepped, running.seen_step = step_number > running.seen_step, step_number
        if step_number - running.first_step >= running.command.steps or now >= running.command.deadline:
            self._finish(running)
        elif has_stepped:
            self._guarded(running.recorded.step)

    def _finish(self, running: _Running) -> None:
        self._running = None
        num_steps = running.seen_step - running.first_step
        is_whole = self._guarded(running.recorded.stop)
        log_event(logger, logging.WARNING, "profile_ended", steps=num_steps)
        running.command.on_end(
            running.recorded if is_whole else None, num_steps, "" if is_whole else "stop failed"
        )

    def _guarded(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception:
            logger.exception("event=profile_failed")
            return False
        return True
