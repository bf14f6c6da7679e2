"""Everything a GPU host shows, in one call: the GPU tests, then every measurement, each with its own limit.

    python -m benchmarks.suite
    python -m benchmarks.suite --only peers-8b startup-0.6b --budget 560

A stage that fails or runs out of its time is named at the end and does not stop the others. What does not fit
into the rest of `--budget` is not begun and named too. Output of a stage: one file in `--logs`; its figures:
the JSON that its benchmark writes. Ends with 1 if a stage failed.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SMALL, LARGE = "random:qwen3-0.6b", "random:llama-3.1-8b"
# As `make memcheck`: a read past a tensor would hit the next one of the caching allocator.
MEMCHECK = (
    "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no"
    " --target-processes all --error-exitcode 9 --launch-timeout 0"
)
KERNEL_TESTS = (
    "tests/gpu/test_small_kernels_gpu.py tests/gpu/test_attention_gpu.py tests/gpu/test_sample_kernel_gpu.py"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A command, how long it takes on one H200 and how long it may take, in seconds."""

    name: str
    command: str
    usual_s: int
    limit_s: int

    @property
    def arguments(self) -> list[str]:
        return [sys.executable if word == "python" else word for word in shlex.split(self.command)]


def _tests(name: str, files: str, usual_s: int, limit_s: int) -> Stage:
    return Stage(name, f"python -m pytest -v -x -p no:cacheprovider -m gpu {files}", usual_s, limit_s)


STAGES: tuple[Stage, ...] = (
    _tests("tests-kernels", KERNEL_TESTS, 180, 400),
    _tests("tests-engine", "tests/gpu --deselect " + " --deselect ".join(KERNEL_TESTS.split()), 300, 600),
    Stage("peers-0.6b", f"python -m benchmarks.peers --model {SMALL} --peers kvatlas vllm", 230, 420),
    Stage("peers-8b", f"python -m benchmarks.peers --model {LARGE} --peers kvatlas vllm", 330, 560),
    Stage("startup-0.6b", f"python -m benchmarks.startup --model {SMALL}", 60, 150),
    Stage("startup-8b", f"python -m benchmarks.startup --model {LARGE}", 90, 200),
    Stage("serving", f"python -m benchmarks.serving --model {SMALL}", 150, 300),
    Stage(
        "fp8-8b", f"python -m benchmarks.offline --model {LARGE} --weight-dtype fp8 --kv-dtype fp8", 70, 150
    ),
    Stage("deterministic-0.6b", f"python -m benchmarks.offline --model {SMALL} --deterministic", 50, 120),
    Stage("observation", f"python -m benchmarks.observation --device cuda --model {SMALL}", 110, 240),
    Stage("backends", "python -m benchmarks.kernels.backends", 150, 300),
    Stage(
        "memcheck",
        f"{MEMCHECK} python -m pytest -v --timeout 0 -m gpu -k 'not graph and not captured' {KERNEL_TESTS}",
        500,
        590,
    ),
)


def run(stage: Stage, log: Path, limit_s: float) -> str:
    """Runs a stage in a process group of its own and says how it ended: ok, failed (n), or over time."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            stage.arguments, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "over time"
        finally:
            _end(process)
    return "ok" if code == 0 else f"failed ({code})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: engines leave children that hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(stages: Sequence[Stage], logs: Path, budget_s: float) -> dict[str, str]:
    """The outcome of each stage by name; a line is printed as each begins and ends."""
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    began = time.monotonic()
    for number, stage in enumerate(stages, 1):
        left = budget_s - (time.monotonic() - began)
        if left < stage.usual_s:
            outcomes[stage.name] = f"not begun: takes {stage.usual_s} s, {max(left, 0):.0f} s left"
            continue
        print(f"[{number}/{len(stages)}] {stage.name}: {stage.command}", flush=True)
        start = time.monotonic()
        outcome = run(stage, logs / f"{stage.name}.log", min(stage.limit_s, left))
        outcomes[stage.name] = f"{outcome} after {time.monotonic() - start:.0f} s"
        print(f"    {outcomes[stage.name]}", flush=True)
    return outcomes


def main() -> int:
    """Runs what was asked for and prints a table of outcomes."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="in this order")
    parser.add_argument("--budget", type=float, default=3600, help="seconds of the whole run")
    parser.add_argument("--logs", type=Path, default=Path("suite-logs"))
    options = parser.parse_args()
    by_name = {stage.name: stage for stage in STAGES}
    outcomes = run_all([by_name[name] for name in options.only], options.logs, options.budget)
    width = max(map(len, outcomes))
    for name, outcome in outcomes.items():
        print(f"{name:<{width}}  {outcome}")
    return int(any(not outcome.startswith(("ok", "not begun")) for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
