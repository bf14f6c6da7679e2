"""Profiles of engine steps: torch's profiler where the device is torch's, Python's own elsewhere.

Runs on the engine's thread between steps; what was recorded is written on another. Owns the one profile that
runs. Knows no files and no wire.
"""

import cProfile
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.log import log_event
from worker.messages import EndProfile, Profile, Recorded

logger = logging.getLogger("worker.profile")


class PythonProfile:
    """Calls of the engine's thread, for the module pstats."""

    suffix = ".pstats"

    def __init__(self) -> None:
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
    """Operators, kernels and, without a GPU, Python's calls, as a Chrome trace with a mark at each step."""

    suffix = ".json.gz"

    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(
            activities=activities,
            schedule=lambda _: ProfilerAction.RECORD,
            with_stack=len(activities) == 1,
        )
        self._profile.start()

    def step(self) -> None:
        """Begins the next mark."""
        self._profile.step()

    def stop(self) -> None:
        """Ends it and puts the events in order."""
        self._profile.stop()

    def save(self, path: Path) -> None:
        """A gzipped JSON file for chrome://tracing or Perfetto."""
        self._profile.export_chrome_trace(str(path))


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

    def look(self, step_number: int, now: float) -> None:
        """After each turn of the engine."""
        running = self._running
        if running is None:
            return
        if step_number > running.seen_step:
            running.seen_step = step_number
            self._guarded(running.recorded.step)
        if step_number - running.first_step >= running.command.steps or now >= running.command.deadline:
            self._finish(running)

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
