"""Everything a GPU host shows, in one call: the GPU tests, then every measurement, each with its own limit.

    python -m benchmarks.suite
    python -m benchmarks.suite --only peers-0.6b startup-0.6b --budget 560
    python -m benchmarks.suite --gpus 2 --peers vllm mini_sglang --site vllm=/opt/vllm \\
        --site mini_sglang=/opt/flashinfer:/opt/mini-sglang/python

Tests need the device right, not alone: their files run in several processes at once. Measurements run one
after another. With several GPUs each has a share of the cores to itself and takes the next stage when it is
free; a command sees its own GPU alone. A stage that fails or runs out of its time is named at the end and
does not stop the others. What does not fit into the rest of `--budget` is not begun and named too. What a
command prints: one file in `--logs`; its figures: the JSON that it writes. Ends with 1 if a stage failed.
What the stages are is in benchmarks/suite_stages.py.
"""

import argparse
import collections
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite_stages import Stage, stages

POLL_SECONDS = 0.2  # after which a suite that is to end is noticed
BESIDE = "tests and other measurements on the host's other GPUs and cores"


@dataclass(frozen=True, slots=True)
class Lane:
    """A GPU, by its number, and the cores that go with it; commands of a host's only lane may use all."""

    gpu: int = 0
    cores: str = ""  # as taskset takes them; empty: all

    def words(self, command: str, at_once: int = 1) -> list[str]:
        """Of a command in this lane, beside others; `python` is this interpreter."""
        found = [sys.executable if word == "python" else word for word in shlex.split(command)]
        if at_once > 1:  # threads of all on every core wait for each other: of 1 minute of a test it made 6
            num_cores = len(self.cores.split(",")) if self.cores else len(os.sched_getaffinity(0))
            found = ["env", f"OMP_NUM_THREADS={max(1, num_cores // at_once)}", *found]
        if self.cores:
            found = ["env", f"CUDA_VISIBLE_DEVICES={self.gpu}", "taskset", "-c", self.cores, *found]
        return found


def lanes(count: int) -> list[Lane]:
    """So many GPUs, each with an even share of the cores that this process may use."""
    if count == 1:
        return [Lane()]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count)
    return [
        Lane(gpu, ",".join(map(str, cores[gpu * share : (gpu + 1) * share] or cores[-1:])))
        for gpu in range(count)
    ]


def run(words: Sequence[str], log: Path, limit_s: float, stopping: threading.Event) -> str:
    """Runs a command in a process group of its own; how it ended: ok, failed (n), over time, or stopped."""
    with log.open("wb") as out:  # empty where nothing is run: what is there is of another suite
        if limit_s <= 0 or stopping.is_set():
            return "over time" if limit_s <= 0 else "stopped"
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return _outcome(process, time.monotonic() + limit_s, stopping)
        finally:
            _end(process)


def _outcome(process: subprocess.Popen[bytes], deadline: float, stopping: threading.Event) -> str:
    while not stopping.is_set():
        left = deadline - time.monotonic()
        try:
            code = process.wait(min(POLL_SECONDS, max(0.0, left)))
        except subprocess.TimeoutExpired:
            if left <= 0:
                return "over time"
        else:
            return "ok" if code == 0 else f"failed ({code})"
    return "stopped"


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: engines leave children that hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_stage(stage: Stage, lane: Lane, logs: Path, limit_s: float, stopping: threading.Event) -> str:
    """ok, or what became of each command that is not, or that all tests were skipped; then their counts."""
    deadline = time.monotonic() + limit_s

    def outcome_of(name: str) -> str:
        left = deadline - time.monotonic()
        return run(lane.words(stage.commands[name], stage.at_once), logs / f"{name}.log", left, stopping)

    with ThreadPoolExecutor(stage.at_once) as pool:
        outcomes = dict(zip(stage.commands, pool.map(outcome_of, stage.commands), strict=True))
    bad = {name: outcome for name, outcome in outcomes.items() if outcome != "ok"}
    if len(stage.commands) == 1:
        text = next(iter(outcomes.values()))
    else:
        text = "; ".join(f"{name} {outcome}" for name, outcome in bad.items()) or "ok"
    counts = count_tests(logs / f"{name}.log" for name in stage.commands)
    if text == "ok" and counts and not counts.get("passed"):
        text = "nothing tested"  # pytest ends with 0 where it skips all, as without a device
    return text + (f" [{', '.join(f'{number} {word}' for word, number in counts.items())}]" if counts else "")


