"""The comparison of engines runs on a CPU from the command line to its file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compare(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Name and figures of the one file that a comparison of b1 leaves."""
    command = [sys.executable, "-m", "benchmarks.peers", "--device", "cpu", "--results", str(folder)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=True, timeout=110)
    (path,) = folder.glob("*.json")
    document = json.loads(path.read_text())
    return document["name"], document["figures"]


@pytest.mark.slow
def test_a_peer_that_fails_leaves_the_figures_of_the_others(tmp_path: Path) -> None:
    """transformers refuses this shape: 6 heads do not divide a width of 64."""
    engines = ("random:tiny", "transformers", "kvatlas")
    name, figures = compare(tmp_path, "--compare", *engines, "--workloads", "b1:2")
    assert name == "peers-tiny"
    engines = figures["engines"]
    assert engines["transformers"] == {"rows": [], "ended": "exit 1"}
    assert [(row["workload"], row["pass"]) for row in engines["kvatlas"]["rows"]] == [("b1", 1), ("b1", 2)]
    assert all(row["output_tokens"] == 256 for row in engines["kvatlas"]["rows"])
    assert engines["kvatlas"]["options"]["num_pages"] * 16 == figures["how"]["pool_tokens"]["kvatlas"] == 4096
    assert engines["kvatlas"]["beside"] == []
    assert figures["how"]["cores"] >= 1
    slowest = engines["kvatlas"]["rows"][0]["slowest_turns"]["decode"]
    assert [turn["ms"] for turn in slowest] == sorted((turn["ms"] for turn in slowest), reverse=True)
    assert figures["ratios"] == {"transformers": {}}


@pytest.mark.slow
def test_this_engine_with_other_options_is_measured_beside_itself(tmp_path: Path) -> None:
    """In a file of its own: not one of peers."""
    engines = ("random:tiny", "kvatlas", "kvatlas_deterministic")
    name, figures = compare(tmp_path, "--compare", *engines, "--workloads", "b1:1")
    assert name == "variants-tiny"
    options = {engine: found["options"].get("deterministic") for engine, found in figures["engines"].items()}
    assert options == {"kvatlas": None, "kvatlas_deterministic": True}
    assert figures["ratios"]["kvatlas_deterministic"]["b1"]["first"] > 0
