"""The processes of a benchmark's stack: they end with it, however it ends."""

import os
import sys

import pytest

from benchmarks import stack
from service.config import ServiceConfig
from worker.config import WorkerConfig


class Ended:
    """A process that is over; keeps its command."""

    def __init__(self, command: list[str], **_: object) -> None:
        self.command = command

    def terminate(self) -> None: ...

    def wait(self, timeout: float) -> int:
        return 0


@pytest.mark.parametrize(("module", "config"), [("worker", WorkerConfig), ("service", ServiceConfig)])
def test_a_process_watches_the_benchmark_that_started_it(
    monkeypatch: pytest.MonkeyPatch, module: str, config: type
) -> None:
    """A benchmark that was killed left worker and services on the machine."""
    monkeypatch.setattr(stack.subprocess, "Popen", Ended)
    with stack._process([module], {"model": "random:tiny"}, {"A": "1"}, None) as process:
        command = process.command
    assert command[: command.index(module)] == ["env", "A=1", sys.executable, "-m"]
    assert command[command.index("--parent-watch") + 1] == str(os.getpid())
    assert command[-2:] == ["--model", "random:tiny"]
    assert "parent_watch" in config.__dataclass_fields__, "an option of this process"