def count_tests(logs: Iterable[Path]) -> dict[str, int]:
    """What the last lines of pytest say, added up: {"passed": 40, "skipped": 2}; nothing for other logs."""
    total: collections.Counter[str] = collections.Counter()
    for log in logs:
        text = log.read_text(errors="replace") if log.exists() else ""
        ends = re.findall(r"^=+ (.*\d+ (?:passed|failed|skipped|error|deselected).*) in .*=+$", text, re.M)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", ends[-1] if ends else ""):
            total[word.removesuffix("s") if word == "errors" else word] += int(number)
    return dict(total)


class Suite:
    """Stages that lanes take in turn."""

    def __init__(self, todo: Sequence[Stage], logs: Path, budget_s: float) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, str] = {}
        self._names = [stage.name for stage in todo]
        self._waiting = deque(todo)
        self._logs = logs
        self._deadline = time.monotonic() + budget_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # of what waits, of the outcomes and of what is printed

    def run(self, lane: Lane) -> None:
        """Takes stages until none is left; a line is printed as each begins and ends."""
        while (stage := self._next()) is not None:
            began = time.monotonic()
            limit_s = min(stage.limit_s, self._deadline - began)
            outcome = run_stage(stage, lane, self._logs, limit_s, self._stopping)
            with self._lock:
                self.outcomes[stage.name] = f"{outcome} after {time.monotonic() - began:.0f} s"
                self._say(stage.name, self.outcomes[stage.name])

    def stop(self) -> None:
        """Ends what runs, with all that it has started, and begins nothing more."""
        self._stopping.set()

    def _next(self) -> Stage | None:
        with self._lock:
            while self._waiting and not self._stopping.is_set():
                stage, left = self._waiting.popleft(), max(0.0, self._deadline - time.monotonic())
                if left >= stage.usual_s:
                    self._say(stage.name, "; ".join(stage.commands))
                    return stage
                self.outcomes[stage.name] = f"not begun: takes {stage.usual_s} s, {left:.0f} s left"
        return None

    def _say(self, name: str, text: str) -> None:
        print(f"[{self._names.index(name) + 1}/{len(self._names)}] {name}: {text}", flush=True)


def run_all(todo: Sequence[Stage], logs: Path, budget_s: float, gpus: int = 1) -> dict[str, str]:
    """The outcome of each stage by name, in the order of the stages."""
    suite = Suite(todo, logs, budget_s)
    with ThreadPoolExecutor(gpus) as pool:
        try:
            for end in [pool.submit(suite.run, lane) for lane in lanes(gpus)]:
                end.result()
        except BaseException:  # a signal: commands have groups of their own and do not hear of it
            suite.stop()
            raise
    return {stage.name: suite.outcomes[stage.name] for stage in todo}


def main() -> int:
    """Runs what was asked for and prints a table of outcomes."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    names = [stage.name for stage in stages()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="in this order")
    parser.add_argument("--budget", type=float, default=3600, help="seconds of the whole run")
    parser.add_argument("--logs", type=Path, default=Path("suite-logs"))
    parser.add_argument("--gpus", type=int, default=1, help="of this host, each with its share of the cores")
    parser.add_argument("--peers", nargs="+", default=["vllm"], metavar="ENGINE", help="measured beside ours")
    parser.add_argument("--site", action="append", default=[], metavar="ENGINE=PATHS", help="its packages")
    options = parser.parse_args()
    beside = BESIDE if options.gpus > 1 else ""
    by_name = {stage.name: stage for stage in stages(options.peers, options.site, beside)}
    outcomes = run_all([by_name[name] for name in options.only], options.logs, options.budget, options.gpus)
    width = max(map(len, outcomes))
    for name, outcome in outcomes.items():
        print(f"{name:<{width}}  {outcome}")
    return int(any(not outcome.startswith(("ok", "not begun")) for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
