"""The benchmark of the service runs, loses no token and merges as it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import percentile

ROOT = Path(__file__).resolve().parents[2]


def test_percentiles_are_values_of_the_list() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 5.0, 5.0]


@pytest.mark.model
@pytest.mark.slow
def test_every_token_arrives_and_messages_hold_as_many_as_were_asked_for(
    model_path: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "benchmarks.streaming", "--only", "merged", "--seconds", "0.3"]
    command += ["--model", str(model_path), "--service-core", "-1", "--results", str(tmp_path)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=100)
    (path,) = tmp_path.glob("*-streaming.json")
    rows = json.loads(path.read_text())["figures"]["rows"]
    assert [row["tokens_per_message"] for row in rows] == [1, 2, 4, 8, 16]
    for row in rows:
        assert row["tokens_per_message_seen"] == pytest.approx(row["tokens_per_message"], rel=0.1)
        assert row["us_cpu_per_message"] > 0
        assert 0 < row["age_ms"]["p50"] <= row["age_ms"]["p99"] <= row["age_ms"]["max"]
