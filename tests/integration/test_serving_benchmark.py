"""The benchmarks of the served path and of the start run on a CPU; their figures fit together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.long_prompt_path import MOST_MARKS, read_steps, within
from benchmarks.serving_path import ALONE, FIRST, SENT, STATIONS, WAYS

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--model", "random:tiny", "--device", "cpu")


def run_benchmark(module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *TINY, "--results", str(folder), *arguments]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=110)
    (path,) = folder.glob(f"*-{module.replace('_', '-')}-tiny.json")
    figures: dict[str, Any] = json.loads(path.read_text())["figures"]
    return figures


@pytest.mark.slow
def test_every_case_of_the_served_path_gives_its_figures(tmp_path: Path) -> None:
    arguments = ("--scale", "0.02", "--clients", "2", "--rates", "1", "--services", "2")
    rows = run_benchmark("serving", tmp_path, *arguments)["rows"]
    assert [row["case"] for row in rows] == ["offline8", "first-token", "poisson", "long-prompt"]
    offline, first_token, poisson, long_prompt = rows
    assert offline["ratio"] == pytest.approx(
        offline["tokens_per_second"] / offline["engine_alone_tokens_per_second"], rel=1e-3
    )
    assert len(offline["cores"]) == 3  # two services and the worker
    for way in (first_token, first_token["in_turn"]):
        difference = way["first_token_ms"]["p50"] - way["engine_alone_ms"]
        assert way["added_ms"] == pytest.approx(difference, abs=0.02)
    assert poisson["requests"] >= 2
    assert long_prompt["prompt_tokens"] == 640
    assert long_prompt["open_streams"] == 64
    assert long_prompt["first_token_ms_of_the_long_prompt"] > 0
    for gap in long_prompt["largest_of_one_stream"]:
        assert 0 <= gap["at_ms"] <= long_prompt["first_token_ms_of_the_long_prompt"] + 0.1
        assert 0 < gap["ms"] <= long_prompt["during_ms"]["max"] + 0.1
        assert gap["tokens"] >= 1
    assert long_prompt["tokens_per_message_during"] >= 1


@pytest.mark.slow
def test_the_stations_of_a_first_token_are_passed_in_order(tmp_path: Path) -> None:
    figures = run_benchmark("serving_path", tmp_path, "--scale", "0.1")
    for way in WAYS:
        alone, served = figures["alone"][way], figures["served"][way]
        assert [row["station"] for row in alone] == list(ALONE)
        assert [row["station"] for row in served] == [SENT, *STATIONS, FIRST]
        assert all(0 <= row["p50"] <= row["p90"] for row in [*alone, *served])
        assert served[-1]["total_p50"] > 0 < alone[-1]["total_p50"]


@pytest.mark.slow
def test_two_starts_are_measured_to_their_first_token(tmp_path: Path) -> None:
    first, second = run_benchmark("startup", tmp_path)["starts"]
    for start in (first, second):
        assert 0 < start["ready_seconds"] < start["first_token_seconds"] < 60
        events = [entry["event"] for entry in start["timeline"] if "event" in entry]  # others are phases
        assert events.index("listening") < events.index("ready")


@pytest.mark.slow
def test_the_longest_gaps_beside_a_long_prompt_are_told_with_their_steps(tmp_path: Path) -> None:
    figures = run_benchmark("long_prompt_path", tmp_path, "--scale", "0.05")
    assert figures["usual_step_ms"] > 0
    assert figures["largest_of_one_stream"]
    for gap in figures["largest_of_one_stream"]:
        before = [mark["before_ms"] for mark in gap["stations"]]
        assert before == sorted(before, reverse=True)
        assert {"launched", "committed"} <= {mark["station"] for mark in gap["stations"]}


def test_stations_within_a_gap_are_told_by_when_they_were_passed_before_its_end(tmp_path: Path) -> None:
    worker = [["scheduled", 1_000_000], ["engine has it", 1_500_000], ["launched", 4_000_000]]
    (tmp_path / "worker.marks").write_text(json.dumps(worker))
    (tmp_path / "service.marks").write_text(json.dumps([["service has token", 3_000_000]]))
    marks = read_steps(tmp_path)
    assert within(marks, 1_000_000, 3_500_000) == [
        {"station": "scheduled", "before_ms": 2.5},
        {"station": "service has token", "before_ms": 0.5},
    ]
    assert within(marks, 3_500_000, 4_000_000) == [{"station": "launched", "before_ms": 0.0}]
    many = [(at, "launched") for at in range(2 * MOST_MARKS)]
    assert len(within(many, 0, 2 * MOST_MARKS)) == MOST_MARKS
