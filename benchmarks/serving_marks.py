"""A worker or a service that notes when a request passes its stations, for benchmarks/serving_path.py.

    python -m benchmarks.serving_marks FOLDER worker --model random:tiny ...

Wraps methods of the named process before its main runs, and writes FOLDER/<process>.marks at its end: a list
of [station, ns of CLOCK_MONOTONIC], which all processes of a machine share. A mark costs under a
microsecond. What leaves a process is marked before the call that sends it: its receiver may be faster.
"""

import functools
import importlib
import inspect
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MOST_MARKS = 1_000_000  # of a process; the oldest are lost

TORCH = ("worker.execution.torch_runner:TorchRunner", "worker.execution.torch_runner:Launched")
REPLAYED = ("worker.execution.cuda_runner:_Replayed", "worker.execution.cuda_runner:_ReplayedPrompts")
RUNNERS = {
    "fake": ("worker.execution.fake_runner:FakeRunner", "worker.execution.fake_runner:FakeHandle"),
    "cpu": TORCH,
    "cuda": (*TORCH, *REPLAYED),
}
"""By device: the runner's module and class, then those of its steps."""

Condition = Callable[..., bool]


def _always(*arguments: Any) -> bool:
    return True


class Marks:
    """Stations passed, in order of time; threads may append at once."""

    def __init__(self) -> None:
        self.passed: deque[tuple[str, int]] = deque(maxlen=MOST_MARKS)

    def wrap(self, where: str, before: str = "", after: str = "", when: Condition = _always) -> None:
        """Marks calls of `module:Class.method` for whose arguments `when` holds."""
        module, _, path = where.partition(":")
        owner_name, _, name = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        inner = getattr(owner, name)
        make = self._async if inspect.iscoroutinefunction(inner) else self._plain
        setattr(owner, name, functools.wraps(inner)(make(inner, before, after, when)))

    def write(self, folder: Path, process: str) -> None:
        """All of them, to a file of that process."""
        Path(folder, f"{process}.marks").write_text(json.dumps(list(self.passed)))

    def _note(self, station: str) -> None:
        if station:
            self.passed.append((station, time.monotonic_ns()))

    def _plain(self, inner: Any, before: str, after: str, when: Condition) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if not when(*arguments):
                return inner(*arguments, **named)
            self._note(before)
            result = inner(*arguments, **named)
            self._note(after)
            return result

        return call

    def _async(self, inner: Any, before: str, after: str, when: Condition) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            if not when(*arguments):
                return await inner(*arguments, **named)
            self._note(before)
            result = await inner(*arguments, **named)
            self._note(after)
            return result

        return call


def _has_tokens(_self: Any, item: Any) -> bool:
    return any(columns.token_ids for columns in getattr(item, "by_source", {}).values())


def _has_starts(_self: Any, item: Any) -> bool:
    return any(columns.starts for columns in getattr(item, "by_source", {}).values())


def _is_delta(_stream: Any, message: Any) -> bool:
    return bool(message.HasField("delta"))


def _is_add(_self: Any, command: Any, *_: Any) -> bool:
    return type(command).__name__ == "AddRequest"


def mark_engine(marks: Marks, device: str) -> None:
    """Stations of a step, in a worker or without one."""
    owner, *handles = RUNNERS[device]
    marks.wrap("worker.scheduling.scheduler:Scheduler.add", after="queued")
    marks.wrap("worker.scheduling.scheduler:Scheduler.schedule", after="scheduled")
    marks.wrap(f"{owner}.launch", after="launched")
    for handle in handles:
        marks.wrap(f"{handle}.result", before="asks for result")
    marks.wrap("worker.scheduling.scheduler:Scheduler.commit", before="result there", after="committed")


def mark_worker(marks: Marks, arguments: Sequence[str]) -> None:
    """The worker's stations."""
    mark_engine(marks, next(device for device in RUNNERS if device in arguments))
    marks.wrap("worker.link.server:EngineLink._add", before="worker has it")
    marks.wrap("worker.channels:CommandQueue.put", before="worker decoded", when=_is_add)
    marks.wrap("worker.obey:Obedience.obey", before="engine has it", when=_is_add)
    marks.wrap("worker.channels:OutputQueue.put", before="token out", when=_has_tokens)
    marks.wrap("worker.channels:OutputQueue.put", before="start out", when=_has_starts)
    marks.wrap("worker.link.server:EngineLink._send_step", before="link has token", when=_has_tokens)
    marks.wrap("worker.link.server:EngineLink._send_bytes", before="token encoded")


def mark_service(marks: Marks, arguments: Sequence[str]) -> None:
    """The service's stations."""
    marks.wrap("service.interceptor:Interceptor.intercept_service", before="headers there")
    marks.wrap("service.telemetry:Telemetry._call", before="call")
    marks.wrap("service.handlers.generation:GenerationServicer.StreamGenerate", before="handler")
    marks.wrap("service.handlers.run:GenerationRun.submit", before="checked")
    marks.wrap("service.fleet.workers:WorkerPool.pick", after="worker picked")
    marks.wrap("service.fleet.link_sockets:LinkSockets.send", before="request out")
    marks.wrap(
        "service.fleet.live_runs:LiveRuns.fan_out",
        before="service has token",
        when=lambda runs, step: bool(len(step.token_ids)),
    )
    marks.wrap(
        "service.fleet.live_runs:LiveRuns.fan_out",
        before="service has start",
        when=lambda runs, step: bool(step.starts),
    )
    marks.wrap("service.handlers.generation:_Stream.begin", before="start told", after="start written")
    marks.wrap("service.handlers.generation:_Stream.write", before="message out", when=_is_delta)


MARKED = {"worker": mark_worker, "service": mark_service}


def main() -> None:
    """Runs the process as `python -m` would."""
    folder, process, *arguments = sys.argv[1:]
    marks = Marks()
    MARKED[process](marks, arguments)
    try:
        status = importlib.import_module(f"{process}.__main__").main(arguments)
    finally:
        marks.write(Path(folder), process)
    sys.exit(status)


if __name__ == "__main__":
    main()
