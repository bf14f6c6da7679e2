"""The served path: gRPC clients, services, the seam and a worker, all in processes of their own.

    python -m benchmarks.serving --model random:qwen3-0.6b            on a GPU, about two minutes
    python -m benchmarks.serving --model random:tiny --device cpu --scale 0.02

Cases, each against the same worker:
    offline256   all prompts at once, against the engine alone in the same run: the ratio of output tokens/s
    first-token  prompts of 512 ids one after another, against the engine alone: milliseconds to the first
    poisson      arrivals at several rates; time to first token and time between messages, percentiles
    long-prompt  one prompt of 32k ids while 64 streams are open: their time between messages
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, device_name, write_result
from benchmarks.serving_cases import CASES, Alone, Bench, client_processes
from benchmarks.stack import run_stack
from benchmarks.workloads import id_limit

PACKAGES = ("torch", "triton", "grpcio", "protobuf", "pyzmq", "uvloop")


def main() -> None:
    """Runs the cases, prints each row, and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rates", nargs="*", type=float, default=[8.0, 16.0, 32.0], help="of the arrivals")
    parser.add_argument("--services", type=int, default=1, help="service processes")
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--max-batch-tokens", type=int, default=0, help="0: the worker's own choice")
    parser.add_argument("--max-chunk-tokens", type=int, default=0, help="0: no limit")
    parser.add_argument("--no-engine-alone", action="store_true", help="nothing to compare with")
    parser.add_argument("--scale", type=float, default=1.0, help="shortens every workload")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    settings = engine_settings(options.device, options.scale)
    settings |= {"max_batch_tokens": options.max_batch_tokens, "max_chunk_tokens": options.max_chunk_tokens}
    alone = None
    if not options.no_engine_alone:
        with_offline = "offline256" in options.cases
        alone = engine_alone(options.model, settings, options.scale, with_offline=with_offline)
        print(alone, flush=True)
    rows: list[dict[str, Any]] = []
    flags = {name.replace("_", "-"): value for name, value in settings.items()}
    with (
        run_stack(options.model, flags, services=options.services) as stack,
        client_processes(stack, options.clients) as clients,
    ):
        print(f"ready after {stack.ready_seconds:.1f} s", flush=True)
        bench = Bench(clients, stack, alone, id_limit(options.model), options.scale, options.rates)
        for name in options.cases:
            for row in CASES[name](bench):
                rows.append(row)
                print(json.dumps(row), flush=True)
    figures = {"services": options.services, "clients": options.clients, "settings": settings, "rows": rows}
    name = f"serving-{options.model.removeprefix('random:')}"
    device = device_name() if options.device == "cuda" else ""
    print(write_result(name, figures, PACKAGES, options.results, device))


def engine_settings(device: str, scale: float) -> dict[str, Any]:
    """Of the worker and of the engine alone."""
    settings: dict[str, Any] = {"device": device, "page_size": 16, "max_running": 256}
    settings |= {"max_context": max(2048, int(34_000 * scale))}
    return settings | ({"memory_ratio": 0.8} if device == "cuda" else {"num_pages": 16_384})


def engine_alone(
    model: str, settings: dict[str, Any], scale: float, *, with_offline: bool, marks: str = ""
) -> Alone:
    """The engine without a service, in a process that is gone before the stack starts."""
    order = {"model": model, "settings": settings, "scale": scale, "with_offline": with_offline}
    order["marks"] = marks
    command = [sys.executable, "-m", "benchmarks.engine_alone", json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Alone(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
