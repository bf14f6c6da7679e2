"""The result of a comparison as the table that docs/benchmarks.md shows.

python -m benchmarks.peers.table benchmarks/results/2026-11-30-x86_64-H200-peers-qwen3-0.6b.json
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.rates import KINDS, OURS, rates_by_workload, ratios
from benchmarks.workloads import FIRST_TOKEN

NAMES = {
    "vllm": "vLLM",
    "mini_sglang": "mini-sglang",
    "kvatlas_fp8_weights": "fp8 weights",
    "kvatlas_fp8_pages": "fp8 pages",
    "kvatlas_fp8": "fp8 weights and pages",
    "kvatlas_deterministic": "deterministic",
}


def markdown(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per workload and kind of pass: output tokens a second of each engine, ours over each peer.

    A workload of one token shows its milliseconds instead.
    """
    peers = [engine for engine in engines if engine != OURS]
    names = [NAMES.get(peer, peer) for peer in peers]
    heads = ["workload", "pass", OURS, *names, *(f"over {name}" for name in names)]
    rates = {engine: rates_by_workload(found["rows"]) for engine, found in engines.items()}
    over = ratios(engines)
    lines = [heads, ["---"] * len(heads)]
    for workload, ours in rates.get(OURS, {}).items():
        for kind in KINDS:
            if kind not in ours:
                continue
            cells = [_rate(workload, rates[engine].get(workload, {}).get(kind)) for engine in (OURS, *peers)]
            found = [over[peer].get(workload, {}).get(kind) for peer in peers]
            cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in found]
            lines.append([workload if kind == KINDS[0] else "", kind, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rate(workload: str, rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{1000 / rate:.1f} ms" if workload.startswith(FIRST_TOKEN) else f"{rate:,.0f}"


def main() -> None:
    """Prints the table of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        print(f"`{path.name}`\n\n{markdown(json.loads(path.read_text())['figures']['engines'])}\n")


if __name__ == "__main__":
    main()
