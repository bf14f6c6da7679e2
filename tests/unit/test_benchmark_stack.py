"""The processes of a benchmark's stack: they end with it, however it ends."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
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


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
while True:
    signal.pause()
"""


def test_a_process_that_does_not_end_is_killed() -> None:
    """Not left behind with what it holds, and not waited for as long as it likes."""
    with stack.ending(
        subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE), seconds=0.1
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from here on it is stubborn
        process.stdout.close()
    assert process.returncode == -9


STARTER = """
import os, subprocess, sys
command = [sys.executable, "-m", "benchmarks.scripted_worker", "--model", "random:tiny", *sys.argv[1:]]
print(subprocess.Popen([*command, "--parent-watch", str(os.getpid())]).pid, flush=True)
sys.stdin.read()
"""


def test_a_scripted_worker_ends_with_the_benchmark_that_started_it(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    flags = [word for name in ("engine", "control") for word in (f"--{name}", f"ipc://{tmp_path}/{name}")]
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    assert starter.stdin is not None
    worker = psutil.Process(int(starter.stdout.readline()))
    try:
        wait_until(lambda: (tmp_path / "control").exists())
        starter.kill()
        starter.wait()
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    finally:
        starter.kill()
        starter.stdin.close()
        starter.stdout.close()
        if worker.is_running():
            worker.kill()
