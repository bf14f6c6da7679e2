"""The comparison of engines runs on a CPU from the command line to its file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_peer_that_fails_leaves_the_figures_of_the_others(tmp_path: Path) -> None:
    """transformers refuses this shape: 6 heads do not divide a width of 64."""
    command = [sys.executable, "-m", "benchmarks.peers", "--device", "cpu", "--results", str(tmp_path)]
    command += ["--compare", "random:tiny", "transformers", "kvatlas", "--workloads", "b1:2"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=110)
    (path,) = tmp_path.glob("*-peers-tiny.json")
    figures = json.loads(path.read_text())["figures"]
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
