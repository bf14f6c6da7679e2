"""kvatlas and its peers on the same workloads, each alone on the GPU, one after the other.

    python -m benchmarks.peers --model random:qwen3-0.6b --peers kvatlas vllm
    python -m benchmarks.peers --peers kvatlas mini_sglang --site mini_sglang=/opt/flashinfer:/opt/minisgl

Prints every pass as it ends and the ratios at the end; writes one JSON in benchmarks/results/, anew after
each engine, so that what was measured is there whatever happens to the next.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.child import MARK
from benchmarks.peers.engines import ENGINES, ENVIRONMENT
from benchmarks.record import RESULTS, device_name, write_result

OURS = "kvatlas"
FEW = {"transformers": ["b1"]}  # workloads of an engine that takes them one by one
LOG_LINES = 15


def run_engine(
    engine: str, model: str, device: str, workloads: list[str], sites: str, limit_seconds: float
) -> dict[str, Any]:
    """Rows of one engine, and what kept it from more."""
    found: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory(prefix="kvatlas-peers-") as scratch:
        command = ["env", *(f"{name}={value}" for name, value in ENVIRONMENT.get(engine, {}).items())]
        command += [f"PYTHONPATH={':'.join([*filter(None, sites.split(':')), *filter(None, sys.path)])}"]
        command += [sys.executable, "-m", "benchmarks.peers.child", engine, model, device, scratch]
        command += [name for name in workloads if name in FEW.get(engine, workloads)]
        with _child(command, limit_seconds) as process:
            tail: list[str] = []
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith(MARK):
                    tail = [*tail, line.rstrip()][-LOG_LINES:] if line.strip() else tail
                    continue
                message = json.loads(line.removeprefix(MARK))
                print(engine, json.dumps(message), flush=True)
                if "workload" in message:
                    found["rows"].append(message)
                else:
                    found |= message
        if process.returncode:
            found["ended"] = f"exit {process.returncode}"
            print(
                engine, "ended with", process.returncode, "\n".join(line[:300] for line in tail), flush=True
            )
    return found


@contextlib.contextmanager
def _child(command: list[str], limit_seconds: float) -> Iterator["subprocess.Popen[str]"]:
    """A process that is killed after its time; its output and errors are one stream."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    timer = threading.Timer(limit_seconds, process.kill)
    timer.start()
    try:
        yield process
        process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def ratios(engines: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ours over each peer, by workload and pass: `{"vllm": {"b1 pass 2": 2.1}}`."""
    ours = _rates(engines.get(OURS, {"rows": []}))
    return {
        peer: {key: round(ours[key] / rate, 3) for key, rate in _rates(found).items() if key in ours}
        for peer, found in engines.items()
        if peer != OURS
    }


def _rates(found: dict[str, Any]) -> dict[str, float]:
    return {f"{row['workload']} pass {row['pass']}": row["tokens_per_second"] for row in found["rows"]}


def main() -> None:
    """Runs the engines and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--peers", nargs="+", default=[OURS, "vllm"], choices=list(ENGINES))
    parser.add_argument("--workloads", nargs="+", default=["b1", "b8", "b64", "offline256"])
    parser.add_argument(
        "--site", action="append", default=[], metavar="ENGINE=PATHS", help="where its packages are"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one engine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    sites = dict(site.split("=", 1) for site in options.site)
    engines: dict[str, dict[str, Any]] = {}
    device = device_name() if options.device == "cuda" else ""
    name = f"peers-{options.model.removeprefix('random:')}"
    for engine in options.peers:
        engines[engine] = run_engine(
            engine, options.model, options.device, options.workloads, sites.get(engine, ""), options.limit
        )
        figures = {"engines": engines, "ratios": ratios(engines)}
        path = write_result(name, figures, ["torch", "triton"], options.results, device)
    for peer, row in ratios(engines).items():
        print(f"{OURS} over {peer}: {row}")
    print(path)


if __name__ == "__main__":
    main()
