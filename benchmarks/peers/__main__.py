"""kvatlas and its peers on the same workloads: started side by side, then measured in turns, one at a time.

    python -m benchmarks.peers --compare random:qwen3-0.6b kvatlas vllm
    python -m benchmarks.peers --compare random:qwen3-0.6b kvatlas mini_sglang \\
        --site mini_sglang=/opt/flashinfer:/opt/mini-sglang/python
    python -m benchmarks.peers --compare random:qwen3-0.6b kvatlas kvatlas_fp8 kvatlas_deterministic

Each engine has a process and a pool of keys and values in which it can hold every workload without preemption
or waiting. Their passes alternate, so that what drifts on a machine falls on all. Prints every pass as it
ends and the ratios at the end; writes one JSON per model in benchmarks/results/, anew after each pass, so
that what was measured is there whatever happens to the next; its name is variants-MODEL when every engine is
this one with some options, peers-MODEL otherwise.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES, ENVIRONMENT, VARIANTS
from benchmarks.peers.fleet import Entry, Fleet, Limits, Settings
from benchmarks.peers.rates import OURS, ratios
from benchmarks.peers.sizes import device_bytes, pool_tokens
from benchmarks.peers.table import markdown
from benchmarks.record import RESULTS, device_name, write_result
from benchmarks.workloads import named

DEFAULT = [["random:qwen3-0.6b", OURS, "vllm"]]
WORKLOADS = ["b1:3", "b8:3", "b64:3", "offline256:2", "first512:7", "first3584:7"]


def compare(
    fleet: Fleet, model: str, workloads: Sequence[tuple[str, int]], how: Mapping[str, Any], folder: Path
) -> Path:
    """Starts, measures and ends a model's engines, and returns the path of their result."""
    entries = fleet.of(model)
    while fleet.start(model):
        for entry in fleet.passes(model, workloads):
            if "ended" not in entry.found:
                row = entry.found["rows"][-1]
                rate = f"{row['tokens_per_second']:,.0f}/s in {row['seconds']:.4g} s"
                print(entry.name, row["workload"], "pass", row["pass"], rate, flush=True)
            _write(model, entries, how, folder)
        fleet.end(model)
    return _write(model, entries, how, folder)


def _write(model: str, entries: Sequence[Entry], how: Mapping[str, Any], folder: Path) -> Path:
    engines = {entry.engine: entry.found for entry in entries}
    figures = {"how": how, "engines": engines, "ratios": ratios(engines)}
    kind = "variants" if engines.keys() <= VARIANTS.keys() else "peers"
    name = f"{kind}-{model.removeprefix('random:')}"
    return write_result(name, figures, ["torch", "triton"], folder, how["device"])


def print_table(entries: Sequence[Entry]) -> None:
    """When each engine was ready, what ended it, and the rates side by side."""
    for entry in entries:
        ready = entry.found.get("ready_seconds", "-")
        print(f"{entry.name}: ready after {ready} s", entry.found.get("ended", ""))
    print(markdown({entry.engine: entry.found for entry in entries}))


def main() -> None:
    """Runs the comparisons and writes their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compare", nargs="+", action="append", metavar=("MODEL", "ENGINE"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument(
        "--workloads", nargs="+", default=WORKLOADS, metavar="NAME:PASSES", help=" ".join(WORKLOADS)
    )
    parser.add_argument(
        "--site", action="append", default=[], metavar="ENGINE=PATHS", help="where its packages are"
    )
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds until an engine is ready")
    parser.add_argument("--pass-limit", type=float, default=120.0, help="seconds of one pass")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds of everything")
    parser.add_argument(
        "--also-running", default="", metavar="TEXT", help="what else is on this host, for the file"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--logs", type=Path, help="folder of what the engines print")
    options = parser.parse_args()
    comparisons = [(model, engines) for model, *engines in options.compare or DEFAULT]
    names = {engine for _, engines in comparisons for engine in engines}
    if unknown := names - set(ENGINES):
        parser.error(f"no engine is called {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    passes = [(text.partition(":")[0], int(text.partition(":")[2] or 2)) for text in options.workloads]
    device = device_name() if options.device == "cuda" else ""
    memory = device_bytes() if device else 1 << 62
    tokens = {name: pool_tokens([named(workload) for workload, _ in passes], name) for name in sorted(names)}
    how = {
        "device": device,
        "pool_tokens": tokens,
        "passes": dict(passes),
        "order": "engines start side by side; each pass alone, engines in turns, others idle",
        "environment": {engine: ENVIRONMENT[engine] for engine in sorted(names & set(ENVIRONMENT))},
        "cores": len(os.sched_getaffinity(0)),
        "also_running": options.also_running,
    }
    with tempfile.TemporaryDirectory(prefix="kvatlas-logs-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        limits = Limits(options.start_limit, options.pass_limit, options.limit, memory)
        sites = dict(site.split("=", 1) for site in options.site)
        fleet = Fleet(comparisons, Settings(options.device, tokens, limits, logs, sites))
        try:
            for model, _ in comparisons:
                path = compare(fleet, model, passes, how, options.results)
                print_table(fleet.of(model))
                print(path, flush=True)
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
