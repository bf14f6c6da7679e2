"""Everything a GPU host shows, in one call: the GPU tests, then every measurement, each with its own limit.

    python -m benchmarks.suite
    python -m benchmarks.suite --only peers startup-0.6b --budget 560

Tests need the device right, not alone: their files run in several processes at once. Measurements run one
after another. A stage that fails or runs out of its time is named at the end and does not stop the others.
What does not fit into the rest of `--budget` is not begun and named too. Output of a command: one file in
`--logs`; its figures: the JSON that its benchmark writes. Ends with 1 if a stage failed.
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
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SMALL, LARGE = "random:qwen3-0.6b", "random:llama-3.1-8b"
VARIANTS = "kvatlas kvatlas_fp8_weights kvatlas_fp8_pages kvatlas_fp8 kvatlas_deterministic"
PYTEST = "python -m pytest -v --tb=short -p no:cacheprovider --timeout 0 --maxfail 5"
# As `make memcheck`: a read past a tensor would hit the next one of the caching allocator.
MEMCHECK = (
    "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no"
    " --target-processes all --error-exitcode 9 --launch-timeout 0"
)
EAGER = "not graph and not captured and not chain"  # graphs need the caching allocator
TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"
# The longest first, so that none begins last.
KERNEL_TESTS = ("attention", "sample_kernel", "paged_cuda", "small_kernels")
MEMCHECKED = (
    "attention",
    "cluster_decode",
    "decode_product",
    "decode_stretches",
    "ring_product",
    "sample_kernel",
    "sliced_product",
    "small_kernels",
)
LONG_ENGINE_TESTS = ("engine", "fp8")
AT_ONCE = 4  # processes of a stage of tests


@dataclass(frozen=True, slots=True)
class Stage:
    """Commands by name, `at_once` of them at a time; seconds it takes on one H200 and may take."""

    name: str
    commands: Mapping[str, str]
    usual_s: int
    limit_s: int
    at_once: int = 1


def _engine_tests() -> list[str]:
    """All that are not of kernels."""
    there = {path.stem.removeprefix("test_").removesuffix("_gpu") for path in TESTS.glob("test_*_gpu.py")}
    return [*LONG_ENGINE_TESTS, *sorted(there - {*LONG_ENGINE_TESTS, *KERNEL_TESTS})]


def _file(test: str) -> str:
    return f"tests/gpu/test_{test}_gpu.py"


def _tests(name: str, tests: Iterable[str], usual_s: int, limit_s: int) -> Stage:
    commands = {f"{name}-{test}": f"{PYTEST} -m gpu {_file(test)}" for test in tests}
    return Stage(name, commands, usual_s, limit_s, AT_ONCE)


def _alone(name: str, command: str, usual_s: int, limit_s: int) -> Stage:
    return Stage(name, {name: f"python -m benchmarks.{command}"}, usual_s, limit_s)


def _memcheck(test: str) -> str:
    return f"{MEMCHECK} {PYTEST} -m 'gpu and not slow' -k '{EAGER}' {_file(test)}"


STAGES: tuple[Stage, ...] = (
    _tests("tests-kernels", KERNEL_TESTS, 250, 590),
    _tests("tests-engine", _engine_tests(), 300, 590),
    Stage("memcheck", {f"memcheck-{test}": _memcheck(test) for test in MEMCHECKED}, 400, 590, AT_ONCE),
    _alone("peers", f"peers --compare {SMALL} kvatlas vllm --compare {LARGE} kvatlas vllm", 330, 590),
    _alone("startup-0.6b", f"startup --model {SMALL}", 60, 150),
    _alone("startup-8b", f"startup --model {LARGE}", 90, 200),
    _alone("serving", f"serving --model {SMALL}", 150, 300),
    _alone("variants-0.6b", f"peers --compare {SMALL} {VARIANTS}", 140, 240),
    _alone("variants-8b", f"peers --compare {LARGE} {VARIANTS}", 310, 480),
    _alone("observation", f"observation --device cuda --model {SMALL}", 110, 240),
    _alone("backends", "kernels.backends", 150, 300),
)


def arguments(command: str) -> list[str]:
    """The words of a command; `python` is this interpreter."""
    return [sys.executable if word == "python" else word for word in shlex.split(command)]


def run(command: str, log: Path, limit_s: float) -> str:
    """Runs a command in a process group of its own; how it ended: ok, failed (n), or over time."""
    if limit_s <= 0:
        return "over time"
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments(command), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
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


def run_stage(stage: Stage, logs: Path, limit_s: float) -> str:
    """ok, or what became of each command that is not; then what pytest counted, over all commands."""
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(stage.at_once) as pool:
        ends = {
            name: pool.submit(
                lambda name=name, command=command: run(
                    command, logs / f"{name}.log", deadline - time.monotonic()
                )
            )
            for name, command in stage.commands.items()
        }
    outcomes = {name: end.result() for name, end in ends.items()}
    bad = {name: outcome for name, outcome in outcomes.items() if outcome != "ok"}
    if len(stage.commands) == 1:
        text = next(iter(outcomes.values()))
    else:
        text = "; ".join(f"{name} {outcome}" for name, outcome in bad.items()) or "ok"
    counts = count_tests(logs / f"{name}.log" for name in stage.commands)
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
        print(f"[{number}/{len(stages)}] {stage.name}: {'; '.join(stage.commands)}", flush=True)
        start = time.monotonic()
        outcome = run_stage(stage, logs, min(stage.limit_s, left))
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
