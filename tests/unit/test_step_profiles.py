"""Profiles of steps: a trace in parts is one trace, and what fails in a profiler never reaches the engine."""

import errno
import gzip
import json
import os
from pathlib import Path

import pytest

from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker import profiling
from worker.channels import OutputQueue
from worker.link.operators import OperatorDesk
from worker.messages import (
    CallFailure,
    CallReason,
    EndProfile,
    EngineCommand,
    LinkMessage,
    Profile,
    Recorded,
    Ticket,
)
from worker.profiling import StepProfiler, TorchProfile


class Ends:
    """Whoever asked."""

    def __init__(self) -> None:
        self.told: list[tuple[Recorded | None, int, str]] = []

    def __call__(self, recorded: Recorded | None, num_steps: int, why: str) -> None:
        self.told.append((recorded, num_steps, why))


def profile_of(ends: Ends, *, steps: int = 3, uses_torch: bool = False, number: int = 1) -> Profile:
    return Profile(Ticket("service#1", number), steps, 100.0, uses_torch, ends)


class Part:
    """What torch's profiler has of two steps."""

    def __init__(self, first: int) -> None:
        self.first = first

    def export_chrome_trace(self, path: str) -> None:
        events = [{"name": f"ProfilerStep#{self.first + at}", "ts": self.first + at} for at in range(2)]
        Path(path).write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))


def test_parts_are_joined_into_one_trace(tmp_path: Path) -> None:
    recorded = TorchProfile.__new__(TorchProfile)
    recorded._parts = [Part(0), Part(2), Part(4)]
    recorded.save(tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz") as file:
        trace = json.load(file)
    assert trace["schemaVersion"] == 1
    assert [event["name"] for event in trace["traceEvents"]] == [f"ProfilerStep#{at}" for at in range(6)]
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json.gz"], "nothing else is left"


@pytest.mark.slow
def test_a_torch_trace_has_every_step_once_and_in_order(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    recorded = TorchProfile()
    for _ in range(12):
        torch.ones(4, 4).sum()
        recorded.step()
    recorded.stop()
    assert len(recorded._parts) > 1
    recorded.save(tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    marks = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep#")]
    assert [mark["name"] for mark in marks][:12] == [f"ProfilerStep#{number}" for number in range(12)]
    assert [mark["ts"] for mark in marks] == sorted(mark["ts"] for mark in marks)
    assert sum(event.get("name") == "aten::ones" for event in events) == 12
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json.gz"], "nothing else is left"


def test_a_profile_ends_after_its_steps_at_its_deadline_or_when_nobody_waits() -> None:
    profiler, steps, deadline, left = StepProfiler(), Ends(), Ends(), Ends()
    profiler.begin(profile_of(steps), 10)
    for number in (10, 11, 12):
        profiler.look(number, 0.0)
        assert not steps.told
    profiler.look(13, 0.0)
    assert [count for _, count, _ in steps.told] == [3]
    profiler.begin(profile_of(deadline), 13)
    assert profiler.next_time == 100.0
    profiler.look(14, 99.0)
    profiler.look(14, 100.0)
    assert [count for _, count, _ in deadline.told] == [1]
    profiler.begin(profile_of(left, number=7), 14)
    profiler.end(EndProfile(Ticket("service#1", 8)))
    assert not left.told, "another one's"
    profiler.end(EndProfile(Ticket("service#1", 7)))
    assert len(left.told) == 1
    assert profiler.next_time is None


def test_what_fails_in_a_profiler_is_told_to_who_asked_and_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(profiling.PythonProfile):
        def stop(self) -> None:
            super().stop()
            raise RuntimeError("broken")

    profiler, second, ends = StepProfiler(), Ends(), Ends()
    monkeypatch.setattr(profiling, "PythonProfile", Broken)
    profiler.begin(profile_of(ends), 0)
    profiler.begin(profile_of(second), 0)
    assert second.told == [(None, 0, "a profile is being captured already")]
    profiler.look(3, 0.0)
    assert [(recorded, why) for recorded, _, why in ends.told] == [(None, "stop failed")]
    profiler.look(4, 0.0)


class HalfWritten:
    """A profile that cannot be written to its end."""

    suffix = ".pstats"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def step(self) -> None:
        """It runs nowhere."""

    def stop(self) -> None:
        """It runs nowhere."""

    def save(self, path: Path) -> None:
        path.write_text("half of it")
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no trace was recorded"), CallReason.INTERNAL),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CallReason.RECORDING_FAILED),
    ],
)
def test_a_profile_that_cannot_be_written_is_answered_and_leaves_no_file(
    tmp_path: Path, error: Exception, reason: CallReason
) -> None:
    """What torch raises was answered by nobody, and half a file was the newest profile of all."""
    answers: OutputQueue[LinkMessage] = OutputQueue(16)
    begun: list[EngineCommand] = []
    desk = OperatorDesk(tmp_path, "worker-0", uses_torch=True, to_engine=begun.append, answers=answers)
    ticket = Ticket("service#1", 1)
    desk.take(ticket, worker_pb2.Command(profile=server_pb2.CaptureProfileRequest(steps=3)), 60.0)
    (command,) = begun
    assert isinstance(command, Profile)
    command.on_end(HalfWritten(error), 3, "")
    desk._thread.shutdown(wait=True)
    (answer,) = answers.take(16)
    assert isinstance(answer, CallFailure)
    assert (answer.ticket, answer.reason) == (ticket, reason)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    desk.close()
    answers.close()
